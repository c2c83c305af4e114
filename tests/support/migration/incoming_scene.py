# SPDX-License-Identifier: Apache-2.0
"""A migration at its destination whose tree, CRIU and devices are stand-ins. They only note what
they were asked for, and fail where a test wants that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from liveshift.criu_glue.images import (
    image_check,
    reservations,
    shared_sizes,
    task_states,
    timerfds,
)
from liveshift.criu_glue.network.overlay import Overlay
from liveshift.errors import StepFailed
from liveshift.runtime.agent.arrival import incoming_migration, restored_capsule
from liveshift.runtime.agent.arrival.incoming_migration import IncomingMigration
from liveshift.runtime.agent.arrival.incoming_phase import IncomingPhase
from liveshift.runtime.agent.gpu.device_memory import TABLE
from liveshift.runtime.agent.gpu.device_state import SavedDevices
from liveshift.runtime.agent.host import carried_out
from liveshift.runtime.messages import Book

NO_CRIU: Any = None
BOOK = Book("gpt", 7, "10.99.7.0/24", {})


class Scene:
    """gpt/1 comes to h1 as m1; its image is complete."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.fails = ""
        self.error: Callable[[str], BaseException] = _failed
        self.runs = False
        plan = SimpleNamespace(uid=1000, gid=1000, groups=(), tmp=top / "tmp", log=top / "log")
        root = top / "root"
        sandbox = SimpleNamespace(plan=plan, init=4711, root=root, alive=lambda: True)
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
        placement = SimpleNamespace(carried=())
        timeouts = SimpleNamespace(suspicion=3.0, heartbeat=0.01)
        self.factory: Any = SimpleNamespace(
            host="h1",
            images=lambda migration: top / migration,
            placement=placement,
            cluster=SimpleNamespace(timeouts=timeouts, paths=SimpleNamespace(state=top / "state")),
        )
        self.reserve: Any = SimpleNamespace(
            migration="m1",
            source="h0",
            limit_bytes=0,
            dumped_under=0,
            gpu=SimpleNamespace(used={"GPU-a": 1}),
            book=BOOK,
            spec=None,
            survey=SimpleNamespace(ids=(1001, 1002)),
        )
        self.pairs: Any = [("GPU-a", "GPU-x"), ("GPU-b", "GPU-y")]
        self.manifest: Any = SimpleNamespace(
            shared={},
            written={b"/shared/log": 5},
            streams={"image:core-1.img": (5, 0), "tree:1:tmp": (9, 0)},
            gone=dict,
            pipes={7: 1},
            epoll=[],
            image_bytes=14,
            capsule="gpt/1",
        )
        self.devices: Any = None
        self._patch = monkeypatch
        self.here: Any = self.make()
        for module, name in (
            (image_check, "prepare"),
            (shared_sizes, "forget"),
            (reservations, "mark"),
            (timerfds, "make_relative"),
            (carried_out, "reconcile"),
            (carried_out, "drop_note"),
            (incoming_migration, "hand_over"),
        ):
            monkeypatch.setattr(module, name, self.noted(name))

    def make(self, criu: Any = None) -> Any:
        """One whose image is complete. ``criu`` puts memory into its sandbox ahead."""
        here: Any = IncomingMigration(
            self.reserve,
            self.resident,
            self.factory,
            criu,
            gpus=self.pairs,
            find_devices=lambda: self.devices,
        )
        here.inbox.landed = SimpleNamespace(manifest=self.manifest)
        self._patch.setattr(here.inbox, "close", self.noted("inbox closed"))
        tree = here._restored.tree
        for name in ("bring_up", "let_run", "drop", "stop_at_door", "let_run_held"):
            self._patch.setattr(tree, name, self.noted(name))
        self._patch.setattr(tree, "resumed", lambda: self.runs)
        tree.__dict__["ids"] = {1001}  # cached: the image is not read for it
        return here

    def noted(self, what: str) -> Callable[..., None]:
        def do(*_: object, **__: object) -> None:
            self.done.append(what)
            if what == self.fails:
                raise self.error(what)

        return do

    def granted(self, epoch: int = 9) -> Any:
        """The one whose tree CRIU has brought up and may run."""
        self.here._enter(IncomingPhase.RESTORING)
        self.here.grant(epoch)
        return self.here

    def with_devices(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Device state came with the image."""
        self.manifest.streams[TABLE] = (1, 0)
        (self.here.images / TABLE).write_bytes(b"table")
        monkeypatch.setattr(
            restored_capsule, "decode", lambda raw: [SavedDevices(1001, stopped=True)]
        )
        monkeypatch.setattr(task_states, "let_go_on", self.noted("let go on"))
        self.devices = SimpleNamespace(
            arrive=self.noted("arrive"),
            end=self.noted("end"),
            drop=self.noted("devices dropped"),
            continue_parents=self.noted("parents continued"),
            recover_held=lambda some=False: self.done.append(f"recover_held some={some}"),
        )
        return self.devices


def _failed(what: str) -> StepFailed:
    return StepFailed("restore", f"{what} failed")


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)
