# SPDX-License-Identifier: Apache-2.0
"""An incoming migration, with stand-ins for CRIU, the wire and the sandbox."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from liveshift.criu_glue.images import image_check, shared_sizes
from liveshift.criu_glue.network.network import Overlay
from liveshift.errors import StepFailed
from liveshift.runtime.agent.arrival import incoming_migration
from liveshift.runtime.agent.arrival.incoming_migration import IncomingMigration
from liveshift.runtime.agent.gpu.device_memory import TABLE
from liveshift.runtime.agent.host import carried_out
from liveshift.runtime.messages import Book

NO_CRIU: Any = None


BOOK = Book("gpt", 7, "10.99.7.0/24", {})


class Scene:
    """An arrival of gpt/1 at h1."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.fails = ""
        self.runs = False
        plan = SimpleNamespace(uid=1000, gid=1000, groups=(), tmp=top / "tmp", log=top / "log")
        sandbox = SimpleNamespace(plan=plan, init=4711, started=5, root=top / "root")
        self.resident: Any = SimpleNamespace(
            spec=SimpleNamespace(name="gpt/1", index=1),
            sandbox=sandbox,
            epoch=0,
            leaving=False,
            overlay=Overlay(7, "10.99.7.0/24"),
            note=self.noted("noted"),
            unnote=self.noted("unnoted"),
            remove=self.noted("removed"),
        )
        placement = SimpleNamespace(carried=(), mounts_of=lambda _init: {})
        timeouts = SimpleNamespace(suspicion=3.0)
        cluster = SimpleNamespace(timeouts=timeouts)
        self.factory: Any = SimpleNamespace(
            host="h1",
            images=lambda migration: top / migration,
            placement=placement,
            cluster=cluster,
        )
        gpu = SimpleNamespace(used={"GPU-a": 1})
        self.reserve: Any = SimpleNamespace(
            migration="m1", source="h0", limit_bytes=0, gpu=gpu, book=BOOK, spec=None
        )
        self.pairs: Any = [("GPU-a", "GPU-x"), ("GPU-b", "GPU-y")]
        made: Callable[..., Any] = IncomingMigration
        self.here = made(self.reserve, self.resident, self.factory, gpus=self.pairs)
        self.manifest: Any = SimpleNamespace(
            streams={"image:core-1.img": (5, 0), "tree:1:tmp": (9, 0)},
            gone=dict,
            pipes={7: 1},
            epoll=[],
            image_bytes=14,
            capsule="gpt/1",
        )
        self.here.inbox.landed = SimpleNamespace(manifest=self.manifest)
        monkeypatch.setattr(self.here.inbox, "close", self.noted("inbox closed"))
        tree = self.here._tree
        for name in ("bring_up", "let_run", "drop"):
            monkeypatch.setattr(tree, name, self.noted(name))
        for name in ("stop_at_door", "let_run_held"):
            monkeypatch.setattr(tree, name, self.noted(name))
        monkeypatch.setattr(tree, "resumed", lambda: self.runs)
        for module, name in (
            (image_check, "prepare"),
            (shared_sizes, "forget"),
            (carried_out, "reconcile"),
            (incoming_migration, "hand_over"),
        ):
            monkeypatch.setattr(module, name, self.noted(name))

    def noted(self, what: str) -> Callable[..., None]:
        def do(*_: object, **__: object) -> None:
            self.done.append(what)
            if what == self.fails:
                raise StepFailed("restore", f"{what} failed")

        return do

    def with_devices(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Device state came with the image."""
        self.manifest.streams[TABLE] = (1, 0)
        (self.here.images / TABLE).write_bytes(b"table")
        monkeypatch.setattr(incoming_migration, "decode", lambda raw: [raw])
        devices = SimpleNamespace(
            arrive=self.noted("arrive"),
            end=self.noted("end"),
            drop=self.noted("devices dropped"),
            take_up=lambda some=False: self.done.append(f"take_up some={some}"),
        )
        self.here._find_devices = lambda: devices
        return devices


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)
