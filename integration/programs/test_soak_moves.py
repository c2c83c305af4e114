# SPDX-License-Identifier: Apache-2.0
"""What the soak asks of each of its moves: that the job trained before it and after it, and that
the freeze lies between two steps. And a short one, with small jobs beside."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from journal_rows import row
from soak.compare import unborne
from soak.growth import left_over
from soak.losses import Loss, unexplained
from soak.lossy import soak_with_losses
from soak.story import soak

from liveshift.runtime.messages import MigrationRow, Phase

FROZEN = [
    Phase("pre-copy", 0.0, 1.0),
    Phase("dump", 1.0, 0.2, frozen=True),
    Phase("commit", 1.2, 0.1, frozen=True),
    Phase("restore", 1.3, 0.2, frozen=True),
]


def a_row(number: int, asked: float, state: str = "done") -> MigrationRow:
    return msgspec.structs.replace(
        row(number, f"soak/{number % 2}", state), asked=asked, seconds=2.0, phases=FROZEN
    )


def log(out: Path, rank: int, *times: float) -> None:
    lines = [json.dumps({"step": n, "time": time}) for n, time in enumerate(times, 1)]
    (out / f"rank{rank}.jsonl").write_text("\n".join(lines) + "\n")


def test_moves_between_steps_are_borne_out(tmp_path: Path) -> None:
    log(tmp_path, 0, 9.0, 10.0, 10.9, 11.6, 20.0, 30.9, 31.6, 32.0)
    log(tmp_path, 1, 9.0, 10.0, 20.9, 21.6, 22.0)
    rows = [a_row(2, 10.0), a_row(3, 20.0), a_row(4, 30.0)]
    assert unborne(tmp_path, rows) == []


def test_moves_without_steps_around_them_are_told(tmp_path: Path) -> None:
    """The third move came after the rank's last step, and in the second the rank went on."""
    log(tmp_path, 0, 9.0, 10.0, 10.9, 11.6, 20.0)
    log(tmp_path, 1, 9.0, *(20.0 + 0.1 * n for n in range(30)))
    rows = [a_row(2, 10.0), a_row(3, 20.0), a_row(4, 30.0), a_row(6, 40.0, "failed")]
    assert unborne(tmp_path, rows) == [
        "m3 of soak/1: the gap that holds the freeze is 0.100 s long, the freeze 0.500 s",
        "m4 of soak/0: it made 0 steps after the freeze, 1 are wanted",
        "m4 of soak/0: no gap between two steps holds the freeze",
    ]


def test_a_move_that_fails_without_a_loss_is_told() -> None:
    losses = [Loss("h1", 12.0, True, 3.0), Loss("h2", 50.0, False, 0.0)]
    rows = [a_row(2, 11.0, "failed"), a_row(3, 30.0, "failed"), a_row(4, 45.0, "failed")]
    (why,) = unexplained(rows, losses)
    assert why.startswith("m3 failed, and no host was lost then: ")
    assert len(unexplained(rows, [])) == 3


def test_a_note_of_each_capsule_may_remain_and_no_more() -> None:
    before = {"state, files": 4, "mounts": 3, "journal, files": 1}
    after = {"state, files": 10, "mounts": 3, "journal, files": 9}
    assert left_over(before, after, notes=6) == []
    assert left_over(before, after, notes=5) == ["state, files: 4 before the moves, 10 after them"]
    assert left_over(before, after | {"mounts": 4}, notes=6) == [
        "mounts: 3 before the moves, 4 after them"
    ]


@pytest.mark.lab
@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_short_soak_while_hosts_lose_their_power(
    place: Path, new_lab_name: Callable[[], str]
) -> None:
    report = soak_with_losses(new_lab_name(), place, 60.0, lambda *_: None, 15.0, 2)
    assert report.problems == []
    assert report.moves > 3
    assert any(loss.ran for loss in report.losses)
    assert report.identical


@pytest.mark.lab
@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_short_soak_beside_small_jobs(place: Path, new_lab_name: Callable[[], str]) -> None:
    report = soak(new_lab_name(), place, 20.0, lambda *_: None, beside=20)
    assert report.problems == []
    assert report.moves > 6
    assert report.identical
