# SPDX-License-Identifier: Apache-2.0
"""What a host does as the source of snapshots: requests that come in order, late, twice, or not at
all. Snapshots, trackers, capsules and the wire are stand-ins that note what they are asked for."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
from waits import until_async

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.errors import LiveshiftError, NotFound, Refused, StepFailed
from liveshift.runtime import messages
from liveshift.runtime.agent import snapshot_handlers
from liveshift.runtime.agent.departure import snapshot_sessions
from liveshift.runtime.agent.departure.outgoing_snapshot import SnapshotRequest
from liveshift.runtime.agent.departure.snapshot_sessions import SnapshotSessions
from liveshift.runtime.agent.host.rank_deaths import RankEnd
from liveshift.runtime.agent.migration_registry import MigrationRegistry
from liveshift.runtime.agent.rulings import Rulings
from liveshift.runtime.agent.snapshot_handlers import SnapshotHandlers

T = TypeVar("T")
WHO = ("s17.1", "gpt/1")
LOCK, DUMP = messages.LockCapsule(*WHO, 10.0), messages.DumpCapsule(*WHO, 10.0)
THAW, CLOSE = messages.ThawCapsule(*WHO), messages.CloseSnapshot(*WHO)
DIGEST = bytes(range(16))


def start(image: str = "s17.1") -> messages.StartSnapshot:
    return messages.StartSnapshot(image, "gpt/1", "h2", "tcp://h2:1", 16, 4, 10.0)


class Snapshot:
    """Stands in for one at its source; its steps may fail, and the first one may last."""

    def __init__(self, scene: Scene, image: str, resident: Any) -> None:
        self.snapshot, self.resident = image, resident
        self.closed, self.digest = False, b""
        self.request: SnapshotRequest | None = None
        self.interrupted = threading.Event()
        self._scene = scene

    def send_ahead(self, request: SnapshotRequest, _asked: float) -> messages.Moved:
        self.request = request
        if self._scene.lasts:
            self._scene.done.append("ahead")
            assert self.interrupted.wait(10)
            self._scene.fails = "sent"
        self._do("sent")
        return messages.Moved(14, [])

    def check_may_lock(self) -> None:
        self._do("checked")

    def lock(self, _deadline: float) -> None:
        assert self.resident.still, "signals are held back before"
        self._do("locked")

    def dump(self, criu: object, _deadline: float) -> messages.Frozen:
        assert criu == "criu"
        self._do("dumped")
        self.digest = DIGEST
        return messages.Frozen(7, [])

    def thaw(self) -> None:
        self._do("thawed")

    def abandon(self) -> None:
        self._scene.done.append("abandoned")
        self.interrupted.set()

    def close(self) -> None:
        if not self.closed:
            self._do("closed")
        self.closed = True

    def _do(self, what: str) -> None:
        self._scene.done.append(what)
        if what == self._scene.fails:
            raise StepFailed(what, "it failed")


class Scene(MigrationRegistry):
    """h1 with gpt/1; stands in for its table of capsules, too."""

    host = "h1"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        me = cast(Any, self)
        self._busy = set()
        self._capsule_table = me
        self.outgoing, self.incoming = {}, {}
        self.snapshots = SnapshotSessions()
        self.done: list[str] = []
        self.fails = ""
        self.lasts = False
        self.silence = 0.0
        self.criu = cast(Any, "criu")
        self.capsule = self.copy()
        self.capsules = {"gpt/1": self.capsule}
        self.factory = None
        timeouts = SimpleNamespace(heartbeat=0.01, suspicion=1.0, prepare=0.4)
        self.cluster = SimpleNamespace(timeouts=timeouts)
        self.made: list[Snapshot] = []
        self.handlers = SnapshotHandlers(me, self, lambda: self.silence)
        self.rulings = Rulings(me, self, me)
        monkeypatch.setattr(snapshot_handlers, "OutgoingSnapshot", self._make)
        monkeypatch.setattr(snapshot_sessions, "CapsuleTracker", self._track)

    def copy(self, rewinds: int = 0) -> Any:
        spec = SimpleNamespace(name="gpt/1", job="gpt")
        overlay = Overlay(7, "10.99.7.0/24", rewinds)
        deaths = SimpleNamespace(first=None)
        return SimpleNamespace(spec=spec, code=None, still=False, overlay=overlay, deaths=deaths)

    def _make(self, image: str, resident: Any, _factory: object, *_: object) -> Any:
        self.made.append(Snapshot(self, image, resident))
        return self.made[-1]

    def _track(self, _resident: object) -> Any:
        self.done.append("tracker made")
        return SimpleNamespace(close=lambda: self.done.append("tracker closed"))

    def open_sender(self, migration: str, destination: str, endpoint: str) -> Any:
        self.done.append(f"{migration} to {destination} at {endpoint}")

    def resident(self, capsule: str) -> Any:
        if capsule not in self.capsules:
            raise NotFound(f"{capsule} is not on h1")
        return self.capsules[capsule]

    async def hold_signals(self, resident: Any) -> None:
        resident.still = True

    async def end_capsule(self, request: messages.End) -> None:
        self.done.append(f"{request.capsule} ended")

    async def locate(self, request: messages.Locate) -> None:
        await self.rulings.drop_earlier(request.book)
        self.done.append("located")

    def run(self, *work: Coroutine[Any, Any, Any]) -> Any:
        """Run these, one after the other; return the last answer."""

        async def in_order() -> Any:
            answer = None
            for each in work:
                answer = await each
            return answer

        return asyncio.run(in_order())

    def begun(self) -> None:
        """Send ahead, and forget what was done for that."""
        self.run(self.handlers.start(start()))
        self.done.clear()

    def busy(self) -> bool:
        return self.snapshots.busy

    def beside(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Do ``work`` while a snapshot sends ahead, which then fails."""
        self.lasts = True

        async def both() -> None:
            first = asyncio.create_task(self.handlers.start(start()))
            await until_async(lambda: "ahead" in self.done)
            await work()
            with pytest.raises(StepFailed):
                await first

        asyncio.run(both())


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


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


def test_what_does_not_end_stays_known_and_is_tried_again(scene: Scene) -> None:
    scene.begun()
    scene.fails = "closed"
    with pytest.raises(StepFailed):
        scene.run(scene.snapshots.end("gpt/1"))
    assert scene.busy()
    scene.fails = ""
    scene.run(scene.snapshots.end("gpt/1"))
    assert scene.done[-1] == "tracker closed"


# ---- after a rewind ----------------------------------------------------------------------------


def book(rewinds: int, job: str = "gpt") -> messages.Book:
    return messages.Book(job, 7, "10.99.7.0/24", {}, rewinds)


def test_a_rewind_ends_the_sessions_of_earlier_copies(scene: Scene) -> None:
    scene.begun()
    scene.run(scene.handlers.end_earlier(messages.EndEarlier(book(1))))
    assert scene.done == ["abandoned", "closed", "tracker closed", "located"]


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
