# SPDX-License-Identifier: Apache-2.0
"""A person cancels a migration while an ask of it is under way, at each of them in turn."""

from __future__ import annotations

import asyncio

import pytest
from migration_stage import (
    BEFORE,
    HAPPY,
    RUNS,
    UNDO,
    WHOLE,
    Stage,
    a_move,
    a_swap,
    no_waiting,
)

from liveshift.errors import Refused, Unreachable
from liveshift.runtime.messages import Message
from liveshift.runtime.migration.host_migration import HostMigration
from liveshift.runtime.migration.migration import Migration
from liveshift.runtime.model.steps import MigrationStep

__all__ = ["no_waiting"]


class Cancelling(Stage):
    """Has the migration cancelled while an ask of this name waits for its answer; after the
    commit that is refused, and the answer comes."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at
        self.story: Migration | None = None
        self.refused: list[str] = []

    async def request(self, host: str, message: Message, timeout: float) -> Message | None:
        answer = await super().request(host, message, timeout)
        if type(message).__name__ == self.at and self.story is not None:
            story, self.story = self.story, None
            try:
                story.cancel("alice")
            except Refused as error:
                self.refused.append(str(error))
                return answer
            await asyncio.get_running_loop().create_future()  # whoever asks does not wait for it
        return answer


def play(stage: Cancelling) -> HostMigration:
    stage.story = move = a_move(stage)
    asyncio.run(asyncio.wait_for(move.run(), 20))
    return move


@pytest.mark.parametrize("at", range(len(BEFORE)), ids=lambda at: BEFORE[at].split()[0])
def test_before_the_commit_it_stays_at_its_source(at: int) -> None:
    """Also when the image is complete already: it is not asked for."""
    stage = Cancelling(BEFORE[at].split()[0])
    stage.fail("Progress", WHOLE, WHOLE)
    stage.fail("Settle h1", RUNS)
    move = play(stage)
    assert stage.said == [*BEFORE[: at + 1], *UNDO]
    assert stage.steps[-2:] == [MigrationStep.ROLLING_BACK, MigrationStep.FAILED]
    assert (move.capsule.host, move.capsule.epoch) == ("h1", 1)
    assert move.row().error == "cancelled by alice"
    assert len(stage.gates) in (0, 2), "no gate is left closed"


def test_a_complete_image_goes_on_when_the_source_has_gone_meanwhile() -> None:
    """Never none: that it was to be cancelled does not end the capsule."""
    stage = Cancelling("Freeze")
    stage.fail("Progress", WHOLE, WHOLE)
    stage.fail("Settle h1", Unreachable("h1 fell silent"))
    move = play(stage)
    assert move.step is MigrationStep.DONE
    assert (move.capsule.host, move.capsule.epoch) == ("h2", 2)


@pytest.mark.parametrize("at", ["RestoreCapsule", "Resume"])
def test_after_the_commit_it_is_refused_and_goes_on(at: str) -> None:
    stage = Cancelling(at)
    move = play(stage)
    assert stage.said == HAPPY
    assert move.step is MigrationStep.DONE
    (said,) = stage.refused
    assert (
        said
        == f"m7 is {'restoring' if at == 'RestoreCapsule' else 'resuming'}: too late to cancel it"
    )
    with pytest.raises(Refused, match="m7 is over: done"):
        move.cancel("alice")


@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_second_cancel_is_refused_and_the_first_counts_however_early(when: int) -> None:
    async def twice() -> None:
        move = a_move(Stage())
        running = asyncio.create_task(move.run())
        for _ in range(when):
            await asyncio.sleep(0)
        move.cancel("alice")
        with pytest.raises(Refused, match="m7 is being rolled back already"):
            move.cancel("bob")
        await running
        assert str(move.error) == "cancelled by alice"

    asyncio.run(twice())


@pytest.mark.parametrize("at", ["LookAtGpus", "SwapGpu"])
def test_a_swap_is_cancelled_until_its_device_state_is_on_its_way(at: str) -> None:
    stage = Cancelling(at)
    stage.story = swap = a_swap(stage)
    asyncio.run(swap.run())
    if at == "LookAtGpus":
        assert (swap.step, str(swap.error)) == (MigrationStep.FAILED, "cancelled by alice")
        assert stage.refused == []
    else:
        assert swap.step is MigrationStep.DONE
        assert stage.refused == ["m7 is freezing: too late to cancel it"]
