# SPDX-License-Identifier: Apache-2.0
"""How much a snapshot slows its job down besides the pause, and when that cannot be known."""

from __future__ import annotations

import asyncio

import pytest
from snapshot_stage import SnapshotStage, a_job

from liveshift.errors import LiveshiftError, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.messages import Worked
from liveshift.runtime.snapshot.slowness import Slowness

# In 3 s it made 10 of its 10 collectives per second: 2 s are lost.
LOST_2_S = Worked("collectives", 100.0, 110.0, 100.0, 10.0, 3.0, 0.1)


def measure(stage: SnapshotStage, pause_s: float) -> float | None:
    async def both() -> float | None:
        slowness = Slowness(stage, "s17", a_job().capsules["gpt/1"])
        await slowness.begin()
        return await slowness.end(pause_s)

    return asyncio.run(both())


def test_what_was_lost_besides_the_pause() -> None:
    stage = SnapshotStage()
    stage.fail("EndMeasure", LOST_2_S)
    assert measure(stage, 0.5) == pytest.approx(1.5, abs=0.2)
    start, end = (message for _, message in stage.asked)
    assert start == messages.StartMeasure("s17", "gpt/1")
    assert end == messages.EndMeasure("s17", "gpt/1")
    assert [host for host, _ in stage.asked] == ["h1", "h1"]


def test_a_pause_that_is_longer_than_what_was_lost_leaves_nothing() -> None:
    stage = SnapshotStage()
    stage.fail("EndMeasure", LOST_2_S)
    assert measure(stage, 30.0) == 0.0


def test_a_source_that_does_not_answer_at_the_begin_is_not_asked_again() -> None:
    stage = SnapshotStage()
    stage.fail("StartMeasure", Unreachable("h1 is away"))
    assert measure(stage, 0.5) is None
    assert [type(message) for _, message in stage.asked] == [messages.StartMeasure]


@pytest.mark.parametrize(
    "answer",
    [
        Unreachable("h1 is away"),
        Worked("", 0.0, None, 0.0, 0.0, 0.0, 0.0, why_not="it had not trained long enough"),
        Worked("collectives", 100.0, 90.0, 100.0, 10.0, 3.0, 0.1),  # a rank was restarted
    ],
)
def test_what_cannot_be_known_is_none(answer: LiveshiftError | Worked) -> None:
    stage = SnapshotStage()
    stage.fail("EndMeasure", answer)
    assert measure(stage, 0.5) is None
