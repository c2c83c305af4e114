# SPDX-License-Identifier: Apache-2.0
"""A dry run predicts a pause, and the move that follows holds it against what was seen."""

from __future__ import annotations

import msgspec
import pytest
from lab_session import AS_EVER, LONG, LabSession, NewLab

from liveshift.launcher.show import forecast, moves
from liveshift.runtime.cost.prediction import PRECOPY, seen, stood
from liveshift.runtime.messages import MigrationRow, Prediction

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180), pytest.mark.alone]

WITHIN = 3.0
"""Factor by which a prediction may be wrong on a machine that does other things as well."""


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    return new_lab("--hosts", "3", *AS_EVER)


def planned(lab: LabSession, capsule: str) -> Prediction:
    plan = lab.json("migrate", capsule, "--dry-run")
    return msgspec.convert(plan["prediction"], Prediction)


def assert_compared(lab: LabSession, row: MigrationRow) -> None:
    """Both numbers are in the record, in the history and in its table; the parts make the whole."""
    assert row.predicted is not None
    assert stood(row) > 0.01
    assert sum(seen(row).values()) == pytest.approx(stood(row), rel=0.05)
    expected = forecast.compared(row)
    assert expected is not None
    told = " ".join(lab.cli("events", row.name).out.split())
    assert forecast.in_short(expected) in told
    assert moves.sum_up(row) in told
    texts = [e["text"] for e in lab.json("events", row.capsule) if e["kind"] == "moved"]
    assert f"(predicted {row.predicted.seconds:.2f} s)" in texts[-1]


def test_a_dry_run_predicts_what_the_move_then_takes(lab: LabSession) -> None:
    job = lab.start("told", LONG, nnodes=2)
    job.wait_step(3, rank=1)
    before = planned(lab, "told/1")
    assert (before.learnt, before.seconds > 0) == (0, True)
    assert before.memory > 50 << 20, "what torch alone takes"
    if before.way == PRECOPY:
        (memory,) = [part for part in before.parts if part.name == "memory"]
        assert 0 < (memory.bytes or 0) < before.memory / 2, "it was looked at what it writes"
    assert not job.migrations(), "nothing is done"
    assert_compared(lab, job.migrate(1))  # which also tells how fast this machine is

    job.go_on(3)
    taught = planned(lab, "told/1")
    row = job.migrate(1)
    assert_compared(lab, row)
    assert row.predicted is not None
    assert (taught.learnt, row.predicted.learnt) == (1, 1)
    for predicted in (taught, row.predicted):
        assert stood(row) / WITHIN < predicted.seconds < stood(row) * WITHIN, row
    assert taught.way == row.predicted.way
    job.stop()
