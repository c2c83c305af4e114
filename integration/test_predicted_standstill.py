# SPDX-License-Identifier: Apache-2.0
"""A dry run predicts a standstill, and the move that follows holds it against what was seen."""

from __future__ import annotations

import msgspec
import pytest
from lab_session import LONG, LabSession, NewLab

from liveshift.launcher import forecast
from liveshift.runtime.messages import MigrationRow, Prediction
from liveshift.runtime.prediction import seen, stood

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180)]

WITHIN = 3.0
"""Factor by which a prediction may be wrong on a machine that does other things as well."""


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    return new_lab("--hosts", "3")


def planned(lab: LabSession, capsule: str) -> Prediction:
    plan = lab.json("migrate", capsule, "--dry-run")
    return msgspec.convert(plan["prediction"], Prediction)


def assert_near(predicted: Prediction, row: MigrationRow) -> None:
    assert row.predicted is not None
    assert stood(row) > 0.01
    for found in (predicted, row.predicted):
        assert stood(row) / WITHIN < found.seconds < stood(row) * WITHIN, (found, row)
    assert predicted.way == row.predicted.way
    assert sum(seen(row).values()) == pytest.approx(stood(row), rel=0.05)


def test_a_dry_run_predicts_what_the_move_then_takes(lab: LabSession) -> None:
    job = lab.start("told", LONG, nnodes=2)
    job.wait_step(3, rank=1)
    before = planned(lab, "told/1")
    assert before.memory > 50 << 20, "what torch alone takes"
    assert not job.migrations(), "nothing is done"

    row = job.migrate(1)
    assert_near(before, row)

    again = planned(lab, "told/1")
    assert again.learnt == 1
    job.go_on(3)
    assert_near(again, job.migrate(1))

    text = " ".join(lab.cli("events", row.name).out.split())
    expected = forecast.compared(row)
    assert expected is not None
    assert forecast.in_short(expected) in text
    assert "learnt from" not in text, "there was no move before the first one"
    assert f"(predicted {row.predicted.seconds:.2f} s)" in " ".join(
        event["text"] for event in lab.json("events", "told") if event["kind"] == "moved"
    )
    job.stop()
