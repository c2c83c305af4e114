# SPDX-License-Identifier: Apache-2.0
"""A rewind of its job overtakes a migration: nothing of the order of things is done after that,
wherever it is and whatever comes then."""

from __future__ import annotations

import asyncio

import pytest
from migration_stage import HELD, NOT_DONE, Stage, a_move, a_swap

from liveshift.errors import LiveshiftError, Refused, Unreachable
from liveshift.runtime.messages import Message
from liveshift.runtime.migration.host_migration import HostMigration
from liveshift.runtime.migration.migration import Migration
from liveshift.runtime.model.steps import ALLOWED, ALLOWED_IN_SWAP, ENDS, MigrationStep

BACK = LiveshiftError("gpt goes back to s1: h2 is silent")


class Silent(Stage):
    """Asks of these names have no answer."""

    def __init__(self, *silent: str, grants: bool = False) -> None:
        super().__init__()
        self.silent = silent
        self.grants = grants

    async def request(self, host: str, message: Message, timeout: float) -> Message | None:
        answer = await super().request(host, message, timeout)
        await asyncio.sleep(0)
        if any(word in self.said[-1] for word in self.silent):
            raise Unreachable(f"{host} fell silent")
        return answer


def overtaken(stage: Stage, move: Migration) -> tuple[str, list[str]]:
    """For what it waited; what it did once the rewind was written."""

    async def play() -> tuple[str, list[str]]:
        async with asyncio.timeout(20):
            work = asyncio.ensure_future(move.until_over(move.run()))
            while not move.waits:
                await asyncio.sleep(0)
            waits, said = move.waits, len(stage.said)
            move.overtake(BACK)
            await work
            return waits, stage.said[said:]

    return asyncio.run(play())


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda _seconds: at_once(0))


@pytest.mark.parametrize(
    ("stage", "waits", "step"),
    [
        (Silent("Freeze", "Settle", "Progress"), "h1 or h2", MigrationStep.ROLLING_BACK),
        (Silent("RestoreCapsule", grants=True), "h2", MigrationStep.RESTORING),
        (Silent("RestoreCapsule", "Settle"), "h1 or h2", MigrationStep.RETURNING),
    ],
)
def test_it_does_nothing_any_more(stage: Silent, waits: str, step: MigrationStep) -> None:
    move = a_move(stage)
    assert overtaken(stage, move) == (waits, [])
    assert stage.steps[-2:] == [step, MigrationStep.REWOUND]
    assert move.row().error == str(BACK)
    assert not move.holds_gates
    assert not [word for word in stage.gates if word.startswith("open")], "the rewind opens them"


@pytest.mark.parametrize("step", [step for step in MigrationStep if step not in ENDS])
def test_wherever_it_is_a_rewind_may_overtake_it(step: MigrationStep) -> None:
    assert MigrationStep.REWOUND in ALLOWED[step]
    assert MigrationStep.REWOUND in ALLOWED_IN_SWAP.get(step, {MigrationStep.REWOUND})


class Stuck(Stage):
    """It never answers what begins so, nor finds a boundary if that is "quiesce"."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.reached = asyncio.Event()

    async def request(self, host: str, message: Message, timeout: float) -> Message | None:
        answer = await super().request(host, message, timeout)
        if self.said[-1] == self.what:
            await self.hang()
        return answer

    async def quiesce(self, migration: Migration) -> str:
        if self.what == "quiesce":
            await self.hang()
        return await super().quiesce(migration)

    async def hang(self) -> None:
        self.reached.set()
        await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize(
    ("what", "step"),
    [
        ("Inspect h1", MigrationStep.PREPARING),
        ("Reserve h2", MigrationStep.PREPARING),
        ("StartPrecopy h1", MigrationStep.PRECOPYING),
        ("quiesce", MigrationStep.QUIESCING),
        ("Freeze h1", MigrationStep.FREEZING),
        ("RestoreCapsule h2", MigrationStep.RESTORING),
        ("Resume h2", MigrationStep.RESUMING),
        ("Settle h1", MigrationStep.FINISHING),
    ],
)
def test_one_that_goes_on_does_nothing_any_more_either(what: str, step: MigrationStep) -> None:
    stage = Stuck(what)
    move = a_move(stage)

    async def play() -> None:
        async with asyncio.timeout(20):
            work = asyncio.ensure_future(move.until_over(move.run()))
            await stage.reached.wait()
            assert (move.step, move.waits) == (step, "")
            said, gates = list(stage.said), list(stage.gates)
            move.overtake(BACK)
            await work
            assert (stage.said, stage.gates) == (said, gates), "the rewind opens the gates"

    asyncio.run(play())
    assert stage.steps[-1] is MigrationStep.REWOUND
    assert (move.holds_gates, move.row().error) == (False, str(BACK))


def test_nor_does_a_swap() -> None:
    stage = Silent("SwapGpu", "SettleSwap")
    swap = a_swap(stage)
    assert overtaken(stage, swap) == ("h1", [])
    assert stage.steps[-2:] == [MigrationStep.FREEZING, MigrationStep.REWOUND]


def test_one_whose_source_was_to_get_it_back_waits_for_it_only_if_it_may_run_there() -> None:
    class Passing(Silent):
        async def request(self, host: str, message: Message, timeout: float) -> Message | None:
            answer = await super().request(host, message, timeout)
            if self.capsule is not None and self.capsule.host == "h1" and self.capsule.epoch > 1:
                self.capsule.granted = True
                raise Unreachable("h1 fell silent")
            return answer

    stage = Passing()
    stage.fail("RestoreCapsule", NOT_DONE, NOT_DONE)
    stage.fail("Settle h1", HELD)
    move = a_move(stage)
    assert overtaken(stage, move) == ("h1", [])
    assert move.step is MigrationStep.REWOUND


def test_a_cancel_that_came_just_before_does_not_let_it_go_on() -> None:
    """It waits for a snapshot to open the gates; then a person cancels it."""

    class Held(Stage):
        async def quiesce(self, migration: Migration) -> str:
            migration.waits = "s7"
            await asyncio.get_running_loop().create_future()
            return ""

    stage = Held()
    move = a_move(stage)

    async def play() -> None:
        async with asyncio.timeout(20):
            work = asyncio.ensure_future(move.until_over(move.run()))
            while not move.waits:
                await asyncio.sleep(0)
            move.cancel("alice")
            move.overtake(BACK)
            await work

    asyncio.run(play())
    assert move.step is MigrationStep.REWOUND
    assert not [word for word in stage.said if word.startswith("Settle")]


def test_one_that_is_overtaken_before_it_has_begun_never_begins() -> None:
    stage = Stage()
    move = a_move(stage)
    move.overtake(BACK)
    asyncio.run(move.until_over(move.run()))
    assert (stage.said, stage.steps) == ([], [MigrationStep.REWOUND])


def test_an_error_of_one_that_was_overtaken_is_logged_and_goes_no_further(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whoever runs it has work to do after its end: a drain waits for that."""
    move, begun = a_move(Stage()), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("the disk is full")

    async def play() -> None:
        whole = asyncio.ensure_future(move.until_over(work()))
        await begun.wait()
        move.overtake(BACK)
        await asyncio.wait_for(whole, 10)

    asyncio.run(play())
    assert move.step is MigrationStep.REWOUND
    assert "m7 was ended by a rewind, and its work by an error" in caplog.text
    assert "the disk is full" in caplog.text


def test_an_error_of_one_that_was_not_overtaken_is_raised() -> None:
    async def work() -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        asyncio.run(a_move(Stage()).until_over(work()))


def test_while_a_host_swaps_gpus_it_is_not_overtaken() -> None:
    swap = a_swap(Stage())
    swap.step = MigrationStep.FREEZING
    with pytest.raises(AssertionError, match="m7 goes on"):
        swap.overtake(BACK)


def test_it_passes_no_capsule_of_the_rewind_on() -> None:
    move: HostMigration = a_move(Stage())
    move.step = MigrationStep.REWOUND
    with pytest.raises(Refused, match="m7 is over"):
        move._pass_to("h2", still=True)
    assert (move.capsule.host, move.capsule.epoch) == ("h1", 1)


def test_the_end_of_the_orchestrator_ends_its_work_and_leaves_its_step() -> None:
    stage = Silent("RestoreCapsule", grants=True)
    move = a_move(stage)

    async def play() -> bool:
        work = asyncio.ensure_future(move.until_over(move.run()))
        while not move.waits:
            await asyncio.sleep(0)
        work.cancel()
        await asyncio.wait({work})
        return work.cancelled()

    assert asyncio.run(play())
    assert move.step is MigrationStep.RESTORING
