# SPDX-License-Identifier: Apache-2.0
"""An agent that holds a copy and asks what becomes of it. Migrations, capsules and the orchestrator
are stand-ins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.errors import LiveshiftError, NotFound, StepFailed
from liveshift.runtime import messages
from liveshift.runtime.agent.departure.snapshot_sessions import SnapshotSessions
from liveshift.runtime.agent.migration_registry import MigrationRegistry
from liveshift.runtime.agent.rulings import Rulings
from liveshift.runtime.model.ownership import Ruling

T = TypeVar("T")
SETTLE = messages.Settle("m1", "gpt/1")


class Migration:
    """Stands in for either side; notes what is done to it, and may fail."""

    migration = "m1"

    def __init__(self, scene: Scene, *, promised: bool = True) -> None:
        self.resident = scene.resident
        self.gpus: list[str] = []
        self.promised = promised
        for name in ("thaw", "finish", "discard", "abandon"):
            setattr(self, name, scene.note(name))
        self.inbox = SimpleNamespace(close=lambda: None)


class Scene(MigrationRegistry):
    """h1, which holds gpt/1 for m1; stands in for its table of capsules, too."""

    host = "h1"

    def __init__(self, images: Path) -> None:
        self._busy, self._undecided = set(), set()
        self._capsule_table = cast(Any, self)
        self.outgoing, self.incoming = {}, {}
        self.snapshots = SnapshotSessions()
        self.done: list[str] = []
        self.fails = ""
        self.alive = True
        self.resident: Any = SimpleNamespace(
            spec=SimpleNamespace(name="gpt/1", job="gpt"),
            overlay=Overlay(7, "10.99.7.0/24", 1),
            epoch=5,
            code=None,
            leaving=False,
            end_silently=self.note("end"),
            sandbox=SimpleNamespace(alive=lambda: self.alive),
            note=self.note("noted"),
        )
        self.capsules = {"gpt/1": self.resident}
        self.receiver = cast(Any, SimpleNamespace(forget=lambda _name: self.done.append("forget")))
        gpus = SimpleNamespace(refresh=lambda: self.done.append("GPUs looked at"))
        self.devices = cast(Any, SimpleNamespace(gpus=gpus, left=lambda *_: None))
        self.network = asyncio.Lock()
        timeouts = SimpleNamespace(heartbeat=0.01, suspicion=1.0, prepare=0.2)
        paths = SimpleNamespace(run=images.parent, state=images.parent / "state")
        self.cluster = SimpleNamespace(timeouts=timeouts, paths=paths)
        self.factory: Any = SimpleNamespace(
            images=lambda name: images / name,
            cluster=self.cluster,
            placement=SimpleNamespace(carried=()),
        )
        self.images = images
        self.ruled: messages.Ruled | LiveshiftError = messages.Ruled("wait", 5)
        self.claims: list[messages.Claim] = []
        self.rulings = Rulings(cast(Any, self), self, self._claimed)

    def note(self, what: str) -> Callable[[], None]:
        def do() -> None:
            self.done.append(what)
            if what == self.fails:
                raise OSError(28, "full") if what == "noted" else StepFailed(what, "it failed")

        return do

    async def _claimed(self, claim: messages.Claim) -> messages.Ruled:
        self.claims.append(claim)
        if isinstance(self.ruled, LiveshiftError):
            raise self.ruled
        return self.ruled

    async def blocking(self, _capsule: str, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work)

    def ended(self, resident: Any) -> None:
        self.done.append("ended")

    def resident_of(self, capsule: str) -> Any:
        if capsule not in self.capsules:
            raise NotFound(f"{capsule} is not on h1")
        return self.capsules[capsule]

    async def recover_capsules(self, arriving: set[str]) -> None:
        self.done.append(f"capsules recovered, {sorted(arriving)} are arriving")

    def leaves(self, *, promised: bool = True) -> Any:
        self.outgoing["m1"] = cast(Any, Migration(self, promised=promised))
        return self.outgoing["m1"]

    def comes(self) -> Any:
        self.incoming["m1"] = cast(Any, Migration(self))
        return self.incoming["m1"]

    def rule(self, ruling: Ruling, epoch: int = 5) -> str:
        self.ruled = messages.Ruled(ruling.value, epoch)

        async def claim() -> str:
            state = await self.rulings.claim("m1")
            begun_besides = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*begun_besides)
            return state

        return asyncio.run(claim())
