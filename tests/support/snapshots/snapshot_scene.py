# SPDX-License-Identifier: Apache-2.0
"""A snapshot at its source whose CRIU, wire, network, memory and tracker are stand-ins. They only
note what they were asked for, and fail where a test wants that."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from outgoing_scene import INIT, NO_CRIU, Scene
from waits import until

from liveshift.runtime.agent.departure import outgoing_snapshot, thaw_timer
from liveshift.runtime.agent.departure.outgoing_memory import OutgoingWire
from liveshift.runtime.agent.departure.outgoing_phase import SnapshotPhase
from liveshift.runtime.agent.departure.outgoing_snapshot import OutgoingSnapshot
from liveshift.runtime.agent.departure.paused_silence import PausedSilence
from liveshift.runtime.agent.host.running_capsule import CapsuleFactory, RunningCapsule
from liveshift.runtime.messages import Frozen, Moved

LENT = "lent to h2, which stands at 16 and knows 4"
AHEAD = [LENT, "memory begun", f"prepare_lock {INIT}", "all is there", "round", "start_ahead"]
LOCK = ["rounds stopped", f"lock {INIT}"]
DUMP = ["dump", "output", "all is there", "still held", "lanes ended", "manifest", "all is there"]
THAW = ["thaw", f"unlock {INIT}"]
CLOSE = ["output closed", "memory closed", "returned 17", "wire closed"]
DIGEST = bytes(range(16))


class Memory:
    """The memory of the capsule: CRIU dumps all of it, and a round goes ahead before."""

    def __init__(self, scene: SnapshotScene) -> None:
        self.sent = 0
        self.lanes = None
        self.interrupted = threading.Event()
        self.round_waits = False
        self._scene = scene
        self.begin_snapshot = scene.note("memory begun")
        self.stop_rounds = scene.note("rounds stopped")
        self.page_filter = lambda _images: None
        self.send_final_set = lambda *_: None
        self.cancel = self.interrupted.set
        self.give_up = lambda: None
        self.close = scene.note("memory closed")

    def send_ahead(self, _until: float, _lap: object) -> None:
        self._scene.note("round")()
        if self.round_waits:
            assert self.interrupted.wait(10)

    def end_streams(self) -> dict[str, tuple[int, int]]:
        self._scene.note("lanes ended")()
        return {}

    def digest(self) -> bytes:
        self._scene.note("digest")()
        return DIGEST


class SnapshotScene(Scene):
    """gpt/1 runs on h0; its image goes to h2 as s17.1."""

    def __init__(self, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(images, monkeypatch)
        patch = monkeypatch.setattr
        self.memory = Memory(self)
        self.factory.host = "h0"
        self.factory.cluster = SimpleNamespace(
            precopy=None,
            timeouts=SimpleNamespace(prepare=60.0),
            wire=SimpleNamespace(streams=4),
            paths=SimpleNamespace(run=images.parent),
        )
        patch(outgoing_snapshot, "OutgoingMemory", lambda *_: self.memory)
        patch(thaw_timer, "AGAIN_S", 0.01)
        resident: RunningCapsule = self.resident
        factory: CapsuleFactory = self.factory
        self.tracker: Any = SimpleNamespace(
            lend=self._lend,
            returned=self._returned,
            sends_all=False,
            silence=PausedSilence(),
        )
        self.tracker.silence.learn = self._learn_silence
        tracker: Any = self.tracker
        no_lanes: Any = None
        self.learnt: list[tuple[float, bool, float]] = []
        self.own: int | None = None
        give_up = self.note("copy given up")
        wire = OutgoingWire(self.wire, no_lanes, lambda _report: None, lambda _why: give_up())
        self.snapshot = OutgoingSnapshot("s17.1", resident, factory, wire, tracker)
        snapshot: Any = self.snapshot
        self.equip(snapshot)
        patch(self.snapshot._frozen.tree, "check_held", self.note("still held"))
        patch(self.snapshot._frozen.tree, "held", lambda: True)
        self.snapshot._files._trees = []
        self.resident.still = False

    def _lend(self, holder: str, stands: int, least: int) -> None:
        self.note(f"lent to {holder}, which stands at {stands} and knows {least}")()

    def _learn_silence(self, longest: float, *, broken: bool, most: float) -> None:
        self.learnt.append((longest, broken, most))

    def _returned(self, generation: int) -> None:
        self.note(f"returned {generation}")()

    def ahead(self, deadline_s: float = 60.0) -> Moved:
        request: Any = SimpleNamespace(
            generation=17,
            destination="h2",
            stands=16,
            least=4,
            own=self.own,
            deadline=deadline_s,
        )
        return self.snapshot.send_ahead(request, time.monotonic(), NO_CRIU)

    def lock(self, deadline_s: float = 60.0) -> None:
        """As the handler does: signals are held back before."""
        self.snapshot.check_may_lock()
        self.resident.still = True
        self.snapshot.lock(deadline_s)

    def dump(self, deadline_s: float = 60.0) -> Frozen:
        return self.snapshot.dump(NO_CRIU, deadline_s)

    def ends(self) -> None:
        """Wait until the snapshot has left nothing here."""
        until(lambda: self.snapshot._closed)

    def goes_on(self) -> bool:
        """Whether the capsule runs with an open network, takes signals, and nothing is left."""
        over = self.snapshot.phase is SnapshotPhase.OVER and self.snapshot._closed
        locked = self.snapshot._frozen._locked or self.resident.still
        return over and not locked and not self.images.exists()


@pytest.fixture
def snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SnapshotScene]:
    made = SnapshotScene(tmp_path / "images", monkeypatch)
    yield made
    made.fails = ""
    made.snapshot.close()
