# SPDX-License-Identifier: Apache-2.0
"""The report's page: it needs nothing but itself, and shows what the data says."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from report_scene import BEGIN, HOSTILE, Page, migration, report

from liveshift.launcher.report.document import as_json
from liveshift.launcher.report.expected import Expected, ExpectedPart
from liveshift.launcher.report.page import pause, render
from liveshift.launcher.report.record import (
    DowntimeReport,
    RankRun,
    ReportedMigration,
    ReportedStep,
)
from liveshift.runtime.messages import Phase

__all__ = ["migration", "report"]


def test_what_a_move_cost_stands_beside_its_pause(report: DowntimeReport) -> None:
    """One number; one that was not measured says so, and one of which nothing is known is left
    out."""
    said = "cost 1.7 s of training: paused 1.3, slower 0.4"
    move = report.move

    def words(lost_s: float | None, cost: str) -> str:
        with_cost = replace(report, move=replace(move, lost_s=lost_s, cost=cost))
        return Page(render(with_cost)).words

    assert f"Training lost1.68 s{said}" in words(1.68, said)
    why = "cost not measured: the job ended"
    assert f"Training lostNot measured{why}" in words(None, why)
    assert "Training lost" not in words(None, "")
    document = as_json(replace(report, move=replace(move, lost_s=1.68, cost=said)))
    assert (document["lost_s"], document["cost"]) == (1.68, said)


def test_a_page_without_an_outcome_has_no_empty_paragraph(report: DowntimeReport) -> None:
    assert '<p class="lead">h1 was emptied.</p>' in render(report)
    assert not re.search(r"<p[^>]*>\s*</p>", render(replace(report, outcome="")))


def test_the_page_refers_to_nothing_outside(report: DowntimeReport) -> None:
    html = render(report)
    page = Page(html)
    assert not page.open  # every tag was closed
    assert not {"script", "link", "img", "iframe", "object"} & page.tags
    assert not {"src", "href", "srcset", "action"} & {name for name, _ in page.attributes}
    assert not re.search(r"https?://|url\(|@import", html)


def test_the_page_holds_the_numbers(report: DowntimeReport) -> None:
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
    report: DowntimeReport, migration: ReportedMigration
) -> None:
    parts = (
        ExpectedPart("memory", 0.31, 0.42, 48_000_000, f"of 2 GB {HOSTILE}"),
        ExpectedPart("gpu save", None, 0.05),
    )
    expected = Expected("full dump", f"too old {HOSTILE}", 0.765, 0.876, parts, 3)
    told = replace(report, move=replace(migration, expected=expected))
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


def test_the_pause_has_one_number_and_the_others_say_what_they_are(report: DowntimeReport) -> None:
    def said(**changes: Any) -> str:
        return pause(replace(report, move=replace(report.move, **changes)))

    assert said() == (
        "The job paused for 1.30 s: that is the time from the last step before the freeze to the"
        " first one after it. It was frozen for 0.88 s of it."
    )
    assert Page(render(report)).words.count("0.880 s") == 1, "at its bar"
    expected = Expected("pre-copy", "", 0.88, 0.88, (), 3)
    assert "predicted" not in said(expected=expected)
    expected = replace(expected, predicted_s=0.61)
    assert said(expected=expected).endswith(
        "It was frozen for 0.88 s of it; 0.61 s had been predicted for the freeze."
    )
    expected = replace(expected, predicted_s=0.95, seen_s=0.95)
    assert "predicted" not in said(expected=expected), "both with it"
    expected = replace(expected, predicted_s=0.88)
    assert said(expected=expected).endswith(
        "0.88 s had been predicted for the freeze with the way to the boundary, which took 0.95 s."
    )
    assert said(phases=()) == "The job was never frozen."


def test_each_phase_has_one_bar_and_the_freeze_an_axis_of_its_own(report: DowntimeReport) -> None:
    html = render(report)
    before, zoomed = html.split('class="timeline zoomed"')
    for name, there in [
        ("prepare", before),
        ("finish", before),
        ("frozen", before),
        ("dump", zoomed),
        ("restore", zoomed),
        ("no step", zoomed),
    ]:
        assert html.count(f'<span class="name">{name}</span>') == 1
        assert f'<span class="name">{name}</span>' in there
    (width,) = re.findall(
        r'>dump</span><div class="track"><i class="bar still" '
        r'style="left:[\d.]+%;width:([\d.]+)%',
        zoomed,
    )
    assert float(width) > 25, "of 1.3 s it took 0.4 s"
    assert "<details><summary>All phases as a table</summary><table>" in html


def test_phases_too_short_to_be_seen_share_a_row(
    report: DowntimeReport, migration: ReportedMigration
) -> None:
    short = (
        Phase("lock", 0.31, 0.001, frozen=True),
        Phase("promise", 0.71, 0.002, frozen=True),
    )
    html = render(replace(report, move=replace(migration, phases=migration.phases + short)))
    assert '<div class="row" title="lock, promise"><span class="name">2 short ones</span>' in html


def test_the_label_of_the_pause_stands_at_it(report: DowntimeReport) -> None:
    """The gap lasts from 0.9 to 2.2 s of 3.1 s, and is the highest step there is."""
    found = re.search(
        r'"flag.*" style="(left|right):([\d.]+)%;top:calc\(([\d.]+)% .*">h1 → h2: 1.30 s',
        render(report),
    )
    assert found is not None
    edge = float(found[2]) if found[1] == "left" else 100 - float(found[2])
    assert edge == pytest.approx(100 * (2.2 if found[1] == "left" else 0.9) / 3.1, abs=0.5)
    assert float(found[3]) < 15


def test_hostile_names_stay_words(report: DowntimeReport, migration: ReportedMigration) -> None:
    evil = replace(
        migration,
        capsule=HOSTILE,
        reason=HOSTILE,
        source=HOSTILE,
        destination=HOSTILE,
        phases=(Phase(HOSTILE, 0.0, 1.0, detail=HOSTILE),),
    )
    moved = tuple(
        replace(r, sha256=HOSTILE, steps=tuple(replace(s, host=HOSTILE) for s in r.steps))
        for r in report.moved
    )
    page = Page(
        render(
            replace(
                report,
                title=HOSTILE,
                command=HOSTILE,
                outcome=HOSTILE,
                moved=moved,
                move=evil,
                environment={HOSTILE: HOSTILE},
                reproduce=(HOSTILE,),
            )
        )
    )
    assert not {"script", "img"} & page.tags
    assert not {"src", "onerror"} & {name for name, _ in page.attributes}
    assert page.words.count(HOSTILE) >= 10


def test_a_dollar_in_a_name_is_not_a_placeholder(report: DowntimeReport) -> None:
    assert "$style" in render(replace(report, title="$style"))


def test_the_bars_stay_inside_their_track(report: DowntimeReport) -> None:
    bars = re.findall(r'bar \w+" style="left:([\d.-]+)%;width:([\d.]+)%', render(report))
    assert len(bars) == 6  # four phases, the freeze as a whole, and the gap between steps
    for left, width in bars:
        assert float(left) >= 0
        assert float(left) + float(width) <= 100.01


def test_long_runs_give_a_page_of_bounded_size(report: DowntimeReport) -> None:
    steps = tuple(ReportedStep(n, 1 / (n + 1), BEGIN + n / 10, "h1") for n in range(50_000))
    long = RankRun(1, steps, "aa")
    html = render(replace(report, reference=(long,), moved=(long,)))
    assert len(html) < 400_000
