# SPDX-License-Identifier: Apache-2.0
"""What is wanted of the figures, as ratios within one run; and whether it is so."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from .record import Goal, Result, Run

LIMIT = 1.5
BY_HAND = {"hot": 4.0, "ddp": 4.0, "cold": 10.0}
BY_HAND_GB = 4.0
RESTART = 20.0
COLD_ADDS = 1.10
UNACCOUNTED = 0.05


def judge(run: Run) -> None:
    """Fill in the goals of every case, and of the run."""
    for result in run.cases:
        result.goals = list(of_case(result, run.slow_down_allowed))
    run.goals = [_worst(name, run.cases) for name in _names(run.cases)]
    run.goals += cold_adds(run.cases)
    failed = [f"{r.case.name}, {what}: {why}" for r in run.cases for what, why in r.failed.items()]
    if failed:
        seen = f"{len(failed)} failed"
        run.goals.insert(0, Goal("everything could be measured", "yes", seen, False,
                                 "; ".join(failed)))  # fmt: skip


def of_case(result: Result, slow_down_allowed: float) -> Iterable[Goal]:
    """Those that concern it."""
    if not result.moves:
        return
    case, where = result.case, time_goes(result)
    if result.ratio_to_limit is not None:
        yield _at_most("downtime against the limit", result.ratio_to_limit, LIMIT, "×", where)
    if result.ratio_to_limit_strict is not None:
        yield _at_most("downtime against the strict limit", result.ratio_to_limit_strict, LIMIT,
                       "×", where)  # fmt: skip
    if result.ratio_by_hand is not None and case.gb == BY_HAND_GB:
        name = f"shorter than by hand, {BY_HAND_GB:g} GB {case.kind}"
        wanted = BY_HAND[case.kind]
        yield _at_least(name, result.ratio_by_hand, wanted,
                        _even_the_limit(result, by_hand_s(result), wanted) or where)  # fmt: skip
    if result.ratio_checkpoint_restart is not None:
        seen = result.ratio_checkpoint_restart
        yield _at_least("shorter than checkpoint-restart", seen, RESTART,
                        _even_the_limit(result, restart_s(result), RESTART) or where)  # fmt: skip
    if result.slow_down is not None:
        name = "slower while pre-copying"
        yield _at_most(name, 100 * result.slow_down, 100 * slow_down_allowed, " %", "")
    else:
        yield Goal("slower while pre-copying", f"≤ {100 * slow_down_allowed:g} %", "–", None,
                   "pre-copy took fewer than three steps, or there was none")  # fmt: skip
    if result.identical is not None:
        yield Goal("equal to the bit", "yes", "yes" if result.identical else "no",
                   result.identical, result.difference)  # fmt: skip
    if result.unaccounted_share is not None:
        share = 100 * abs(result.unaccounted_share)
        yield _at_most("of the downtime unaccounted", share, 100 * UNACCOUNTED, " %", "")


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
        found.append(_at_most(name, ratio, COLD_ADDS, "×", time_goes(most)))
    return found


def time_goes(result: Result, rows: int = 3) -> str:
    """The phases with most of the downtime, in words."""
    if not result.downtime_s:
        return ""
    shares = [(row.own_s / result.downtime_s, row.name) for row in result.phases]
    shares.append(((result.unaccounted_s or 0.0) / result.downtime_s, "unaccounted"))
    most = sorted(shares, reverse=True)[:rows]
    return "time goes to " + ", ".join(f"{name} {100 * share:.0f} %" for share, name in most)


def _even_the_limit(result: Result, other_s: float | None, wanted: float) -> str:
    """That no move could reach the goal, if so."""
    if not result.limit or not other_s or other_s / result.limit.seconds >= wanted:
        return ""
    return f"even the limit would be {other_s / result.limit.seconds:.1f} ×"


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
    reason = "; ".join(f"{r.case.name}: {g.seen}" + (f", {g.reason}" if g.reason else "")
                       for r, g in missed)  # fmt: skip
    return Goal(name, wanted, seen, not missed, reason)


def _at_most(name: str, seen: float, wanted: float, unit: str, reason: str) -> Goal:
    met = seen <= wanted
    return Goal(name, f"≤ {wanted:g}{unit}", f"{seen:.2f}{unit}", met, "" if met else reason)


def _at_least(name: str, seen: float, wanted: float, reason: str) -> Goal:
    met = seen >= wanted
    return Goal(name, f"≥ {wanted:g} ×", f"{seen:.1f} ×", met, "" if met else reason)


def by_hand_s(result: Result) -> float | None:
    return median(h.downtime_s for h in result.by_hand) if result.by_hand else None


def restart_s(result: Result) -> float | None:
    return median(r.seconds for r in result.restarts) if result.restarts else None
