# SPDX-License-Identifier: Apache-2.0
"""What a host does as the source of snapshots: requests that come in order, late, twice, or not at
all. Snapshots, trackers, capsules and the wire are stand-ins that note what they are asked for."""

from __future__ import annotations

import asyncio
import signal
import threading
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from snapshot_handlers_scene import CLOSE, DIGEST, DUMP, LOCK, SEAL, THAW, Scene, scene, start
from waits import until_async

from liveshift.errors import LiveshiftError, NotFound, Refused, StepFailed
from liveshift.runtime import messages
from liveshift.runtime.agent import snapshot_handlers
from liveshift.runtime.agent.host.rank_deaths import RankEnd

__all__ = ["scene"]

# ---- the order ---------------------------------------------------------------------------------


def test_a_snapshot_goes_from_start_to_its_digest(scene: Scene) -> None:
    handlers = scene.handlers
    assert scene.run(handlers.start(start())).bytes == 14
    assert scene.done == ["tracker made", "s17.1 to h2 at tcp://h2:1", "sent"]
    asked = scene.made[0].request
    assert asked is not None
    assert (asked.generation, asked.destination) == (17, "h2")
    assert (asked.stands, asked.least, asked.deadline) == (16, 4, 10.0)
    scene.done.clear()
    assert scene.run(handlers.lock(LOCK), handlers.dump(DUMP)).image_bytes == 7
    scene.run(handlers.thaw(THAW))
    assert (scene.done, scene.busy()) == (["checked", "locked", "dumped", "thawed"], True)
    assert scene.run(handlers.close(CLOSE)) == messages.SnapshotClosed(DIGEST)
    assert not scene.busy()
    assert scene.run(handlers.close(CLOSE)) == messages.SnapshotClosed(DIGEST), "again"
    assert scene.done[4:] == ["closed"], "and the tracker lives on"


def test_the_next_snapshot_has_the_tracker_of_the_one_before(scene: Scene) -> None:
    scene.begun()
    scene.run(scene.handlers.close(CLOSE), scene.handlers.start(start("s18.1")))
    assert scene.done == ["closed", "s18.1 to h2 at tcp://h2:1", "sent"]
    with pytest.raises(NotFound, match=r"h1 has no snapshot s17\.1 of gpt/1"):
        scene.run(scene.handlers.lock(LOCK))
    assert scene.run(scene.handlers.close(CLOSE)) == messages.SnapshotClosed(b"")


def test_an_earlier_snapshot_ends_before_the_next_one_begins(scene: Scene) -> None:
    scene.begun()
    scene.run(scene.handlers.start(start("s18.1")))
    assert scene.done == ["abandoned", "closed", "s18.1 to h2 at tcp://h2:1", "sent"]


def test_another_copy_of_the_capsule_has_another_tracker(scene: Scene) -> None:
    scene.begun()
    scene.capsules["gpt/1"] = scene.copy()
    scene.run(scene.handlers.start(start("s18.1")))
    assert scene.done[:4] == ["abandoned", "closed", "tracker closed", "tracker made"]


@pytest.mark.parametrize("ordered", [False, True])
def test_the_source_knows_whether_a_person_has_ordered_it(scene: Scene, ordered: bool) -> None:
    scene.run(scene.handlers.start(msgspec.structs.replace(start(), ordered=ordered)))
    assert scene.made[0].ordered is ordered


# ---- what cannot be ----------------------------------------------------------------------------


def test_a_capsule_that_moves_has_no_snapshot(scene: Scene) -> None:
    scene.outgoing["m1"] = cast(Any, SimpleNamespace(resident=scene.capsule, migration="m1"))
    with pytest.raises(Refused, match="gpt/1 is held by m1 still"):
        scene.run(scene.handlers.start(start()))
    assert (scene.made, scene.busy()) == ([], False)


@pytest.mark.parametrize("image", ["m17", "s0.1", "s17"])
def test_an_image_needs_a_number(scene: Scene, image: str) -> None:
    with pytest.raises(LiveshiftError, match=f'cannot have the name "{image}"'):
        scene.run(scene.handlers.start(start(image)))
    assert scene.made == []


def test_a_host_without_criu_refuses_at_once(scene: Scene) -> None:
    scene.criu = None
    with pytest.raises(Refused, match="h1 has no CRIU"):
        scene.run(scene.handlers.start(start()))
    assert scene.made == []


def test_orders_for_what_is_not_here(scene: Scene) -> None:
    """As after a restart of the agent, which has thawed the capsule: no dump may follow."""
    for order in (scene.handlers.lock(LOCK), scene.handlers.dump(DUMP)):
        with pytest.raises(NotFound, match=r"h1 has no snapshot s17\.1 of gpt/1"):
            scene.run(order)
    scene.run(scene.handlers.thaw(THAW))
    assert scene.run(scene.handlers.close(CLOSE)) == messages.SnapshotClosed(b"")
    assert (scene.done, scene.capsule.still) == ([], False)


def test_a_lock_that_comes_too_late_holds_no_signals(scene: Scene) -> None:
    scene.begun()
    scene.fails = "checked"
    with pytest.raises(StepFailed):
        scene.run(scene.handlers.lock(LOCK))
    assert (scene.done, scene.capsule.still) == (["checked"], False)


# ---- its end -----------------------------------------------------------------------------------


def test_a_capsule_of_which_a_rank_has_ended_has_no_snapshot(scene: Scene) -> None:
    """torchrun may not have noticed yet; in a rewind to that image it would."""
    scene.begun()
    scene.capsule.deaths.first = RankEnd(signal.SIGKILL, 7)
    with pytest.raises(StepFailed, match="a rank of gpt/1 has ended by SIGKILL"):
        scene.run(scene.handlers.lock(LOCK))
    assert not scene.capsule.still
    assert "locked" not in scene.done


def test_an_image_is_of_no_use_if_a_rank_ended_before_the_freeze(scene: Scene) -> None:
    scene.begun()
    scene.run(scene.handlers.lock(LOCK), scene.handlers.dump(DUMP), scene.handlers.thaw(THAW))
    scene.capsule.deaths.first = RankEnd(0, 7)
    with pytest.raises(StepFailed, match=r"a rank of gpt/1 has ended$"):
        scene.run(scene.handlers.close(CLOSE))
    assert not scene.busy(), "it is closed all the same"


def test_an_image_is_of_no_use_if_its_capsule_went_on_before_it_was_asked_to(scene: Scene) -> None:
    scene.begun()
    scene.run(scene.handlers.lock(LOCK), scene.handlers.dump(DUMP))
    scene.made[0].early = True
    with pytest.raises(StepFailed, match="gpt/1 went on by itself, perhaps before all of its job"):
        scene.run(scene.handlers.close(CLOSE))
    assert not scene.busy(), "it is closed all the same"


def test_a_thaw_does_not_wait_for_the_work_under_way(scene: Scene) -> None:
    async def thaw() -> None:
        await asyncio.wait_for(scene.handlers.thaw(THAW), 5)
        assert scene.done[-1] == "thawed"
        scene.made[0].interrupted.set()

    scene.beside(thaw)


def test_the_end_of_the_capsule_gives_the_snapshot_up(scene: Scene) -> None:
    scene.beside(lambda: scene.handlers.end(messages.End("gpt/1", 3)))
    assert "abandoned" in scene.done
    assert "gpt/1 ended" in scene.done


def test_snapshots_are_given_up_while_the_orchestrator_is_silent(scene: Scene) -> None:
    async def silent() -> None:
        keeping = asyncio.create_task(scene.handlers.keep())
        await asyncio.sleep(0.05)
        assert "abandoned" not in scene.done
        scene.silence = 2.1
        await until_async(lambda: "abandoned" in scene.done)
        keeping.cancel()

    scene.beside(silent)


@pytest.mark.parametrize("how", ["ended", "left"])
def test_a_capsule_that_is_gone_leaves_no_tracker(scene: Scene, how: str) -> None:
    scene.begun()
    if how == "ended":
        scene.capsule.code = 0
    else:
        scene.capsules.clear()

    async def keep() -> None:
        keeping = asyncio.create_task(scene.handlers.keep())
        await until_async(lambda: "tracker closed" in scene.done)
        keeping.cancel()

    asyncio.run(keep())
    assert scene.done == ["abandoned", "closed", "tracker closed"]
    assert not scene.busy()


def test_a_migration_or_a_forecast_gets_the_memory(scene: Scene) -> None:
    scene.begun()
    scene.run(scene.snapshots.end("gpt/1"))
    assert scene.done == ["abandoned", "closed", "tracker closed"]
    scene.run(scene.snapshots.end("gpt/1"), scene.handlers.start(start("s18.1")))
    assert scene.done[3:] == ["tracker made", "s18.1 to h2 at tcp://h2:1", "sent"]


def test_no_snapshot_follows_memory_beside_a_forecast(scene: Scene) -> None:
    """Each would protect again what the other has yet to see, and the image would be stale."""
    scene.begun()

    async def act() -> None:
        async with scene.snapshots.forecast("gpt/1"):
            assert scene.done == ["abandoned", "closed", "tracker closed"]
            begins = asyncio.create_task(scene.handlers.start(start("s18.1")))
            await asyncio.sleep(0.05)
            assert not begins.done()
            assert scene.done[3:] == []
        assert (await begins).bytes == 14

    asyncio.run(act())
    assert scene.done[3:] == ["tracker made", "s18.1 to h2 at tcp://h2:1", "sent"]


def test_a_forecast_that_begins_just_before_a_snapshot_goes_first(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    forecast = scene.snapshots.forecast("gpt/1")

    async def devices(_request: object) -> None:
        await forecast.__aenter__()

    monkeypatch.setattr(scene.handlers, "_devices", devices)
    with pytest.raises(Refused, match="a forecast looks at the memory of gpt/1"):
        scene.run(scene.handlers.start(start()))
    assert scene.done == []


def test_what_does_not_end_stays_known_and_is_tried_again(scene: Scene) -> None:
    scene.begun()
    scene.fails = "closed"
    with pytest.raises(StepFailed):
        scene.run(scene.snapshots.end("gpt/1"))
    assert scene.busy()
    scene.fails = ""
    scene.run(scene.snapshots.end("gpt/1"))
    assert scene.done[-1] == "tracker closed"


# ---- before a suspension -----------------------------------------------------------------------


def test_a_capsule_that_is_sealed_stays_frozen(scene: Scene) -> None:
    scene.begun()
    scene.run(scene.handlers.lock(LOCK), scene.handlers.dump(DUMP))
    for _ in range(2):
        assert scene.run(scene.handlers.seal(SEAL)) == messages.SnapshotClosed(DIGEST)
    assert scene.done == ["checked", "locked", "dumped", "sealed", "sealed"]
    assert scene.capsule.still
    assert scene.busy(), "its session has not ended"


def test_a_seal_for_what_is_not_here_is_refused(scene: Scene) -> None:
    """As after a restart of the agent, which has thawed the capsule: no write may follow."""
    with pytest.raises(NotFound, match=r"h1 has no snapshot s17\.1 of gpt/1"):
        scene.run(scene.handlers.seal(SEAL))
    scene.run(scene.handlers.start(start("s18.1")))
    with pytest.raises(NotFound, match=r"h1 has no snapshot s17\.1 of gpt/1"):
        scene.run(scene.handlers.seal(SEAL))
    assert "sealed" not in scene.done


def test_a_seal_that_fails_at_the_source_is_passed_on(scene: Scene) -> None:
    scene.begun()
    scene.fails = "sealed"
    with pytest.raises(StepFailed, match="it failed"):
        scene.run(scene.handlers.lock(LOCK), scene.handlers.dump(DUMP), scene.handlers.seal(SEAL))


def test_a_job_of_which_a_rank_ended_before_the_freeze_is_not_suspended(scene: Scene) -> None:
    scene.begun()
    scene.run(scene.handlers.lock(LOCK), scene.handlers.dump(DUMP))
    scene.capsule.deaths.first = RankEnd(signal.SIGKILL, 7)
    with pytest.raises(StepFailed, match="a rank of gpt/1 has ended by SIGKILL"):
        scene.run(scene.handlers.seal(SEAL))


def test_a_sealed_capsule_goes_on_when_it_is_thawed_or_the_orchestrator_is_silent(
    scene: Scene,
) -> None:
    scene.begun()
    scene.run(scene.handlers.lock(LOCK), scene.handlers.dump(DUMP), scene.handlers.seal(SEAL))
    scene.run(scene.handlers.thaw(THAW))
    assert scene.done[-1] == "thawed"
    scene.silence = 2.1

    async def silent() -> None:
        keeping = asyncio.create_task(scene.handlers.keep())
        await until_async(lambda: "abandoned" in scene.done)
        keeping.cancel()

    asyncio.run(silent())


def test_the_end_of_earlier_copies_ends_the_session_of_a_sealed_capsule(scene: Scene) -> None:
    scene.begun()
    scene.run(scene.handlers.lock(LOCK), scene.handlers.dump(DUMP), scene.handlers.seal(SEAL))
    scene.run(scene.handlers.end_earlier(messages.EndEarlier(book(1))))
    assert scene.done[4:] == ["abandoned", "closed", "tracker closed", "located"]
    assert not scene.busy()


# ---- after a rewind ----------------------------------------------------------------------------


def book(rewinds: int, job: str = "gpt") -> messages.Book:
    return messages.Book(job, 7, "10.99.7.0/24", {}, rewinds)


def test_a_rewind_ends_the_sessions_of_earlier_copies(scene: Scene) -> None:
    scene.begun()
    ended = scene.run(scene.handlers.end_earlier(messages.EndEarlier(book(1))))
    assert scene.done == ["abandoned", "closed", "tracker closed", "located"]
    assert ended == messages.EarlierEnded(["gpt/1"]), "as the table says"


@pytest.mark.parametrize("other", [book(0), book(1, "other")])
def test_sessions_of_the_rewind_and_of_other_jobs_stay(scene: Scene, other: messages.Book) -> None:
    scene.begun()
    scene.run(scene.handlers.end_earlier(messages.EndEarlier(other)))
    assert scene.done == ["located"]
    assert scene.busy()


def test_a_session_that_does_not_end_keeps_the_new_copy_away(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.begun()
    may_end = threading.Event()
    monkeypatch.setattr(scene.made[0], "close", lambda: may_end.wait(10))

    async def end() -> None:
        try:
            with pytest.raises(Refused, match=r"still works on gpt/1, 0\.2 s after"):
                await scene.handlers.end_earlier(messages.EndEarlier(book(1)))
        finally:
            may_end.set()

    asyncio.run(end())
    assert "located" not in scene.done


# ---- capsules with GPUs --------------------------------------------------------------------------


def on_a_gpu(newest: int = 0) -> messages.StartSnapshot:
    return msgspec.structs.replace(start(), gpus=["GPU-a"], newest=newest)


def test_a_capsule_with_a_gpu_keeps_it_while_its_device_state_is_off(scene: Scene) -> None:
    asked = []

    def tree(*args: object, **how: object) -> str:
        asked.append((*args, how))
        return "its CUDA processes"

    scene.devices = cast(Any, SimpleNamespace(tree=tree))
    scene.reservations = cast(Any, SimpleNamespace(chosen={}))
    scene.gpus_swapped = {}
    scene.run(scene.handlers.start(on_a_gpu(newest=16)))
    (made,) = scene.made
    assert (made.devices, made.gpus, made.protected) == ("its CUDA processes", ["GPU-a"], True)
    assert asked == [("s17.1", scene.capsule, {"plain": snapshot_handlers.PLAIN})]
    assert scene.gpus_taken() == {"GPU-a": "is kept for gpt/1, of which s17.1 is taken"}
    scene.run(scene.handlers.close(CLOSE))
    assert scene.gpus_taken() == {}


def test_a_capsule_without_a_gpu_asks_no_helper(scene: Scene) -> None:
    scene.devices = cast(Any, None)
    scene.run(scene.handlers.start(start()))
    assert (scene.made[0].devices, scene.made[0].gpus, scene.made[0].protected) == (None, [], False)


def test_without_a_gpu_helper_nothing_begins(scene: Scene) -> None:
    scene.devices = cast(Any, SimpleNamespace(tree=lambda *_, **__: None))
    with pytest.raises(Refused, match="gpt/1 uses a GPU, and h1 has no GPU helper"):
        scene.run(scene.handlers.start(on_a_gpu()))
    assert scene.made == []


def test_a_survey_waits_until_device_state_is_back(scene: Scene) -> None:
    """Else it would find a process that is stopped, and nobody but we have stopped it."""
    scene.begun()
    scene.made[0].off_gpus = True

    async def both() -> None:
        waits = asyncio.create_task(scene.until_on_gpus("gpt/1"))
        await asyncio.sleep(0.05)
        assert not waits.done()
        scene.made[0].off_gpus = False
        await waits
        scene.made[0].off_gpus = True
        await scene.until_on_gpus("gpt/1")  # it gives up
        await scene.until_on_gpus("gpt/0")

    asyncio.run(both())


# ---- the copy that this host keeps -------------------------------------------------------------


class Taker:
    """The inbox of a copy."""

    def __init__(self) -> None:
        self.took: list[tuple[str, bytes]] = []
        self.closed = 0

    def write(self, stream: str, data: memoryview) -> None:
        self.took.append((stream, bytes(data)))

    def take_pages(self, chunk: memoryview) -> None:
        self.took.append(("pages", bytes(chunk)))

    def close(self) -> None:
        self.closed += 1


def test_what_goes_to_the_holder_goes_to_the_copy_too(scene: Scene) -> None:
    """Streams in their order, and the pages of all lanes."""
    inbox = scene.own_inboxes["s17.1"] = Taker()
    scene.run(scene.handlers.start(msgspec.structs.replace(start(), own=16)))
    asked = scene.made[0].request
    assert asked is not None
    assert asked.own == 16
    scene.wire.sender.also("image:core-1.img", b"registers")
    lanes = scene.wire.open_lanes(scene.wire.sender)
    assert lanes.beside is scene.wire.sender
    lanes.also(memoryview(b"chunk"))
    assert inbox.took == [("image:core-1.img", b"registers"), ("pages", b"chunk")]
    scene.wire.give_up_copy("the holder has more")
    scene.wire.sender.also("image:core-2.img", b"registers")
    assert (len(inbox.took), inbox.closed) == (2, 1)


@pytest.mark.parametrize(("own", "inbox"), [(None, True), (16, False)])
def test_without_an_order_or_an_inbox_there_is_no_copy(
    scene: Scene, own: int | None, inbox: bool
) -> None:
    if inbox:
        scene.own_inboxes["s17.1"] = Taker()
    scene.run(scene.handlers.start(msgspec.structs.replace(start(), own=own)))
    assert scene.wire.sender.also is None
    assert scene.wire.open_lanes(scene.wire.sender).also is None
