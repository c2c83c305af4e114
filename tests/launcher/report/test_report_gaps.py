# SPDX-License-Identifier: Apache-2.0
"""The report: the steps of a job bear a move out, or it says that they do not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from report_scene import BEGIN, PACED, STILL, Page, migration, report, run

from liveshift.launcher.report import gaps
from liveshift.launcher.report.document import as_json
from liveshift.launcher.report.evidence import counted, doubts
from liveshift.launcher.report.headline import headline
from liveshift.launcher.report.page import pause, render, write
from liveshift.launcher.report.record import DowntimeReport, RankRun, ReportedStep, gaps_of
from liveshift.runtime.messages import Phase

__all__ = ["migration", "report"]


def shifted(report: DowntimeReport, seconds: float) -> DowntimeReport:
    """The same move, so much later: its ranks' steps stay where they were."""
    return replace(report, move=replace(report.move, started_at=report.move.started_at + seconds))


def test_the_pause_is_the_gap_that_holds_the_freeze(report: DowntimeReport) -> None:
    gap = report.gap
    assert gap is not None
    assert gap.step == 11
    assert gap.seconds == pytest.approx(STILL + 0.1, abs=1e-5)
    assert report.downtime_s == gap.seconds
    assert report.median_step_s == pytest.approx(0.1, abs=1e-5)


def test_a_longer_gap_that_does_not_hold_the_freeze_is_not_the_pause(
    report: DowntimeReport,
) -> None:
    """The rank beside it, and a step of its own before the move, were slower."""
    slow = RankRun(
        0, (ReportedStep(1, 1.0, BEGIN, "h0"), ReportedStep(2, 1.0, BEGIN + 5, "h0")), "aa"
    )
    first, *rest = report.moved[1].steps
    early = replace(first, time=first.time - 9)
    told = replace(report, moved=(slow, replace(report.moved[1], steps=(early, *rest))))
    gap = told.gap
    assert gap is not None
    assert (gap.step, round(gap.seconds, 5)) == (11, STILL + 0.1)


def test_steps_on_both_hosts_bear_a_move_out(report: DowntimeReport) -> None:
    assert doubts(report, 10) == []
    beside, moved = counted(report)
    assert (beside.rank, beside.before, beside.after) == (0, {"h0": 10}, {"h0": 10})
    assert (moved.rank, moved.before, moved.after) == (1, {"h1": 10}, {"h2": 10})


def test_a_rank_that_was_moved_after_its_last_step_has_not_been_moved_while_it_trained(
    report: DowntimeReport,
) -> None:
    """All losses are equal all the same, and somewhere there is a gap between two steps."""
    late = shifted(report, 2.0)
    assert late.bit_identical
    assert any(gap.seconds > 1 for run in late.moved for gap in gaps_of(run))
    assert late.gap is None
    found = doubts(late, 10)
    assert "gpt/1, rank 1: no gap between two steps holds the freeze" in found
    assert "gpt/1: rank 1 made no step after the freeze; 10 or more on h2 are wanted" in found
    assert "gpt/1: rank 0 made no step after the freeze; 10 or more on h0 are wanted" in found


def test_a_pause_that_no_step_shows_is_not_shown(report: DowntimeReport, tmp_path: Path) -> None:
    """Neither by the page, nor by the sentence, nor in the document: the job had ended before."""
    late = shifted(report, 2.0)
    assert late.bit_identical
    assert headline(late) == (
        "Rank 1 moved from h1 to h2, but the steps do not confirm that:"
        " rank 1: it made 0 steps after the freeze, 1 are wanted, 40 of 40 losses equal to the bit"
    )
    page = Page(render(late))
    assert "PauseNot seenits steps do not confirm the move" in page.words
    assert "while it trained: " not in page.words
    assert "paused for" not in page.words
    assert pause(late) == (
        "It was frozen for 0.88 s, and no pause between two of its steps shows that."
    )
    write(late, tmp_path)
    got = json.loads((tmp_path / "report.json").read_text())
    assert got["downtime_s"] is got["migrations"][0]["downtime_s"] is None
    assert got["doubts"] == doubts(late, 1) != []
    assert as_json(report)["doubts"] == []


def test_too_few_steps_after_a_move_are_too_few(report: DowntimeReport) -> None:
    (found,) = doubts(replace(report, moved=report.moved[1:]), 11)
    assert (
        found == "gpt/1: rank 1 made 10 steps on h2 after the freeze; 11 or more on h2 are wanted"
    )


def test_steps_on_the_wrong_host_are_not_steps_of_the_move(report: DowntimeReport) -> None:
    elsewhere = run(1, STILL, "h3")
    (found,) = doubts(replace(report, moved=(report.moved[0], elsewhere)), 10)
    assert (
        found == "gpt/1: rank 1 made 10 steps on h3 after the freeze; 10 or more on h2 are wanted"
    )
    stayed = run(0, STILL, "h1")
    (found,) = doubts(replace(report, moved=(stayed, report.moved[1])), 10)
    assert "rank 0 made 10 steps on h1 after the freeze" in found


def test_a_gap_that_is_shorter_than_the_freeze_is_told(report: DowntimeReport) -> None:
    """Frozen for 0.88 s, as the move says, and a step 0.5 s after the one before."""
    phases = (Phase("quiesce", 0.3, 0.02, detail=PACED), *report.move.phases)
    paced = replace(report.move, phases=phases)
    shorter = (report.moved[0], run(1, 0.4, "h2"))
    (found,) = doubts(replace(report, moved=shorter, move=paced), 5)
    assert (
        found == "gpt/1, rank 1: the gap that holds the freeze is 0.500 s long, the freeze 0.880 s"
    )


def test_the_commit_tells_which_gap_holds_the_freeze() -> None:
    """A step may end while the tree is being seized; none can around the commit."""
    phases = [
        Phase("dump", 1.0, 0.5, frozen=True),
        Phase("commit", 1.5, 0.1, frozen=True),
        Phase("restore", 1.6, 0.4, frozen=True),
    ]
    times = [0.0, 0.9, 1.1, 2.3, 2.4]
    assert gaps.held_at(phases) == 1.5
    assert gaps.holding(times, 1.5) == 3
    assert gaps.doubts(times, phases, 0.0) == []
    assert gaps.held_at(phases[:1]) == 1.25, "without one it is the middle"
    assert gaps.held_at([Phase("prepare", 0.0, 1.0)]) is None
    assert gaps.doubts(times, [], 0.0) == ["it was never frozen"]


STEP = 0.15  # of a rank that stands from 10.000 to 10.454 s
REAL = [
    Phase("quiesce", 9.92, 0.08, detail=PACED),
    Phase("last round", 10.0, 0.002, frozen=True),
    Phase("lock", 10.002, 0.01, frozen=True),
    Phase("dump", 10.012, 0.301, frozen=True),
    Phase("files", 10.313, 0.01, frozen=True),
    Phase("commit", 10.33, 0.005, frozen=True),
    Phase("restore", 10.335, 0.1, frozen=True),
    Phase("unlock", 10.435, 0.01, frozen=True),
    Phase("reopen", 10.445, 0.009, frozen=True),
]
IN_PLACE = [Phase("quiesce", 5.0, 5.0, detail="frozen in place"), *REAL[1:]]


@pytest.mark.parametrize(
    ("phases", "last", "next_one", "borne"),
    [
        (REAL, 9.95, 10.46, True),
        (REAL, 10.05, 10.56, True),  # it made the rest of its step before CRIU held it
        (REAL, 10.14, 10.44, True),  # and the first of the next ones before the gates were open
        (REAL, 10.2, 10.46, False),  # a whole step and more after it had stopped at a collective
        (REAL, 10.2, 10.4, False),
        (REAL, 9.9, 10.34, False),  # before the tree was let run
        (IN_PLACE, 10.25, 10.46, True),  # it ran until CRIU held it
        (IN_PLACE, 10.25, 10.43, False),
        (IN_PLACE, 10.325, 10.46, False),  # after the dump
    ],
)
def test_a_gap_may_be_shorter_than_the_freeze_only_by_what_a_rank_can_do_at_its_ends(
    phases: list[Phase], last: float, next_one: float, borne: bool
) -> None:
    times = [*(last - n * STEP for n in (4, 3, 2, 1)), last, next_one, next_one + STEP]
    found = gaps.doubts(times, phases, 0.0)
    words = f"the gap that holds the freeze is {next_one - last:.3f} s long, the freeze 0.454 s"
    assert found == ([] if borne else [words])


def test_a_slow_last_step_may_end_late() -> None:
    """On a busy machine what is left of it takes longer, as the step itself did."""
    assert gaps.doubts([9.5, 9.65, 10.2, 10.46, 10.6], REAL, 0.0) == []
