# SPDX-License-Identifier: Apache-2.0
"""What is wanted of the figures, as ratios within one run; and whether it is so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from bench_record import Goal, at_most

from .record import Result, Run

BEST, FULL_DUMP_S = 1.3, 0.2
"""Lost time against the least of all ways, and above that of a full dump."""
BY_HAND = {"hot": 2.0, "ddp": 2.0, "cold": 3.0}
BY_HAND_GB = 1.0
RESTART = 20.0
EMPTY, EMPTY_S, EMPTY_RATE = 2.0, 2.0, 400e6
"""Times the bytes over the link's rate, and seconds besides; without a limit of the link bytes of
memory per second."""
CPU_S = 1.5
"""Per GB, both ends together."""
LIMIT = 1.5
COLD_ADDS = 1.10
LEAST_S = 0.02
"""Of lost time: less is noise of the step log."""
UNACCOUNTED = 0.05
TAUGHT, PREDICTED, PREDICTED_SHARE = 3, 0.3, 0.8
"""After TAUGHT moves of a case, PREDICTED_SHARE of the predictions of lost time must be wrong by at
most PREDICTED of it."""


def judge(run: Run) -> None:
    """Fill in the goals of every case, and of the run."""
    for result in run.cases:
        others = [r for r in run.cases if r.case.shared == result.case.shared and r.moves]
        result.goals = [*of_cost(result, others), *of_case(result)]
    run.goals = [_worst(name, run.cases) for name in _names(run.cases)]
    run.goals += cold_adds(run.cases)
    run.goals += [*of_predictions(run.cases), *of_drains(run)]
    failed = [f"{r.case.name}, {what}: {why}" for r in run.cases for what, why in r.failed.items()]
    if failed:
        seen = f"{len(failed)} failed"
        run.goals.insert(
            0, Goal("everything could be measured", "yes", seen, False, "; ".join(failed))
        )


def of_cost(result: Result, others: Sequence[Result]) -> Iterable[Goal]:
    """Those of what a move costs; ``others``: the same job on the same link, by all ways. A way
    that was forced is held against nothing: it is there to be compared with."""
    lost = result.lost_s
    if lost is None or result.case.way != "auto":
        return
    forced = {r.case.way: r.lost_s for r in others if r.case.way != "auto" and r.lost_s is not None}
    if forced:
        least = min(*forced.values(), lost)
        words = ", ".join(f"{way} {seconds:.2f} s" for way, seconds in forced.items())
        seen = lost / least if least else 1.0
        yield at_most("lost time against the best way", seen, BEST, " ×", words)
    if "stop" in forced:
        above = lost - forced["stop"]
        yield at_most("lost time above a full dump", above, FULL_DUMP_S, " s", "")
    if result.by_hand_lost_s is not None and result.case.gb >= BY_HAND_GB:
        name = f"less lost than by hand, {result.case.kind} from {BY_HAND_GB:g} GB"
        yield _at_least(name, _times(result.by_hand_lost_s, lost), BY_HAND[result.case.kind], "")
    if result.restart_lost_s is not None:
        name = "less lost than by checkpoint-restart"
        yield _at_least(name, _times(result.restart_lost_s, lost), RESTART, "")
    yield from _of_resources(result)


def _of_resources(result: Result) -> Iterable[Goal]:
    """Time until the host is empty, CPU time."""
    memory, empty = result.memory_bytes, result.empty_s
    if memory and empty and result.limit:
        if result.case.link == "unlimited":
            rate = memory / empty / 1e6
            met = rate * 1e6 >= EMPTY_RATE
            yield Goal(
                "host empty, unlimited link",
                f"≥ {EMPTY_RATE / 1e6:g} MB/s",
                f"{rate:.0f} MB/s",
                met,
                "" if met else f"{empty:.1f} s",
            )
        else:
            allowed = EMPTY * memory / result.limit.rate + EMPTY_S
            name = f"host empty, against {EMPTY:g} × bytes / link + {EMPTY_S:g} s"
            yield at_most(name, empty / allowed, 1.0, " ×", f"{empty:.1f} s")
    if result.cpu_s_per_gb is not None:
        least = result.cpu_limit_s_per_gb
        words = f"a bare loop takes {least:.2f} s" if least is not None else ""
        yield at_most("CPU of both ends", result.cpu_s_per_gb, CPU_S, " s/GB", words)


def _times(other: float, lost: float) -> float:
    """How many times as much; a loss below what can be told counts as that."""
    return other / max(lost, LEAST_S)


def of_case(result: Result) -> Iterable[Goal]:
    """Those of its pause, and of what has come of it."""
    if not result.moves:
        return
    where = time_goes(result)
    if result.ratio_to_limit is not None:
        yield at_most("downtime against the limit", result.ratio_to_limit, LIMIT, "×", where)
    if result.ratio_to_limit_strict is not None:
        yield at_most(
            "downtime against the strict limit", result.ratio_to_limit_strict, LIMIT, "×", where
        )
    if result.identical is not None:
        yield Goal(
            "equal to the bit",
            "yes",
            "yes" if result.identical else "no",
            result.identical,
            result.difference,
        )
    if result.unaccounted_share is not None:
        share = 100 * abs(result.unaccounted_share)
        yield at_most("of the downtime unaccounted", share, 100 * UNACCOUNTED, " %", "")


def cold_adds(cases: list[Result]) -> list[Goal]:
    """What the most cold memory adds to the downtime of the least, on each link."""
    found = []
    for link in dict.fromkeys(r.case.link for r in cases):
        cold = [r for r in cases if r.case.kind == "cold" and r.case.link == link and r.moves]
        cold.sort(key=lambda r: r.case.gb)
        if len(cold) < 2:
            continue
        least, most = cold[0], cold[-1]
        assert least.downtime_s is not None
        assert most.downtime_s is not None
        name = f"downtime of {most.case.gb:g} GB cold against {least.case.gb:g} GB, {link}"
        ratio = most.downtime_s / least.downtime_s if least.downtime_s else 1.0
        found.append(at_most(name, ratio, COLD_ADDS, "×", time_goes(most)))
    return found


def of_predictions(cases: Sequence[Result]) -> Iterable[Goal]:
    """Compare lost time with its prediction, for moves whose way liveshift chose. The first moves
    of each case do not count: they teach the model."""
    predictions = [
        (result.case.name, move.predicted_lost_s, move.lost_s)
        for result in cases
        if result.case.way == "auto"
        for move in result.moves[TAUGHT:]
        if move.predicted_lost_s is not None
    ]
    if not predictions:
        return
    wrong = [
        f"{name}: {predicted:.2f} s predicted, {lost:.2f} s lost"
        for name, predicted, lost in predictions
        if abs(predicted - lost) > PREDICTED * lost
    ]
    good = len(predictions) - len(wrong)
    yield Goal(
        f"lost time predicted within {100 * PREDICTED:g} %",
        f"{100 * PREDICTED_SHARE:g} %",
        f"{good} of {len(predictions)} moves",
        good >= PREDICTED_SHARE * len(predictions),
        "; ".join(wrong),
    )


def of_drains(run: Run) -> Iterable[Goal]:
    """Compare drains with their plans, and the jobs with a run that nobody touched."""
    if not run.drains:
        return
    promised = [drain for drain in run.drains if not drain.late]
    broken = [
        f"{d.capsules} within {d.within_s:g} s: planned {d.planned_s:.1f} s, took {d.empty_s:.1f} s"
        for d in promised
        if not d.in_time
    ]
    kept = f"{len(promised) - len(broken)} of {len(promised)}"
    reason = "; ".join(broken)
    yield Goal("empty in time where the plan said so", "all", kept, not broken, reason)
    count, difference = f"{len(run.drains)} drains", run.drained_difference
    yield Goal("drained jobs equal to the bit", "yes", count, not difference, difference)


def time_goes(result: Result, rows: int = 3) -> str:
    """The phases with most of the downtime, in words."""
    if not result.downtime_s:
        return ""
    shares = [(row.own_s / result.downtime_s, row.name) for row in result.phases]
    shares.append(((result.unaccounted_s or 0.0) / result.downtime_s, "unaccounted"))
    most = sorted(shares, reverse=True)[:rows]
    return "time goes to " + ", ".join(f"{name} {100 * share:.0f} %" for share, name in most)


def _names(cases: list[Result]) -> list[str]:
    return list(dict.fromkeys(goal.name for result in cases for goal in result.goals))


def _worst(name: str, cases: list[Result]) -> Goal:
    """One goal over all cases: how many met it, and the one that is furthest from it."""
    told = [(r, g) for r in cases for g in r.goals if g.name == name]
    known = [(r, g) for r, g in told if g.met is not None]
    wanted = told[0][1].wanted
    if not known:
        return Goal(name, wanted, "–", None, told[0][1].reason)
    missed = [(r, g) for r, g in known if not g.met]
    seen = f"{len(known) - len(missed)} of {len(known)} cases"
    reason = "; ".join(
        f"{r.case.name}: {g.seen}" + (f", {g.reason}" if g.reason else "") for r, g in missed
    )
    return Goal(name, wanted, seen, not missed, reason)


def _at_least(name: str, seen: float, wanted: float, reason: str) -> Goal:
    met = seen >= wanted
    return Goal(name, f"≥ {wanted:g} ×", f"{seen:.1f} ×", met, "" if met else reason)


def by_hand_s(result: Result) -> float | None:
    return median(h.downtime_s for h in result.by_hand) if result.by_hand else None


def restart_s(result: Result) -> float | None:
    return median(r.seconds for r in result.restarts) if result.restarts else None
