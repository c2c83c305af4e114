# SPDX-License-Identifier: Apache-2.0
"""The short form of ``make bench-failure``: one kill by each way; its figures are of real work."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import msgspec
import pytest
from bench_record import kept
from failure_bench import page
from failure_bench.__main__ import fresh
from failure_bench.cases import (
    APART,
    Case,
    Effort,
    chosen,
    estimate,
    lacking,
    last_step,
    moments,
    training,
)
from failure_bench.failures import CAUSES, Kind, schedule
from failure_bench.goals import judge
from failure_bench.history import History
from failure_bench.record import FILE, SAME, Kill, Result, Run
from failure_bench.story import bench

from liveshift.errors import Refused

EFFORT = Effort(
    kills=1, every=2.0, steps_every=20, pace=0.15, steady=0, steps=80, mean=3.0, alarms=0
)
CASES = [
    Case("untouched", 0.25),
    Case("rewind", 0.25, 1.0),
    Case("checkpoint-restart", 0.25, 3.0),
]
NOTHING_KNOWN_S = 0.5
"""No program can have acted upon a host's silence so soon."""


@pytest.fixture(scope="module")
def run(place: Path) -> Run:
    out = place / "bench"
    measured = fresh(EFFORT)
    bench(place, CASES, measured, out / FILE, print)
    page.write(measured, out)
    return measured


@pytest.mark.timeout(360)  # five jobs, each in a lab of its own
def test_each_way_brings_the_job_back_and_is_real_work(run: Run) -> None:
    untouched, *others = run.cases
    assert (untouched.failed, untouched.kills) == ({}, [])
    (moment,) = moments(EFFORT, 2)
    for result in others:
        assert (result.failed, result.skipped) == ({}, "")
        assert result.bit_identical, result.difference
        (kill,) = result.kills
        assert (kill.step, kill.rank) == (moment.step, moment.rank)
        assert kill.to != kill.host, "the rank trained on another host"
        assert kill.noticed_s is not None
        assert NOTHING_KNOWN_S < kill.noticed_s < kill.first_step_s <= kill.lost_s
        assert kill.lost_s <= kill.new_step_s
        assert kill.repeated_s >= (kill.repeated - 1) * EFFORT.pace * 0.9
        assert (result.first_step_s, result.lost_s) == (kill.first_step_s, kill.lost_s)
    ours, theirs = others
    assert ours.snapshots > 1
    assert 0 < (ours.pause_s or 0) < 10
    assert (ours.image_bytes or 0) > 2 * 50_000_000, "two processes with torch"
    # A checkpoint is of a step that is known, a snapshot of any.
    assert theirs.kills[0].repeated in range(moment.step - EFFORT.steps_every, moment.step + 3)
    assert (theirs.pauses, theirs.pause_s, theirs.image_bytes) == ([], None, None)


def test_a_job_that_meets_failures_makes_its_steps_and_takes_longer(run: Run) -> None:
    untouched, *others = run.cases
    assert untouched.met == []
    assert untouched.job_s is not None
    assert untouched.job_s >= (EFFORT.steps - 1) * EFFORT.pace * 0.99
    wanted = [(each.gap, each.kind, each.rank) for each in islice(schedule(EFFORT, 2), 40)]
    for result in others:
        assert result.met, result.case.name
        assert [(e.gap_s, e.kind, e.rank) for e in result.met] == wanted[: len(result.met)]
        assert all(each.lost_s > 0 for each in result.met)
        assert result.job_s is not None
        assert result.job_s > untouched.job_s + sum(each.lost_s for each in result.met) / 2
        assert result.job_ratio == result.job_s / untouched.job_s
    (told,) = (goal for goal in run.goals if goal.name.startswith("time of a job under failures"))
    assert "rewind, 1 s: " in told.seen


def test_failures_are_the_same_for_all_ways_and_as_many_as_the_rate_says() -> None:
    effort = Effort(mean=30.0)
    found = list(islice(schedule(effort, 4), 2000))
    assert found[:9] == list(islice(schedule(effort, 4), 9))
    assert found[:9] != list(islice(schedule(Effort(mean=30.0, seed=2), 4), 9))
    assert sum(each.gap for each in found) / 2000 == pytest.approx(30.0, rel=0.1)
    assert {each.rank for each in found} == {0, 1, 2, 3}
    for at in range(0, 2000, 5):
        assert [each.kind for each in found[at : at + 5]].count(Kind.HOST) == 1
    most, few = (sum(CAUSES[kind].values()) for kind in (Kind.PROCESS, Kind.HOST))
    assert most / (most + few) == pytest.approx(0.8, abs=0.02)


def test_the_file_and_the_page_tell_it(run: Run, place: Path) -> None:
    read = msgspec.json.decode((place / "bench" / FILE).read_bytes(), type=Run)
    assert read == run
    assert read.complete
    html = (place / "bench" / page.FILE).read_text()
    assert "checkpoint-restart, 0.25 GB, 3 s of silence" in html
    assert "src=" not in html, "it needs nothing else"
    assert "A job that meets failures" in html
    names = [goal.name for goal in run.goals]
    assert "equal to the bit" in names
    assert any(name.startswith("pause of a snapshot") for name in names)
    assert any(name.startswith("first new step after the suspicion") for name in names)


def test_a_run_goes_on_only_with_its_like(tmp_path: Path) -> None:
    path = tmp_path / FILE
    measured = fresh(EFFORT)
    measured.cases = [a_result(a_kill())]
    measured.write(path)
    assert kept(path, measured) == measured
    measured.complete = True
    measured.write(path)
    assert kept(path, measured) is None
    assert kept(path, measured, more=True) == measured
    assert kept(path, msgspec.structs.replace(measured, torchft="another"), same=SAME) is None


def test_hosts_die_at_the_same_moments_whatever_the_way() -> None:
    effort = Effort(kills=4)
    found = moments(effort, 2)
    assert found == moments(effort, 2)
    assert found != moments(Effort(kills=4, seed=2), 2)
    for number, moment in enumerate(found):
        begin = effort.steps_every * (1 + APART * number)
        assert begin <= moment.step < begin + effort.steps_every
        assert 0 <= moment.late < 1
    assert {moment.rank for moment in moments(Effort(kills=20), 2)} == {0, 1}
    assert {moment.rank for moment in moments(Effort(kills=40), 4)} == {0, 1, 2, 3}
    assert [moment.step for moment in moments(effort, 4)] == [moment.step for moment in found]
    assert last_step(effort) > found[-1].step


def test_cases_are_chosen_and_what_does_not_fit_is_told() -> None:
    names = [case.name for case in chosen("rewind", "0.5", "")]
    assert names == ["untouched-0.5", "rewind-0.5-1s", "rewind-0.5-5s"]
    assert len(chosen("", "", "")) == 14
    more = [case.name for case in chosen("rewind", "0.5", "2,4")]
    assert more[3:] == ["untouched-0.5-4ranks", "rewind-0.5-4ranks-1s", "rewind-0.5-4ranks-5s"]
    assert chosen("rewind", "0.5", "4")[0].hosts == 5
    for ranks in ("1", "two", "2,17"):
        with pytest.raises(Refused, match="numbers of ranks"):
            chosen("", "", ranks)
    with pytest.raises(Refused, match="no way"):
        chosen("hope", "", "")
    with pytest.raises(Refused, match="sizes"):
        chosen("", "0.1", "")
    assert "needs 6.5 GB" in lacking(Case("rewind", 0.5, 1.0), available=5 << 30)
    assert lacking(Case("rewind", 0.5, 1.0), available=7 << 30) == ""
    unequal = chosen("", "4+0.25", "")
    assert {case.way for case in unequal} == {"untouched", "rewind", "checkpoint-restart"}
    assert unequal[1].name == "rewind-4+0.25-1s"
    assert "needs 19.5 GB" in lacking(unequal[1], available=19 << 30 >> 1)
    assert lacking(unequal[1], available=19_500_000_000) == ""
    assert (unequal[1].mortal, chosen("", "4", "")[1].mortal) == (1, 2)
    assert training(unequal[1], 9, 0.0)[4:] == [
        *("--size", "4000000000", "--steps", "9", "--others", "250000000")
    ]
    with pytest.raises(Refused, match="sizes"):
        chosen("", "4+0.1", "")
    few, many = Effort(kills=1), Effort(kills=5)
    assert 60 < estimate(chosen("", "0.5", ""), few) < estimate(chosen("", "0.5", ""), many)


def write(
    out: Path, rank: int, *lines: tuple[float, int], host: str = "h0", part: int = -2
) -> None:
    """A process of a rank: it began a second before its first line; (time, step) of each."""
    share = rank if part == -2 else part
    told = [{"began": lines[0][0] - 1, "pid": 1, "host": host}]
    more = [
        {"step": s, "part": share, "time": t, "loss_hex": f"l{s}", "sha256": f"d{s}"}
        for t, s in lines
    ]
    with (out / f"rank{rank}.jsonl").open("a") as record:
        record.writelines(json.dumps(line) + "\n" for line in [*told, *more])


def test_a_loss_is_what_the_records_tell(tmp_path: Path) -> None:
    """The host of rank 1 dies at 10.2, when rank 0 has just made step 11. All go on from step 8."""
    write(tmp_path, 0, *((float(t), t) for t in range(1, 11)), (10.21, 11))
    write(tmp_path, 1, *((float(t), t) for t in range(1, 11)), host="h1")
    history = History(tmp_path, 2, 2)
    history.look()
    assert (history.reached(), history.host_of(1)) == (10, "h1")
    assert history.back(10.2, 10.4, 1) is None
    write(tmp_path, 0, (15.0, 9), (16.0, 10), (17.0, 11))
    write(tmp_path, 1, (15.1, 9), (16.1, 10), host="h2")
    history.look()
    assert history.back(10.2, 10.4, 1) is None, "it is not further than it was"
    write(tmp_path, 1, (17.1, 11), host="h2")
    history.look()
    seen = history.back(10.2, 10.4, 1)
    assert seen is not None
    assert (seen.reached, seen.repeated) == (10, 2)
    assert seen.first_step_s == pytest.approx(4.9)
    assert seen.lost_s == pytest.approx(5.9)
    assert seen.new_step_s == pytest.approx(6.9)
    assert seen.began_s == pytest.approx(3.8)
    assert history.host_of(1) == "h2"


def test_a_rank_whose_image_has_the_first_step_already_does_not_delay_it(tmp_path: Path) -> None:
    """Rank 0 had written step 9 when the snapshot was taken, and rank 1 had not."""
    write(tmp_path, 0, *((float(t), t) for t in range(1, 12)))
    write(tmp_path, 1, *((float(t), t) for t in range(1, 12)), host="h1")
    write(tmp_path, 0, (15.4, 10), (16.4, 11), (17.4, 12))
    write(tmp_path, 1, (15.0, 9), (16.0, 10), (17.0, 11), (18.0, 12), host="h2")
    history = History(tmp_path, 2, 2)
    history.look()
    seen = history.back(11.2, 11.4, 1)
    assert seen is not None
    assert seen.repeated == 3
    assert seen.first_step_s == pytest.approx(3.8)
    assert seen.lost_s == pytest.approx(5.8)


def test_where_nothing_is_repeated_the_first_step_is_a_new_one(tmp_path: Path) -> None:
    """Replicas: the process that was the spare trains the lost part from the next step on."""
    for rank in (0, 1):
        write(tmp_path, rank, (1.0, 1), (2.0, 2), host=f"h{rank}")
    write(tmp_path, 2, (2.0, 2), host="h2", part=-1)
    write(tmp_path, 2, (7.0, 3), host="h2", part=1)
    write(tmp_path, 0, (7.1, 3))
    history = History(tmp_path, 3, 2)
    history.look()
    seen = history.back(2.5, 2.6, 1)
    assert seen is not None
    assert (seen.reached, seen.repeated) == (2, 0)
    assert seen.first_step_s == seen.lost_s == seen.new_step_s == pytest.approx(4.6)


def test_every_repetition_is_compared(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for rank in (0, 1):
            write(tmp_path / name, rank, (1.0, 1), (2.0, 2), (3.0, 3))
    like, other = (History(tmp_path / name, 2, 2) for name in ("a", "b"))
    like.look()
    other.look()
    assert other.differs(like, 3) == ""
    assert (like.span(3), like.span(2)) == (2.0, 1.0)
    with pytest.raises(AssertionError, match="step 4"):
        like.span(4)
    assert other.differs(like, 4) == "step 4 of rank 0 is missing"
    write(tmp_path / "b", 1, (4.0, 2))
    other.look()
    assert other.differs(like, 3) == ""
    with (tmp_path / "b" / "rank1.jsonl").open("a") as record:
        line = {"step": 3, "part": 1, "time": 5.0, "loss_hex": "l3", "sha256": "another"}
        record.write(json.dumps(line) + "\n")
    other.look()
    assert other.differs(like, 3) == "rank 1 has other parameters after step 3"


def test_a_host_of_replicas_may_die_before_it_has_written_its_line(tmp_path: Path) -> None:
    """No step is made again there; another replica's line tells of it."""
    for rank in (0, 1):
        write(tmp_path, rank, *((float(n), n) for n in range(1, 4 - rank)))
    two, three = History(tmp_path, 2, 2), History(tmp_path, 3, 2)
    two.look()
    three.look()
    assert two.differs(two, 3) == "step 3 of rank 1 is missing"
    assert three.differs(three, 3) == ""
    assert three.differs(three, 4) == "step 4 of rank 0 is missing"


def a_kill(first: float = 2.5, lost: float = 4.0) -> Kill:
    return Kill(120, 1, "h1", "h2", 0.0, 1.3, first, lost, lost + 0.1, 15, lost - first, "<told>")


def a_result(*kills: Kill, way: str = "rewind", suspicion: float = 1.0) -> Result:
    result = Result(Case(way, 0.5, suspicion), kills=list(kills), identical=True)
    result.sum_up(None)
    return result


def test_the_worst_kill_decides_and_pauses_are_judged_by_their_median() -> None:
    run = fresh(EFFORT)
    run.cases = [a_result(a_kill(), a_kill(first=2.9))]
    run.cases[0].pauses = [0.3, 0.35, 0.9]
    run.cases[0].sum_up(None)
    judge(run)
    assert [goal.met for goal in run.goals] == [True, True, True, True]
    run.cases[0].kills.append(a_kill(first=3.2))
    run.cases[0].pauses = [0.5, 0.45, 0.3]
    run.cases[0].sum_up(None)
    judge(run)
    met = {goal.name.partition(" ")[0]: goal.met for goal in run.goals}
    assert met == {"first": False, "pause": False, "pauses": True, "equal": True}
    html = page.render(run)
    assert "&lt;told&gt;" in html
    assert "2 of 4 goals met" in html
    assert "A job that meets failures" not in html, "no job has met any"


def test_others_are_compared_and_a_failure_is_told() -> None:
    run = fresh(EFFORT)
    run.cases = [
        a_result(a_kill(), suspicion=5.0),
        a_result(a_kill(first=20.0, lost=30.0), way="checkpoint-restart", suspicion=15.0),
    ]
    judge(run)
    (told,) = [goal for goal in run.goals if "against" in goal.name]
    assert (told.seen, told.met) == ("2 ranks of 0.5 GB: 7.5 ×", None)
    run.cases[1].failed["kills"] = "it did not come back\nlog"
    judge(run)
    assert run.goals[0].met is False
    assert "it did not come back" in run.goals[0].reason
    assert "FAILED: it did not come back" in page.render(run)


def test_the_steady_cost_is_against_the_untouched_run() -> None:
    untouched = Result(Case("untouched", 0.5), steps_per_s=25.0)
    result = Result(Case("rewind", 0.5, 1.0), steps_per_s=24.0)
    result.sum_up(untouched)
    assert result.steady_cost == pytest.approx(0.04)
    untouched.sum_up(untouched)
    assert untouched.steady_cost == 0.0


def test_the_cpu_time_of_a_snapshot_is_what_it_adds_and_counts_for_a_busy_job() -> None:
    untouched = Result(Case("untouched", 0.5), cpu_s_per_step=0.05)
    result = a_result(a_kill())
    result.pauses = [0.2, 0.2]
    result.cpu_s_per_step, result.steady_steps, result.steady_snapshots = 0.056, 1000, 10
    result.sum_up(untouched)
    assert result.snapshot_cpu_s == pytest.approx(0.6)
    run = fresh(EFFORT)
    run.cores, run.cases = 2, [result]
    judge(run)
    (goal,) = (each for each in result.goals if each.name.startswith("pauses and CPU time"))
    # 0.2 s of pause and 0.6 s of one core of two: 0.5 s for a snapshot every 170 s.
    assert (goal.seen, goal.met) == ("0.29 %", True)
    result.cpu_s_per_step = 0.08
    result.sum_up(untouched)
    judge(run)
    (goal,) = (each for each in result.goals if each.name.startswith("pauses and CPU time"))
    assert (goal.seen, goal.met) == ("0.54 %", False)
    assert goal.reason == (
        "a snapshot takes 1.70 s, every 313 s; auto takes one every 340 s instead"
    )


def test_larger_ranks_have_more_time_until_their_first_new_step() -> None:
    for gb, wanted in ((0.5, "≤ 2 s"), (2.5, "≤ 4 s"), (4.0, "≤ 4 s")):
        run = fresh(EFFORT)
        run.cases = [a_result(a_kill(first=4.5))]
        run.cases[0].case = Case("rewind", gb, 1.0)
        judge(run)
        (goal,) = (each for each in run.goals if each.name.startswith("first new step"))
        assert (goal.wanted, goal.met) == (wanted, gb > 0.5)
