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
from liveshift.launcher.report import (
    Expected,
    ExpectedPart,
    Migration,
    Phase,
    RankRun,
    Report,
    Step,
    as_json,
    headline,
    longest_gap,
    measured_downtime,
    median_step,
    phase_table,
    read_rank,
    render,
    write,
)
from liveshift.launcher.report import quantities as q
from liveshift.launcher.report.record import compare

BEGIN = 1_700_000_000.0
STILL = 1.2  # seconds that the moved run stands still after step 10
LOSSES = [4.5 - 0.1 * n + 0.001 * (n % 3) for n in range(20)]
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
        downtime_s=STILL, image_bytes=246_000_000, link_rate=812e6, ranks=(1,),
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
        "40 of 40 losses equal to the bit, downtime 1.20 s"
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


def test_downtime_is_the_longest_gap_less_a_median_step(report: Report) -> None:
    gap = longest_gap(report.moved)
    assert gap is not None
    assert gap.step == 11
    assert gap.seconds == pytest.approx(STILL + 0.1, abs=1e-5)
    assert median_step(report.moved) == pytest.approx(0.1, abs=1e-5)
    assert measured_downtime(report.moved) == pytest.approx(STILL, abs=1e-5)
    before = measured_downtime(report.moved, until=BEGIN + 0.45)
    assert before == pytest.approx(0.0, abs=1e-5)
    assert longest_gap(()) is None


def test_overlapping_phases_count_once(migration: Migration) -> None:
    assert migration.frozen_s == pytest.approx(0.88)  # 0.32 to 1.20
    assert migration.total_s == pytest.approx(0.3 + 0.88 + 0.1 + 0.07)


def test_json_has_its_keys(report: Report, tmp_path: Path) -> None:
    write(report, tmp_path / "build" / "demo")
    got = json.loads((tmp_path / "build" / "demo" / "report.json").read_text())
    assert got["bit_identical"] is True
    assert got["steps"] == 20
    assert got["downtime_s"] == STILL
    assert got["image_bytes"] == 246_000_000
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
    for number in ("40 of 40 losses", "1.20 s", "246 MB", "812 MB/s", "0.400 s", "0.880 s"):
        assert number in words
    for name in ("gpt/1", "epoch 2", "ECC errors rising", "h1 → h2", "6.1.0", "h1 was emptied."):
        assert name in words
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
    for words in ("predicted 0.765 s", "0.310 s0.420 s", "?0.050 s", "0.765 s0.876 s"):
        assert words in page.words
    assert "learnt from 3 earlier moves" in page.words
    assert "by full dump: too old" in page.words
    assert not {"script", "img"} & page.tags
    found = as_json(told)
    assert found["predicted_s"] == 0.765
    assert found["migrations"][0]["expected"]["parts"][0]["seen_s"] == 0.42
    assert as_json(report)["predicted_s"] is None
    assert "standstillpredicted" not in Page(render(report)).words


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
    assert page.words.count(HOSTILE) >= 12


def test_a_dollar_in_a_name_is_not_a_placeholder(report: Report) -> None:
    assert "$style" in render(replace(report, title="$style"))


def test_a_failed_move_is_not_called_a_move(report: Report, migration: Migration) -> None:
    failed = replace(report, migrations=(replace(migration, committed=False),))
    assert headline(failed).startswith("Rank 1 stayed on h1, the move to h2 failed: ")
    assert "Not moved: h1 → h2" in Page(render(failed)).words


def test_the_longest_downtime_is_the_one_reported(report: Report, migration: Migration) -> None:
    back = replace(migration, source="h2", destination="h1", epoch=3, downtime_s=2.5)
    both = replace(report, migrations=(migration, back))
    assert as_json(both)["source"] == "h2"
    assert len(as_json(both)["migrations"]) == 2
    assert headline(both).startswith("2 moves made while the job trained: ")
    assert "longest downtime 2.50 s" in headline(both)


def test_the_bars_stay_inside_their_track(report: Report) -> None:
    bars = re.findall(r'bar \w+" style="left:([\d.-]+)%;width:([\d.]+)%', render(report))
    assert len(bars) == 5  # four phases and the gap between steps
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
    assert "frozen 0.880 s, downtime 1.20 s" in shown


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
