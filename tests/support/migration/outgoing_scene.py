# SPDX-License-Identifier: Apache-2.0
"""A migration at its source whose CRIU, wire, network and devices are stand-ins. They only note
what they were asked for, and fail where a test wants that."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from liveshift.criu_glue.capsule import output as capsule_output
from liveshift.criu_glue.criu.dump import FrozenTree
from liveshift.criu_glue.images import file_locks
from liveshift.criu_glue.network import network_lock
from liveshift.criu_glue.survey import epoll_sets
from liveshift.errors import LiveshiftError, StepFailed
from liveshift.runtime.agent.departure import (
    freeze_obstacles,
    frozen_capsule,
    outgoing_files,
)
from liveshift.runtime.agent.departure.outgoing_memory import OutgoingWire
from liveshift.runtime.agent.departure.outgoing_migration import OutgoingMigration
from liveshift.runtime.agent.departure.outgoing_note import PROMISED
from liveshift.runtime.agent.departure.outgoing_phase import OutgoingPhase
from liveshift.runtime.agent.host import carried_out
from liveshift.runtime.messages import Moved
from liveshift.runtime.wire.silence import Silence

INIT = 4711
PREPARED, LOCKED, OPENED = f"prepare_lock {INIT}", f"lock {INIT}", f"unlock {INIT}"
NO_CRIU: Any = None


class Scene:
    """gpt/1 leaves h0 as m1; its pre-copy is over."""

    def __init__(self, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.fails: str | set[str] = ""
        self.error: Callable[[str], BaseException] = _failed
        self.alive = True
        self.images = images
        self._patch = monkeypatch
        plan = SimpleNamespace(tmp=images / "tmp", log=images / "log")
        sandbox: Any = SimpleNamespace(plan=plan, init=INIT, root=images, alive=lambda: self.alive)
        sandbox.pipes = lambda: {20: 20, 21: 21}
        self.resident: Any = SimpleNamespace(
            sandbox=sandbox,
            spec=SimpleNamespace(name="gpt/1", index=1),
            epoch=3,
            still=True,
            leaving=False,
            unplug=self.note("unplugged"),
            remove=self.note("removed"),
        )
        self.factory: Any = SimpleNamespace(
            placement=SimpleNamespace(carried=[]), images=lambda _migration: images
        )
        self.wire: Any = SimpleNamespace(
            finish=self.note("all is there"),
            send=None,
            streams={},
            bytes=0,
            send_manifest=self.note("manifest"),
            close=self.note("wire closed"),
            until=float("inf"),
            silence=Silence(),
            to=SimpleNamespace(patience=10.0),
        )
        self.passing: list[list[tuple[str, str]]] = []
        self.entries: list[object] = []
        self.stale: list[list[tuple[str, str]]] = []
        self._stand_in()
        self.outgoing = self.make()
        self.outgoing._enter(OutgoingPhase.PRECOPYING)

    def make(self) -> OutgoingMigration:
        """Return m1 as its agent makes it, before the pre-copy."""
        no_lanes: Any = None
        made_wire: Callable[..., OutgoingWire] = OutgoingWire
        made: Callable[..., OutgoingMigration] = OutgoingMigration
        wire = made_wire(self.wire, no_lanes, lambda _report: None)
        outgoing = made("m1", self.resident, self.factory, wire)
        self.equip(outgoing)
        return outgoing

    def _stand_in(self) -> None:
        def take(looks: list[Any]) -> Any:
            return looks.pop(0) if len(looks) > 1 else [*looks, []][0]

        patch = self._patch.setattr
        patch(freeze_obstacles, "passing", lambda *_: take(self.passing))
        patch(freeze_obstacles, "in_order", lambda *_: {})
        patch(epoll_sets, "find", lambda _tree: (self.entries, take(self.stale)))
        patch(outgoing_files, "mapped_writable", lambda _sandbox: set())
        patch(file_locks, "LOOK_S", 0.001)
        patch(capsule_output, "settle", lambda _sandbox: None)
        patch(carried_out, "remember", self.note("remembered"))
        patch(frozen_capsule, "has_cuda", lambda _resident: False)
        patch(FrozenTree, "take_up", lambda _tree: self.note("taken up")())
        for name in ("prepare_lock", "lock", "unlock"):
            noted = lambda pid, name=name, **_: self.note(f"{name} {pid}")()  # noqa: E731
            patch(network_lock, name, noted)

    def equip(self, outgoing: OutgoingMigration) -> None:
        """Give it the stand-ins for CRIU and the files."""
        for name in ("start_ahead", "dump", "thaw", "pin", "release"):
            self._patch.setattr(outgoing._frozen.tree, name, self.note(name))
        files = outgoing._files
        self._patch.setattr(files, "_send_changes", lambda _send: {})
        output: Any = SimpleNamespace(
            finish=self.note("output"),
            close=self.note("output closed"),
            send_new=lambda _send: None,
        )
        files._output = output

    def note(self, what: str) -> Callable[..., None]:
        def do(*_: object, **__: object) -> None:
            promised = " after the promise" if (self.images / PROMISED).exists() else ""
            self.done.append(what + promised)
            if what == self.fails or (what in self.fails and not isinstance(self.fails, str)):
                raise self.error(what)

        return do

    def precopy(self, seconds: float = 60.0) -> Moved:
        request: Any = SimpleNamespace(deadline=seconds, full_dump="it is small", sooner=0.0)
        self.factory.host, self.factory.cluster = "h0", SimpleNamespace(precopy=None)
        return self.outgoing.precopy(request, time.monotonic(), NO_CRIU)

    def freeze(self) -> list[str]:
        with contextlib.suppress(LiveshiftError):
            self.outgoing.freeze(NO_CRIU, 10.0)
        return self.steps

    @property
    def steps(self) -> list[str]:
        """What was done to tree, network and devices, and what was waited for."""
        minor = ("start_ahead", "output", "wire closed", "remembered", PREPARED)
        return [step for step in self.done if not step.startswith(minor)]


def _failed(what: str) -> StepFailed:
    return StepFailed("freeze", f"{what} failed")


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path / "images", monkeypatch)
