# SPDX-License-Identifier: Apache-2.0
"""A host that is the source of snapshots. Snapshots, trackers, capsules and the wire are stand-ins
that note what they are asked for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from waits import until_async

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.errors import NotFound, StepFailed
from liveshift.runtime import messages
from liveshift.runtime.agent import snapshot_handlers
from liveshift.runtime.agent.departure import snapshot_sessions
from liveshift.runtime.agent.departure.outgoing_snapshot import SnapshotRequest
from liveshift.runtime.agent.departure.snapshot_sessions import SnapshotSessions
from liveshift.runtime.agent.migration_registry import MigrationRegistry
from liveshift.runtime.agent.rulings import Rulings
from liveshift.runtime.agent.snapshot_handlers import SnapshotHandlers

WHO = ("s17.1", "gpt/1")
LOCK, DUMP = messages.LockCapsule(*WHO, 10.0), messages.DumpCapsule(*WHO, 10.0)
THAW, CLOSE = messages.ThawCapsule(*WHO), messages.CloseSnapshot(*WHO)
SEAL = messages.SealSnapshot(*WHO)
DIGEST = bytes(range(16))


def start(image: str = "s17.1") -> messages.StartSnapshot:
    return messages.StartSnapshot(image, "gpt/1", "h2", "tcp://h2:1", 16, 4, 10.0)


class Snapshot:
    """Stands in for one at its source; its steps may fail, and the first one may last."""

    def __init__(
        self,
        scene: Scene,
        image: str,
        resident: Any,
        devices: object = None,
        gpus: Sequence[str] = (),
        protected: bool = False,
        ordered: bool = False,
    ) -> None:
        self.snapshot, self.resident = image, resident
        self.devices, self.gpus, self.protected = devices, list(gpus), protected
        self.ordered = ordered
        self.closed, self.digest, self.off_gpus, self.early = False, b"", False, False
        self.request: SnapshotRequest | None = None
        self.interrupted = threading.Event()
        self._scene = scene

    def send_ahead(self, request: SnapshotRequest, _asked: float, _criu: object) -> messages.Moved:
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

    def seal(self) -> bytes:
        self._do("sealed")
        return self.digest

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
        self.wire: Any = None  # of the snapshot that was made last
        self.own_inboxes: dict[str, Any] = {}
        self.handlers = SnapshotHandlers(
            me, self, lambda: self.silence, lambda image: self.own_inboxes.get(image)
        )
        self.rulings = Rulings(me, self, me)
        monkeypatch.setattr(snapshot_handlers, "OutgoingSnapshot", self._make)
        monkeypatch.setattr(snapshot_sessions, "CapsuleTracker", self._track)

    def copy(self, rewinds: int = 0) -> Any:
        spec = SimpleNamespace(name="gpt/1", job="gpt")
        overlay = Overlay(7, "10.99.7.0/24", rewinds)
        deaths = SimpleNamespace(first=None)
        return SimpleNamespace(spec=spec, code=None, still=False, overlay=overlay, deaths=deaths)

    def _make(self, image: str, resident: Any, *rest: Any, protected: bool, ordered: bool) -> Any:
        *_, devices, gpus = rest
        self.wire = rest[1]
        self.made.append(Snapshot(self, image, resident, devices, gpus, protected, ordered))
        return self.made[-1]

    def _track(self, _resident: object) -> Any:
        self.done.append("tracker made")
        return SimpleNamespace(close=lambda: self.done.append("tracker closed"))

    def open_sender(self, migration: str, destination: str, endpoint: str) -> Any:
        self.done.append(f"{migration} to {destination} at {endpoint}")
        return SimpleNamespace(also=None)

    def open_lanes(self, beside: Any) -> Any:
        return SimpleNamespace(also=None, beside=beside)

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

    def ended_running(self, book: messages.Book) -> list[str]:
        return [f"gpt/{book.rewinds}"]

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
