# SPDX-License-Identifier: Apache-2.0
"""The report: what it claims follows from the data, in words and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from report_scene import LOSSES, STILL, Page, migration, report, with_loss

from liveshift.errors import ConfigError
from liveshift.launcher.report.document import as_json
from liveshift.launcher.report.headline import headline
from liveshift.launcher.report.page import render, write
from liveshift.launcher.report.record import (
    DowntimeReport,
    RankRun,
    ReportedMigration,
    ReportedStep,
    compare,
)
from liveshift.launcher.report.training_log import read_rank

__all__ = ["migration", "report"]


def test_identical_runs_are_called_so(report: DowntimeReport) -> None:
    assert report.bit_identical
    assert headline(report) == (
        "Rank 1 moved from h1 to h2 while it trained: "
        "paused for 1.30 s, 40 of 40 losses equal to the bit"
    )


def test_one_bit_of_one_loss_is_seen(report: DowntimeReport) -> None:
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
    plain = RankRun(0, (ReportedStep(1, 0.0, 0.0), ReportedStep(2, math.nan, 1.0)), "aa")
    assert compare(plain, plain).identical
    assert compare(plain, with_loss(plain, 1, -0.0)).first_difference == 1


@pytest.mark.parametrize("lacking", ["digest", "step", "rank", "everything"])
def test_what_is_missing_is_not_identical(report: DowntimeReport, lacking: str) -> None:
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


def test_a_report_without_data_claims_nothing(migration: ReportedMigration) -> None:
    nothing = DowntimeReport("none", "true", (), (), migration)
    assert not nothing.bit_identical
    assert headline(nothing).endswith(": no rank of it is known, no losses to compare")
    assert ">No<" in render(nothing)
    assert "gpt/1, no rank of it is known" in as_json(nothing)["doubts"]


def test_overlapping_phases_count_once(migration: ReportedMigration) -> None:
    assert migration.frozen_s == pytest.approx(0.88)  # 0.32 to 1.20
    assert migration.total_s == pytest.approx(0.3 + 0.88 + 0.1 + 0.07)


def test_json_has_its_keys(report: DowntimeReport, tmp_path: Path) -> None:
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


def test_json_stays_valid_when_a_loss_is_not_a_number(
    report: DowntimeReport, tmp_path: Path
) -> None:
    write(replace(report, moved=(with_loss(report.moved[0], 5, math.nan),)), tmp_path)
    got = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert got["moved"][0]["steps"][4]["loss"] is None
    assert got["moved"][0]["steps"][4]["loss_hex"] == "nan"


def test_read_rank_reads_what_the_example_writes(tmp_path: Path) -> None:
    loss = 0.1 + 0.2
    line = {"step": 1, "loss": loss, "loss_hex": loss.hex(), "time": 5.5, "mono": 1.0, "host": "h"}
    (tmp_path / "rank3.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "final3.json").write_text('{"sha256": "ab", "steps": 1, "loss": 0.3}')
    assert read_rank(tmp_path, 3) == RankRun(3, (ReportedStep(1, loss, 5.5, "h"),), "ab")
    (tmp_path / "rank3.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="rank 3"):
        read_rank(tmp_path, 3)
    with pytest.raises(ConfigError, match="rank 4"):
        read_rank(tmp_path, 4)
