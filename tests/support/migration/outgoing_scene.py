# SPDX-License-Identifier: Apache-2.0
"""An outgoing migration, with stand-ins for CRIU, the wire and the network lock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from liveshift.criu_glue.capsule import output
from liveshift.criu_glue.images import file_locks
from liveshift.criu_glue.network import network
from liveshift.criu_glue.survey import epoll_sets
from liveshift.errors import StepFailed
from liveshift.runtime.agent.departure import outgoing_migration
from liveshift.runtime.agent.departure.outgoing_migration import PROMISED, OutgoingMigration
from liveshift.runtime.agent.host import carried_out

INIT = 4711
LOCKED, OPENED = f"lock {INIT}", f"unlock {INIT}"


class Scene:
    """A departure whose CRIU, wire and network only say what they were asked for."""

    def __init__(self, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.fails = ""
        self._images = images
        plan = SimpleNamespace(tmp=images / "tmp", log=images / "log")
        sandbox: Any = SimpleNamespace(plan=plan, init=INIT, root=images, alive=lambda: True)
        sandbox.pipe_inode = lambda fd: fd
        resident: Any = SimpleNamespace(sandbox=sandbox, spec=SimpleNamespace(name="gpt/1"))
        factory: Any = SimpleNamespace(
            placement=SimpleNamespace(carried=[]), images=lambda _migration: images
        )
        wire: Any = SimpleNamespace(
            finish=self.note("all is there"),
            send=None,
            streams={},
            bytes=0,
            send_manifest=self.note("manifest"),
            close=lambda: None,
        )
        self.departure = OutgoingMigration("m1", resident, factory, wire)
        for name in ("dump", "thaw", "pin"):
            monkeypatch.setattr(self.departure._frozen, name, self.note(name))
        monkeypatch.setattr(self.departure, "_send_changes", dict)
        log: Any = SimpleNamespace(
            finish=lambda _send: None, close=lambda: None, send_new=lambda _send: None
        )
        self.departure._log = log
        self.passing: list[list[tuple[str, str]]] = []
        self.entries: list[object] = []
        self.stale: list[list[tuple[str, str]]] = []

        def take(looks: list[Any]) -> Any:
            return looks.pop(0) if len(looks) > 1 else [*looks, []][0]

        monkeypatch.setattr(outgoing_migration, "passing", lambda *_: take(self.passing))
        monkeypatch.setattr(outgoing_migration, "in_order", lambda *_: {})
        monkeypatch.setattr(epoll_sets, "find", lambda _tree: (self.entries, take(self.stale)))
        monkeypatch.setattr(file_locks, "LOOK_S", 0.001)
        monkeypatch.setattr(output, "settle", lambda _sandbox: None)
        monkeypatch.setattr(carried_out, "remember", lambda *_: None)
        monkeypatch.setattr(outgoing_migration, "has_cuda", lambda _resident: False)
        for name in ("lock", "unlock"):
            noted = lambda pid, name=name: self.note(f"{name} {pid}")()  # noqa: E731
            monkeypatch.setattr(network, name, noted)

    def note(self, what: str) -> Callable[..., None]:
        def do(*_: object) -> None:
            promised = " after the promise" if (self._images / PROMISED).exists() else ""
            self.done.append(what + promised)
            if what == self.fails:
                raise StepFailed("freeze", f"{what} failed")

        return do

    def freeze(self) -> list[str]:
        criu: Any = None
        with contextlib.suppress(StepFailed):
            self.departure.freeze(criu, 10.0)
        return self.done


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path / "images", monkeypatch)
