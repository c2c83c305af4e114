# SPDX-License-Identifier: Apache-2.0
"""The short form of ``make bench-move``: one small case; its figures are of real work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import journal_rows
import msgspec
import pytest
from bench_record import kept
from move_bench import page
from move_bench.__main__ import fresh
from move_bench.cases import Case, Effort, around, chosen, estimate, lacking
from move_bench.goals import of_cost, of_drains, of_predictions
from move_bench.moves import moved
from move_bench.record import FILE, Drain, Fixed, Limits, Result, Run
from move_bench.restart import kills
from move_bench.steps import gap, lost, noise, slow_down
from move_bench.story import CaseLab, bench

from liveshift.errors import Refused
from liveshift.runtime.messages import Cost, MigrationRow, Phase

pytestmark = pytest.mark.alone

CASE = Case("cold", 0.25, "10g")
EFFORT = Effort(moves=1, hands=1, restarts=1, every=20)


@pytest.fixture(scope="module")
def run(place: Path, new_lab_name: Callable[[], str]) -> Run:
    out = place / "bench"
    measured = fresh(EFFORT)
    bench(new_lab_name(), place, [CASE], measured, out / FILE, lambda _: None)
    page.write(measured, out)
    return measured


@pytest.mark.timeout(300)
def test_a_case_is_measured_and_is_real_work(run: Run, place: Path) -> None:
    (result,) = run.cases
    assert (result.failed, result.skipped) == ({}, {})
    (move,), (hand,), redone = result.moves, result.by_hand, result.restarts
    log = place / "bench" / FILE.removesuffix(".json") / f"{CASE.name}.jsonl"
    assert len(log.read_text().splitlines()) == result.steps >= 2 * around(CASE)
    assert result.bit_identical, result.difference
    assert result.resident_bytes > CASE.size
    # The image of a process of 0.25 GB: it went over the wire, and by hand as files.
    assert result.bytes is not None
    assert result.bytes > 0.6 * CASE.size
    assert hand.image_bytes > 0.6 * CASE.size
    # Each was frozen for what it did, and not for much else.
    assert 0.01 < move.downtime_s < move.seconds
    assert move.downtime_s == pytest.approx(move.frozen_s, abs=0.5)
    # What it cost: the pause at least, as far as the step log can show it, and about what liveshift
    # says. This job makes no collectives, and its run time does not show that memory is slower.
    # test_move_cost.py compares exactly, with a job that makes some.
    assert move.lost_s + move.unsure_s > 0.5 * move.downtime_s
    assert (move.why_not, result.not_measured) == ("", [])
    assert move.measured_s is not None
    assert move.measured_s == pytest.approx(move.lost_s, abs=0.5 + 0.25 * move.seconds)
    assert 0 < move.empty_s == move.seconds
    assert 0.5 * CASE.size < move.memory_bytes < 2 * CASE.size
    assert 0.05 < (move.cpu_source_s or 0) < 60
    assert 0.05 < (move.cpu_destination_s or 0) < 60
    assert 0.6 < (move.sent_share or 0) < 5
    # CRIU shares the cores with the job before it freezes it, and caches are cold after it.
    assert hand.downtime_s - 0.5 < hand.lost_s < hand.downtime_s + 3
    parts = hand.dump_s + hand.copy_s + hand.restore_s
    assert hand.downtime_s == pytest.approx(parts, abs=0.25)
    assert len(redone) == EFFORT.restarts
    for each, steps in zip(redone, kills(EFFORT.restarts, EFFORT.every), strict=True):
        assert each.seconds > each.first_step_s > 0.5, "an interpreter was started"
        assert each.checkpoint_bytes > 1_000_000
        assert steps <= each.lost_steps < EFFORT.every
    # What the phases do not explain is the rest of the downtime.
    told = sum(row.own_s for row in move.phases)
    assert told + move.unaccounted_s == pytest.approx(move.downtime_s, abs=1e-6)
    assert {"dump", "restore"} <= {row.name for row in move.phases if row.frozen}


def test_the_limit_and_the_ratios_follow_from_what_was_measured(run: Run) -> None:
    (result,) = run.cases
    assert result.limit is not None
    fixed = result.limit.fixed
    assert 0.2e9 < result.limit.rate < 1.3e9, "tbf holds the copy to 10 Gbit/s"
    assert 0.002 < fixed.sleep_s < fixed.torch_s
    assert fixed.torch_bytes > 20_000_000, "an interpreter with torch was dumped"
    assert result.limit.strict_s < result.limit.seconds
    assert result.downtime_s is not None
    assert result.ratio_to_limit == pytest.approx(result.downtime_s / result.limit.seconds)
    assert result.ratio_by_hand == pytest.approx(result.by_hand[0].downtime_s / result.downtime_s)
    assert result.ratio_checkpoint_restart == pytest.approx(
        median(each.seconds for each in result.restarts) / result.downtime_s
    )
    assert (result.job, result.gb, result.link, result.way) == ("cold", 0.25, "10g", "auto")
    assert result.lost_s == result.moves[0].lost_s
    assert result.pause_s == result.downtime_s
    assert result.by_hand_lost_s == result.by_hand[0].lost_s
    assert result.restart_lost_s == median(each.seconds for each in result.restarts)
    assert result.limit_s == result.limit.whole_s > result.limit.seconds - 1e-6
    assert result.cpu_s_per_gb is not None
    assert result.cpu_limit_s_per_gb is not None
    assert 0.1 < result.cpu_limit_s_per_gb < result.cpu_s_per_gb
    names = {goal.name for goal in run.goals}
    assert names >= {"CPU of both ends", "less lost than by checkpoint-restart"}
    assert {goal.name for goal in run.goals} >= {"downtime against the limit", "equal to the bit"}


def test_the_file_and_the_page_tell_it(run: Run, place: Path) -> None:
    read = msgspec.json.decode((place / "bench" / FILE).read_bytes(), type=Run)
    assert read == run
    assert read.complete
    html = (place / "bench" / page.FILE).read_text()
    assert "0.25 GB cold, 10 Gbit/s" in html
    assert "unaccounted" in html
    assert "src=" not in html, "it needs nothing else"
    assert "http" not in html


def test_a_run_goes_on_only_with_its_like(run: Run, tmp_path: Path) -> None:
    path = tmp_path / FILE
    assert kept(path, run) is None
    run.write(path)
    assert kept(path, run) is None, "it is complete"
    assert kept(path, run, more=True) == run
    half = msgspec.structs.replace(run, complete=False)
    half.write(path)
    assert kept(path, run) == half
    assert kept(path, msgspec.structs.replace(run, product="other code")) is None
    path.write_text("{")
    assert kept(path, run) is None


def test_kills_lie_evenly_between_two_checkpoints() -> None:
    assert kills(5, 100) == [10, 30, 50, 70, 90]
    assert kills(1, 30) == [15]
    assert max(kills(200, 100)) == 95, "not the next checkpoint"
    assert around(Case("cold", 8.0, "1g")) == 12
    assert around(Case("hot", 8.0, "1g")) == 5


def test_a_gap_is_the_time_without_a_step_that_holds_the_freeze() -> None:
    times = [100.0, 101, 102, 103, 110.5, 113, 114, 115, 116]
    seen = gap(times, held=105.0, since=103.2)
    assert (seen.start, seen.end, seen.step_s) == (103.0, 110.5, 1.0)
    assert seen.downtime_s == 6.5
    assert seen.full_speed_s == 2.5, "one step was slow"
    slow = gap([*times[:5], 113, 116, 119, 120, 121, 122], held=105.0, since=103.2)
    assert slow.full_speed_s == 8.5, "steps were slow until 119"
    with pytest.raises(AssertionError, match="none after it"):
        gap(times, held=117.0, since=103.2)


def test_a_slow_down_counts_parts_of_steps() -> None:
    times = [0.0, 1, 2, 3, 5, 7, 9, 10]
    assert slow_down(times, (3.0, 9.0), 1.0) == pytest.approx(0.5)
    assert slow_down(times, (2.0, 5.0), 1.0) == pytest.approx(1 / 3)
    assert slow_down(times, (3.0, 5.0), 1.0) is None, "too short to tell"


def test_lost_time_is_what_steps_took_more_than_others_did() -> None:
    """Steps of 1 s; a move from 103.2 to 109 with 2 s more at its pause, and steps of 1.5 s."""
    times = [100.0, 101, 102, 103, 104.5, 106, 109, 110, 111, 112, 113, 114]
    assert lost(times, 103.2, 109.0) == pytest.approx(3.0)
    assert lost([100.0 + n for n in range(20)], 103.2, 109.0) == 0.0
    # A step that is slow for its own reasons, before or after, says nothing of the others.
    assert lost([97.0, *times, 118, 119, 120], 103.2, 109.0) == pytest.approx(3.0)


def test_lost_time_is_as_unsure_as_the_job_is_uneven_when_nothing_moves() -> None:
    even = [100.0 + n for n in range(40)]
    assert noise(even, 110.2, 116.0) == 0.0
    # The window is that of 8 steps, from 110.5 to 118.5. One step before it took 0.5 s longer.
    uneven = [t + 0.5 if t > 105 else t for t in even]
    assert noise(uneven, 110.7, 116.5) == pytest.approx(0.5)
    assert noise(uneven, 110.7, 116.5, begin=106.0) == 0.0
    # Only 7 steps before: what they took too long would be more over 8.
    assert noise(uneven, 110.7, 116.5, begin=103.0) == pytest.approx(0.5 * 8 / 7)


def test_a_move_that_liveshift_did_not_measure_has_its_reason() -> None:
    row = msgspec.structs.replace(
        a_late_row(), cost=Cost(None, None, None, 10.0, 1.0, 0.5, 100, 200, "it was <young>")
    )
    times = [97.0, 98, 99, 100, 101, 102, 103, 104, 105, 106, 107, 110, 111, 112, 113, 114]
    result = Result(CASE, moves=[moved(each, times, 96.0) for each in (row, row, a_late_row())])
    run = fresh(EFFORT)
    run.cases.append(result)
    result.sum_up()
    unsaid = "liveshift did not say within 15 s"
    assert (result.measured_s, result.not_measured) == (None, ["it was <young>", unsaid])
    html = page.render(run)
    assert "liveshift did not measure what a move cost: it was &lt;young&gt;" in html


def costing(way: str, lost_s: float, **more: float) -> Result:
    result = Result(Case("cold", 4.0, "unlimited", way))
    result.lost_s = lost_s
    for name, value in more.items():
        setattr(result, name, value)
    return result


def test_the_choice_is_held_against_each_way() -> None:
    ways = [costing("auto", 1.5), costing("stop", 1.2), costing("rounds", 1.0)]
    met = {goal.name: goal.met for goal in of_cost(ways[0], ways)}
    assert met == {"lost time against the best way": False, "lost time above a full dump": False}
    ways[0].lost_s = 1.25
    assert all(goal.met for goal in of_cost(ways[0], ways))
    assert list(of_cost(ways[1], ways)) == [], "a forced way is there to be compared with"


def test_what_others_lose_and_what_a_move_takes_are_goals() -> None:
    result = costing(
        "auto",
        1.0,
        by_hand_lost_s=2.9,
        restart_lost_s=21.0,
        cpu_s_per_gb=1.4,
        empty_s=11.0,
        memory_bytes=4e9,
    )
    result.limit = Limits(1e9, Fixed(0.01, 0.1, 30_000_000))
    met = {goal.name: goal.met for goal in of_cost(result, [result])}
    assert met == {
        "less lost than by hand, cold from 1 GB": False,
        "less lost than by checkpoint-restart": True,
        "host empty, unlimited link": False,
        "CPU of both ends": True,
    }
    narrow = costing("auto", 1.0, empty_s=9.0, memory_bytes=4e9)
    narrow.case = Case("cold", 4.0, "10g")
    narrow.limit = result.limit
    assert [goal.met for goal in of_cost(narrow, [narrow])] == [True]


def test_predictions_of_lost_time_count_once_the_model_has_learnt() -> None:
    times = [97.0, 98, 99, 100, 101, 102, 103, 104, 105, 106, 107, 110, 111, 112, 113, 114]
    move = moved(a_late_row(), times, 96.0)
    assert move.lost_s > 0
    shares = [9.0, 9.0, 9.0, 1.0, 0.75, 1.25, 1.2, 1.4]
    moves = [msgspec.structs.replace(move, predicted_lost_s=s * move.lost_s) for s in shares]
    (goal,) = of_predictions([Result(CASE, moves=moves)])
    assert (goal.seen, goal.met) == ("4 of 5 moves", True), goal.reason
    (goal,) = of_predictions([Result(CASE, moves=[*moves, moves[0], moves[0]])])
    assert goal.met is False
    assert "9.0" not in goal.seen
    assert list(of_predictions([Result(CASE, moves=moves[:3])])) == []


def test_a_drain_must_be_in_time_only_where_its_plan_says_so() -> None:
    run = fresh(EFFORT)
    assert list(of_drains(run)) == []
    run.drains = [
        Drain(1, 5.0, planned_s=2.0, late=0, empty_s=2.5, in_time=True, together=False),
        Drain(4, 2.0, planned_s=6.0, late=3, empty_s=6.5, in_time=False, together=True),
    ]
    first, alike = of_drains(run)
    assert (first.seen, first.met, alike.met) == ("1 of 1", True, True)
    run.drains.append(Drain(2, 3.0, 2.5, late=0, empty_s=3.4, in_time=False, together=False))
    run.drained_difference = "drain-2-0 differs first in step 7"
    first, alike = of_drains(run)
    assert (first.seen, first.met) == ("1 of 2", False)
    assert first.reason == "2 within 3 s: planned 2.5 s, took 3.4 s"
    assert (alike.met, alike.reason) == (False, run.drained_difference)
    html = page.render(run)
    assert html.count('<td class="num">late</td>') == 2
    assert "Drains with a deadline" in html


def test_ways_share_what_does_not_depend_on_them() -> None:
    auto, stop = chosen("cold", "1", "10g", "auto,stop")
    assert (auto.way, stop.way) == ("auto", "stop")
    assert auto.shared == stop.shared
    assert (auto.name, stop.name) == ("cold-1-10g", "cold-1-10g-stop")
    with pytest.raises(Refused, match="no way"):
        chosen("", "", "", "quick")


def test_cases_are_chosen_and_what_does_not_fit_is_told() -> None:
    assert len(chosen("", "", "")) == 24
    assert chosen("hot", "0.25 1", "1g")[1] == Case("hot", 1.0, "1g")
    assert len(chosen("ddp", "", "1g")) == 4
    with pytest.raises(Refused, match="no link"):
        chosen("", "", "fast")
    with pytest.raises(Refused, match="sizes"):
        chosen("", "large", "")
    large = Case("cold", 8.0, "1g")
    assert "needs 18.5 GB" in lacking(large, available=17 << 30)
    assert lacking(large, available=23 << 30) == ""
    few, many = Effort(moves=5), Effort(moves=10)
    assert 60 < estimate([large], few) < estimate([large], many)


def a_row(phases: list[Phase], frozen_s: float) -> MigrationRow:
    """A move that was asked for at 100 s and took ten."""
    return msgspec.structs.replace(
        journal_rows.row(1, "a/0"),
        asked=100.0,
        seconds=10.0,
        frozen_s=frozen_s,
        image_bytes=50,
        bytes=550,
        phases=phases,
    )


def test_phases_share_the_downtime_and_the_interrupted_step_is_one_of_them() -> None:
    """A step of 1 s; frozen from 4 to 9 with a hole of 0.5 s; it works for 1.5 s around it."""
    phases = [
        Phase("prepare", 0.0, 0.5),
        Phase("pre-copy", 0.5, 3.0, bytes=500),
        Phase("dump", 4.0, 2.0, bytes=40, frozen=True),
        Phase("memory", 5.0, 1.0, bytes=10, frozen=True),
        Phase("commit", 6.0, 1.0, frozen=True),
        Phase("restore", 7.5, 1.5, bytes=50, frozen=True),
        Phase("finish", 9.0, 1.0),
    ]
    times = [97.0, 98, 99, 100, 100.5, 102, 103.5, 110.0, 111.0, 112.0, 113.0]
    move = moved(a_row(phases, frozen_s=5.0), times, begin=96.0)
    own = {phase.name: round(phase.own_s, 6) for phase in move.phases if phase.own_s}
    assert own == {
        "dump": 1.0,
        "memory": 1.0,
        "commit": 1.0,
        "restore": 1.5,
        "interrupted step": 0.5,
    }
    assert move.unaccounted_s == pytest.approx(0.5)
    assert move.downtime_s == pytest.approx(5.5)
    assert (move.bytes_before, move.bytes_standing, move.delta_bytes) == (500, 50, 10)
    assert move.slow_down == pytest.approx(1 / 3), "two steps in the three seconds until the gap"
    assert move.time_to_full_speed_s == pytest.approx(0.0)


LATE = [
    Phase("pre-copy", 0.0, 8.0, bytes=500),
    Phase("dump", 8.0, 1.0, bytes=40, frozen=True),
    Phase("commit", 9.0, 0.1, frozen=True),
    Phase("restore", 9.1, 0.9, bytes=50, frozen=True),
]


def a_late_row() -> MigrationRow:
    return a_row(LATE, frozen_s=2.0)


def test_a_step_that_is_longer_than_the_freeze_is_not_the_downtime() -> None:
    """Steps of 1 s, one of 4 s while memory goes ahead, and then 2 s of downtime."""
    times = [97.0, 98, 99, 100, 101, 105, 106, 107, 110, 111, 112, 113, 114]
    move = moved(a_late_row(), times, begin=96.0)
    assert move.downtime_s == 2.0, "three seconds from 107 to 110, less a step"
    assert {p.name for p in move.phases if p.own_s} == {"dump", "commit", "restore"}
    assert move.slow_down is not None
    assert move.slow_down == pytest.approx(1 - 4 / 7), "the slow step counts there"


@pytest.mark.parametrize(
    ("times", "why"),
    [
        ([97.0, 98, 99, 100, 101, 105, 106, 107], "made 0 steps after the freeze, 1 are wanted"),
        ([97.0, 98, 99, 108.2, 109.2, 110.5], "is 1.000 s long, the freeze 2.000 s"),
    ],
    ids=["after its last step", "too short"],
)
def test_a_move_that_the_steps_do_not_bear_out_has_no_figure(times: list[float], why: str) -> None:
    phases = [p if p.name != "dump" else Phase("dump", 8.0, 0.1, 40, True) for p in LATE]
    row = msgspec.structs.replace(a_late_row(), phases=phases)
    with pytest.raises(AssertionError, match=why):
        moved(row, times, begin=96.0)


def test_a_failure_costs_one_figure(tmp_path: Path) -> None:
    def fails() -> None:
        raise AssertionError("it did not move")

    result = Result(CASE)
    with ExitStack() as cleanup:
        lab = CaseLab("none", tmp_path, tmp_path, cleanup)
        with lab.failure_noted(result, "ours"):
            fails()
        with lab.failure_noted(result, "by hand"):
            pass
    assert result.failed == {"ours": "it did not move"}
    run = fresh(EFFORT)
    run.cases.append(result)
    result.sum_up()
    assert "failed: it did not move" in page.render(run)
