# SPDX-License-Identifier: Apache-2.0
"""The report: what it claims follows from the data, and the page needs nothing but itself."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from liveshift.errors import ConfigError
from liveshift.launcher import moves
from liveshift.launcher.report import (
    Expected,
    ExpectedPart,
    Migration,
    Phase,
    RankRun,
    Report,
    Step,
    as_json,
    counted,
    doubts,
    gaps,
    headline,
    median_step,
    phase_table,
    read_rank,
    render,
    write,
)
from liveshift.launcher.report import quantities as q
from liveshift.launcher.report.page import pause
from liveshift.launcher.report.record import compare, gaps_of
from liveshift.runtime.messages import MigrationRow, Rounds

BEGIN = 1_700_000_000.0
STILL = 1.2  # seconds that the moved run stands still after step 10
LOSSES = [4.5 - 0.1 * n + 0.001 * (n % 3) for n in range(20)]
PACED = "paused after collective 284 of gloo default_pg"
HOSTILE = '<script>alert("x")</script>&\'"><img src=http://evil.example/x onerror=alert(1)>'


def run(rank: int, still: float = 0.0, moves_to: str = "") -> RankRun:
    """Twenty steps of 0.1 s, the eleventh delayed by ``still``."""
    steps = []
    for n, loss in enumerate(LOSSES):
        later = n >= 10
        host = moves_to if later and moves_to else f"h{rank}"
        steps.append(Step(n + 1, loss + rank, BEGIN + 0.1 * n + (still if later else 0.0), host))
    return RankRun(rank, tuple(steps), f"{rank}f" * 32)


@pytest.fixture
def migration() -> Migration:
    phases = (
        Phase("prepare", 0.3, 0.0, detail="preflight on h2"),
        Phase("dump", 0.4, 0.32, 246_000_000, frozen=True),
        Phase("restore", 0.5, 0.70, frozen=True),  # overlaps the dump by 0.02 s
        Phase("finish", 0.1, 1.25),
    )
    return Migration(
        capsule="gpt/1", source="h1", destination="h2", reason="ECC errors rising", epoch=2,
        requested_at=BEGIN + 0.55, started_at=BEGIN + 0.6, phases=phases, unaccounted_s=0.07,
        image_bytes=93_000_000, ahead_bytes=782_000_000, link_rate=812e6, ranks=(1,),
    )  # fmt: skip


@pytest.fixture
def report(migration: Migration) -> Report:
    return Report(
        title="demo",
        command="liveshift run --nnodes 2 --name gpt -- torchrun train_gpt.py",
        reference=(run(0), run(1)),
        moved=(run(0, STILL), run(1, STILL, "h2")),
        migrations=(migration,),
        environment={"kernel": "6.1.0", "liveshift": "0.1.0"},
        outcome="h1 was emptied.",
    )


class Page(HTMLParser):
    """Collects the tags, what they refer to, and the words."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.words = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "path", "rect", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words += data


def with_loss(one: RankRun, step: int, loss: float) -> RankRun:
    steps = tuple(replace(s, loss=loss) if s.step == step else s for s in one.steps)
    return replace(one, steps=steps)


def test_identical_runs_are_called_so(report: Report) -> None:
    assert report.bit_identical
    assert headline(report) == (
        "Rank 1 moved from h1 to h2 while it trained: "
        "paused for 1.30 s, 40 of 40 losses equal to the bit"
    )


def test_one_bit_of_one_loss_is_seen(report: Report) -> None:
    loss = math.nextafter(report.moved[1].steps[14].loss, math.inf)
    differs = replace(report, moved=(report.moved[0], with_loss(report.moved[1], 15, loss)))
    assert not differs.bit_identical
    assert differs.verdicts[1].first_difference == 15
    assert differs.verdicts[0].identical
    assert "1 of 40 losses differ, first at step 15" in headline(differs)
    page = Page(render(differs))
    assert ("class", "apart") in page.attributes
    assert ("class", "zero") not in page.attributes


def test_signs_of_zero_differ_and_a_nan_equals_itself() -> None:
    plain = RankRun(0, (Step(1, 0.0, 0.0), Step(2, math.nan, 1.0)), "aa")
    assert compare(plain, plain).identical
    assert compare(plain, with_loss(plain, 1, -0.0)).first_difference == 1


@pytest.mark.parametrize("lacking", ["digest", "step", "rank", "everything"])
def test_what_is_missing_is_not_identical(report: Report, lacking: str) -> None:
    first, second = report.moved
    moved = {
        "digest": (first, replace(second, sha256="")),
        "step": (first, replace(second, steps=second.steps[:-1])),
        "rank": (first,),
        "everything": (),
    }[lacking]
    worse = replace(report, moved=moved)
    assert not worse.bit_identical
    assert not as_json(worse)["bit_identical"]
    assert ">No<" in render(worse)


def test_a_report_without_data_claims_nothing() -> None:
    nothing = Report("none", "true", (), (), ())
    assert not nothing.bit_identical
    assert headline(nothing) == "Two runs, nothing moved: no losses to compare"
    assert ">No<" in render(nothing)
    assert as_json(nothing)["source"] is None


def shifted(report: Report, seconds: float) -> Report:
    """The same move, so much later: its ranks' steps stay where they were."""
    (move,) = report.migrations
    return replace(report, migrations=(replace(move, started_at=move.started_at + seconds),))


def test_the_pause_is_the_gap_that_holds_the_freeze(report: Report, migration: Migration) -> None:
    gap = report.gap_of(migration)
    assert gap is not None
    assert gap.step == 11
    assert gap.seconds == pytest.approx(STILL + 0.1, abs=1e-5)
    assert report.downtime_s(migration) == gap.seconds
    assert median_step(report.moved) == pytest.approx(0.1, abs=1e-5)


def test_a_longer_gap_that_does_not_hold_the_freeze_is_not_the_pause(report: Report) -> None:
    """The rank beside it, and a step of its own before the move, were slower."""
    slow = RankRun(0, (Step(1, 1.0, BEGIN, "h0"), Step(2, 1.0, BEGIN + 5, "h0")), "aa")
    first, *rest = report.moved[1].steps
    early = replace(first, time=first.time - 9)
    told = replace(report, moved=(slow, replace(report.moved[1], steps=(early, *rest))))
    gap = told.gap_of(told.migrations[0])
    assert gap is not None
    assert (gap.step, round(gap.seconds, 5)) == (11, STILL + 0.1)


def test_steps_on_both_hosts_bear_a_move_out(report: Report, migration: Migration) -> None:
    assert doubts(report, 10) == []
    beside, moved = counted(report, migration)
    assert (beside.rank, beside.before, beside.after) == (0, {"h0": 10}, {"h0": 10})
    assert (moved.rank, moved.before, moved.after) == (1, {"h1": 10}, {"h2": 10})


def test_a_rank_that_was_moved_after_its_last_step_has_not_been_moved_while_it_trained(
    report: Report,
) -> None:
    """All losses are equal all the same, and somewhere there is a gap between two steps."""
    late = shifted(report, 2.0)
    (move,) = late.migrations
    assert late.bit_identical
    assert any(gap.seconds > 1 for run in late.moved for gap in gaps_of(run))
    assert late.gap_of(move) is None
    found = doubts(late, 10)
    assert "gpt/1, rank 1: no gap between two steps holds the freeze" in found
    assert "gpt/1: rank 1 made no step after the freeze; 10 or more on h2 are wanted" in found
    assert "gpt/1: rank 0 made no step after the freeze; 10 or more on h0 are wanted" in found


def test_a_pause_that_no_step_shows_is_not_shown(report: Report, tmp_path: Path) -> None:
    """Neither by the page, nor by the sentence, nor in the document: the job had ended before."""
    late = shifted(report, 2.0)
    (move,) = late.migrations
    assert late.bit_identical
    assert headline(late) == (
        "Rank 1 moved from h1 to h2, but the steps do not bear that out:"
        " rank 1: it made 0 steps after the freeze, 1 are wanted, 40 of 40 losses equal to the bit"
    )
    page = Page(render(late))
    assert "PauseNot seenits steps do not bear the move out" in page.words
    assert "while it trained: " not in page.words
    assert "paused for" not in page.words
    assert pause(late, move) == (
        "It was frozen for 0.88 s, and no pause between two of its steps shows that."
    )
    write(late, tmp_path)
    got = json.loads((tmp_path / "report.json").read_text())
    assert got["downtime_s"] is got["migrations"][0]["downtime_s"] is None
    assert got["doubts"] == doubts(late, 1) != []
    assert as_json(report)["doubts"] == []


def test_what_a_move_cost_stands_beside_its_pause(report: Report) -> None:
    """One number; one that was not measured says so, and one of which nothing is known is left
    out."""
    said = "cost 1.7 s of training: paused 1.3, slower 0.4"
    (move,) = report.migrations

    def words(lost_s: float | None, cost: str) -> str:
        with_cost = replace(report, migrations=(replace(move, lost_s=lost_s, cost=cost),))
        return Page(render(with_cost)).words

    assert f"Training lost1.68 s{said}" in words(1.68, said)
    why = "cost not measured: the job ended"
    assert f"Training lostNot measured{why}" in words(None, why)
    assert "Training lost" not in words(None, "")
    document = as_json(replace(report, migrations=(replace(move, lost_s=1.68, cost=said),)))
    assert (document["lost_s"], document["cost"]) == (1.68, said)


def test_a_page_without_an_outcome_has_no_empty_paragraph(report: Report) -> None:
    assert '<p class="lead">h1 was emptied.</p>' in render(report)
    assert not re.search(r"<p[^>]*>\s*</p>", render(replace(report, outcome="")))


def test_too_few_steps_after_a_move_are_too_few(report: Report) -> None:
    (found,) = doubts(replace(report, moved=report.moved[1:]), 11)
    assert (
        found == "gpt/1: rank 1 made 10 steps on h2 after the freeze; 11 or more on h2 are wanted"
    )


def test_steps_on_the_wrong_host_are_not_steps_of_the_move(report: Report) -> None:
    elsewhere = run(1, STILL, "h3")
    (found,) = doubts(replace(report, moved=(report.moved[0], elsewhere)), 10)
    assert (
        found == "gpt/1: rank 1 made 10 steps on h3 after the freeze; 10 or more on h2 are wanted"
    )
    stayed = run(0, STILL, "h1")
    (found,) = doubts(replace(report, moved=(stayed, report.moved[1])), 10)
    assert "rank 0 made 10 steps on h1 after the freeze" in found


def test_a_gap_that_is_shorter_than_the_freeze_is_told(report: Report) -> None:
    """Frozen for 0.88 s, as the move says, and a step 0.5 s after the one before."""
    (move,) = report.migrations
    paced = replace(move, phases=(Phase("quiesce", 0.02, 0.3, detail=PACED), *move.phases))
    shorter = (report.moved[0], run(1, 0.4, "h2"))
    (found,) = doubts(replace(report, moved=shorter, migrations=(paced,)), 5)
    assert (
        found == "gpt/1, rank 1: the gap that holds the freeze is 0.500 s long, the freeze 0.880 s"
    )


def test_the_commit_tells_which_gap_holds_the_freeze() -> None:
    """A step may end while the tree is being seized; none can around the commit."""
    phases = [
        Phase("dump", 0.5, 1.0, frozen=True),
        Phase("commit", 0.1, 1.5, frozen=True),
        Phase("restore", 0.4, 1.6, frozen=True),
    ]
    times = [0.0, 0.9, 1.1, 2.3, 2.4]
    assert gaps.held_at(phases) == 1.5
    assert gaps.holding(times, 1.5) == 3
    assert gaps.doubts(times, phases, 0.0) == []
    assert gaps.held_at(phases[:1]) == 1.25, "without one it is the middle"
    assert gaps.held_at([Phase("prepare", 1.0, 0.0)]) is None
    assert gaps.doubts(times, [], 0.0) == ["it was never frozen"]


STEP = 0.15  # of a rank that stands from 10.000 to 10.454 s
REAL = [
    Phase("quiesce", 0.08, 9.92, detail=PACED),
    Phase("last round", 0.002, 10.0, frozen=True),
    Phase("lock", 0.01, 10.002, frozen=True),
    Phase("dump", 0.301, 10.012, frozen=True),
    Phase("files", 0.01, 10.313, frozen=True),
    Phase("commit", 0.005, 10.33, frozen=True),
    Phase("restore", 0.1, 10.335, frozen=True),
    Phase("unlock", 0.01, 10.435, frozen=True),
    Phase("reopen", 0.009, 10.445, frozen=True),
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


def test_overlapping_phases_count_once(migration: Migration) -> None:
    assert migration.frozen_s == pytest.approx(0.88)  # 0.32 to 1.20
    assert migration.total_s == pytest.approx(0.3 + 0.88 + 0.1 + 0.07)


def test_json_has_its_keys(report: Report, tmp_path: Path) -> None:
    write(report, tmp_path / "build" / "demo")
    got = json.loads((tmp_path / "build" / "demo" / "report.json").read_text())
    assert got["bit_identical"] is True
    assert got["steps"] == 20
    assert got["downtime_s"] == pytest.approx(STILL + 0.1)
    assert (got["image_bytes"], got["ahead_bytes"]) == (93_000_000, 782_000_000)
    assert got["migrations"][0]["steps"][1] == {
        "rank": 1,
        "before": {"h1": 10},
        "after": {"h2": 10},
    }
    assert (got["source"], got["destination"]) == ("h1", "h2")
    assert [p["name"] for p in got["phases"]] == ["prepare", "dump", "restore", "finish"]
    assert got["phases"][1]["frozen"] is True
    assert got["moved"][1]["hosts"] == ["h1", "h2"]
    assert float.fromhex(got["moved"][0]["steps"][3]["loss_hex"]) == LOSSES[3]
    left = {p.name for p in (tmp_path / "build" / "demo").iterdir()}
    assert left == {"report.html", "report.json"}


def test_json_stays_valid_when_a_loss_is_not_a_number(report: Report, tmp_path: Path) -> None:
    write(replace(report, moved=(with_loss(report.moved[0], 5, math.nan),)), tmp_path)
    got = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert got["moved"][0]["steps"][4]["loss"] is None
    assert got["moved"][0]["steps"][4]["loss_hex"] == "nan"


def test_the_page_refers_to_nothing_outside(report: Report) -> None:
    html = render(report)
    page = Page(html)
    assert not page.open  # every tag was closed
    assert not {"script", "link", "img", "iframe", "object"} & page.tags
    assert not {"src", "href", "srcset", "action"} & {name for name, _ in page.attributes}
    assert not re.search(r"https?://|url\(|@import", html)


def test_the_page_holds_the_numbers(report: Report) -> None:
    words = Page(render(report)).words
    for number in ("40 of 40 losses", "1.30 s", "246 MB", "0.400 s", "0.880 s"):
        assert number in words
    for name in ("gpt/1", "epoch 2", "ECC errors rising", "h1 → h2", "6.1.0", "h1 was emptied."):
        assert name in words
    assert "875 MB782 MB while it trained, 93.0 MB in the pause" in words
    assert "h1 (10 steps) → h2 (10 steps)" in words
    assert "liveshift moves ranks of a running, unmodified PyTorch job to another host" in words
    assert '<svg viewBox="0 0 960 400" class="how"' in render(report)
    assert "How a rank moves while its job trains" in words
    assert re.search(r"total1\.35 s100 %875 MB", words)
    assert words.count("1f" * 32) == 2
    assert "max |difference|, all ranks = <b>0</b>" in render(report)
    assert re.search(r"unaccounted.*0\.070 s5\.2 %", words)


def test_the_page_holds_the_prediction_against_what_was_seen(
    report: Report, migration: Migration
) -> None:
    parts = (
        ExpectedPart("memory", 0.31, 0.42, 48_000_000, f"of 2 GB {HOSTILE}"),
        ExpectedPart("gpu save", None, 0.05),
    )
    expected = Expected("full dump", f"too old {HOSTILE}", 0.765, 0.876, parts, 3)
    told = replace(report, migrations=(replace(migration, expected=expected),))
    page = Page(render(told))
    for words in ("0.77 s had been predicted", "0.310 s0.420 s", "?0.050 s", "0.765 s0.876 s"):
        assert words in page.words
    assert "learnt from 3 earlier moves" in page.words
    assert "by full dump: too old" in page.words
    assert not {"script", "img"} & page.tags
    found = as_json(told)
    assert found["predicted_s"] == 0.765
    assert found["migrations"][0]["expected"]["parts"][0]["seen_s"] == 0.42
    assert as_json(report)["predicted_s"] is None
    assert "partpredicted" not in Page(render(report)).words


def test_the_pause_has_one_number_and_the_others_say_what_they_are(
    report: Report, migration: Migration
) -> None:
    assert pause(report, migration) == (
        "The job paused for 1.30 s: that is the time from the last step before the freeze to the"
        " first one after it. It was frozen for 0.88 s of it."
    )
    assert Page(render(report)).words.count("0.880 s") == 1, "at its bar"
    expected = Expected("pre-copy", "", 0.88, 0.88, (), 3)
    assert "predicted" not in pause(report, replace(migration, expected=expected))
    expected = replace(expected, predicted_s=0.61)
    assert pause(report, replace(migration, expected=expected)).endswith(
        "It was frozen for 0.88 s of it; 0.61 s had been predicted for the freeze."
    )
    expected = replace(expected, predicted_s=0.95, seen_s=0.95)
    assert "predicted" not in pause(report, replace(migration, expected=expected)), "both with it"
    expected = replace(expected, predicted_s=0.88)
    assert pause(report, replace(migration, expected=expected)).endswith(
        "0.88 s had been predicted for the freeze with the way to the boundary, which took 0.95 s."
    )
    assert pause(report, replace(migration, phases=())) == "The job was never frozen."


def test_each_phase_has_one_bar_and_the_freeze_an_axis_of_its_own(report: Report) -> None:
    html = render(report)
    before, zoomed = html.split('class="timeline zoomed"')
    for name, there in [("prepare", before), ("finish", before), ("frozen", before),
                        ("dump", zoomed), ("restore", zoomed), ("no step", zoomed)]:  # fmt: skip
        assert html.count(f'<span class="name">{name}</span>') == 1
        assert f'<span class="name">{name}</span>' in there
    (width,) = re.findall(r'>dump</span><div class="track"><i class="bar still" '
                          r'style="left:[\d.]+%;width:([\d.]+)%', zoomed)  # fmt: skip
    assert float(width) > 25, "of 1.3 s it took 0.4 s"
    assert "<details><summary>All phases as a table</summary><table>" in html


def test_phases_too_short_to_be_seen_share_a_row(report: Report, migration: Migration) -> None:
    short = (Phase("lock", 0.001, 0.31, frozen=True), Phase("promise", 0.002, 0.71, frozen=True))
    html = render(
        replace(report, migrations=(replace(migration, phases=migration.phases + short),))
    )
    assert '<div class="row" title="lock, promise"><span class="name">2 short ones</span>' in html


def test_the_label_of_the_pause_stands_at_it(report: Report) -> None:
    """The gap lasts from 0.9 to 2.2 s of 3.1 s, and is the highest step there is."""
    found = re.search(
        r'"flag.*" style="(left|right):([\d.]+)%;top:calc\(([\d.]+)% .*">h1 → h2: 1.30 s',
        render(report),
    )
    assert found is not None
    edge = float(found[2]) if found[1] == "left" else 100 - float(found[2])
    assert edge == pytest.approx(100 * (2.2 if found[1] == "left" else 0.9) / 3.1, abs=0.5)
    assert float(found[3]) < 15


def test_hostile_names_stay_words(report: Report, migration: Migration) -> None:
    evil = replace(
        migration, capsule=HOSTILE, reason=HOSTILE, source=HOSTILE, destination=HOSTILE,
        phases=(Phase(HOSTILE, 1.0, 0.0, detail=HOSTILE),),
    )  # fmt: skip
    moved = tuple(
        replace(r, sha256=HOSTILE, steps=tuple(replace(s, host=HOSTILE) for s in r.steps))
        for r in report.moved
    )
    page = Page(
        render(
            replace(
                report, title=HOSTILE, command=HOSTILE, outcome=HOSTILE, moved=moved,
                migrations=(evil,), environment={HOSTILE: HOSTILE}, reproduce=(HOSTILE,),
            )
        )
    )  # fmt: skip
    assert not {"script", "img"} & page.tags
    assert not {"src", "onerror"} & {name for name, _ in page.attributes}
    assert page.words.count(HOSTILE) >= 10


def test_a_dollar_in_a_name_is_not_a_placeholder(report: Report) -> None:
    assert "$style" in render(replace(report, title="$style"))


def test_a_failed_move_is_not_called_a_move(report: Report, migration: Migration) -> None:
    failed = replace(report, migrations=(replace(migration, committed=False),))
    assert headline(failed).startswith("Rank 1 stayed on h1, the move to h2 failed: ")
    assert "Not moved: h1 → h2" in Page(render(failed)).words


def test_the_longest_pause_is_the_one_reported(report: Report, migration: Migration) -> None:
    phases = (Phase("dump", 0.02, 0.0, frozen=True), Phase("restore", 0.02, 0.02, frozen=True))
    begin = migration.started_at + 2.01
    back = replace(migration, source="h2", destination="h1", epoch=3, started_at=begin,
                   phases=phases)  # fmt: skip
    both = replace(report, migrations=(back, migration))
    assert as_json(both)["source"] == "h1"
    assert [round(m["downtime_s"], 3) for m in as_json(both)["migrations"]] == [0.1, 1.3]
    assert headline(both).startswith("2 moves made while the job trained: longest pause 1.30 s")


def test_the_bars_stay_inside_their_track(report: Report) -> None:
    bars = re.findall(r'bar \w+" style="left:([\d.-]+)%;width:([\d.]+)%', render(report))
    assert len(bars) == 6  # four phases, the freeze as a whole, and the gap between steps
    for left, width in bars:
        assert float(left) >= 0
        assert float(left) + float(width) <= 100.01


def test_long_runs_give_a_page_of_bounded_size(report: Report) -> None:
    steps = tuple(Step(n, 1 / (n + 1), BEGIN + n / 10, "h1") for n in range(50_000))
    long = RankRun(1, steps, "aa")
    html = render(replace(report, reference=(long,), moved=(long,)))
    assert len(html) < 400_000


def test_phase_table_has_all_rows(migration: Migration) -> None:
    console = Console(width=110, record=True, file=StringIO())
    table = phase_table(migration)
    console.print(table)
    shown = console.export_text()
    names = list(table.columns[0].cells)
    assert names == ["prepare", "dump", "restore", "finish", "unaccounted", "total"]
    assert re.search(r"dump\W+0\.400\W+30 %\W+246 MB\W+frozen", shown)
    assert re.search(r"unaccounted\W+0\.070\W+5\.2 %", shown)
    assert re.search(r"total\W+1\.350\W+100 %\W+875 MB\W+frozen 0\.880 s", shown)


def test_the_total_of_events_counts_what_went_ahead() -> None:
    ahead = Rounds(4, 782_000_000, 0, 0, 1.0)
    row = MigrationRow(
        "m1", "gpt/1", "h1", "h2", "", "root", 2, "done", 0.0, 1.0, 0.5, 93_000_000, 0, 0,
        0.0, [], None, None, precopy=ahead,
    )  # fmt: skip
    console = Console(width=110, record=True, file=StringIO())
    console.print(moves.phase_table(row))
    assert re.search(r"total\W+1\.000\W+100 %\W+875 MB", console.export_text())


def test_a_phase_table_prints_brackets_as_they_are(migration: Migration) -> None:
    odd = replace(migration, capsule="[red]x[/red]", phases=(Phase("[b]dump", 1.0, 0.0),))
    console = Console(width=110, record=True, file=StringIO())
    console.print(phase_table(odd))
    shown = console.export_text()
    assert "[red]x[/red]" in shown
    assert "[b]dump" in shown


def test_read_rank_reads_what_the_example_writes(tmp_path: Path) -> None:
    loss = 0.1 + 0.2
    line = {"step": 1, "loss": loss, "loss_hex": loss.hex(), "time": 5.5, "mono": 1.0, "host": "h"}
    (tmp_path / "rank3.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "final3.json").write_text('{"sha256": "ab", "steps": 1, "loss": 0.3}')
    assert read_rank(tmp_path, 3) == RankRun(3, (Step(1, loss, 5.5, "h"),), "ab")
    (tmp_path / "rank3.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="rank 3"):
        read_rank(tmp_path, 3)
    with pytest.raises(ConfigError, match="rank 4"):
        read_rank(tmp_path, 4)


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0, "0 s"), (0.0001, "< 1 ms"), (0.0412, "0.041 s"), (1.234, "1.23 s"), (214.4, "214 s")],
)
def test_seconds(value: float, words: str) -> None:
    assert q.seconds(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "–"), (0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (246_400_000, "246 MB"),
     (999_600_000, "1.00 GB"), (3.2e12, "3.20 TB")],
)  # fmt: skip
def test_size(value: float | None, words: str) -> None:
    assert q.size(value) == words
