# SPDX-License-Identifier: Apache-2.0
"""A host as a holder of images. Its stores, its files and its wire are real; its capsules and the
orchestrator are stand-ins."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import memory_parts
import msgspec
import pytest
from held_scene import CORE, LOG, MB, SPEC, Memory, Source, some_memory
from preflight_scene import HERE, NOTHING
from wire_ends import key_directory, receiver

from liveshift.errors import LiveshiftError
from liveshift.runtime import messages
from liveshift.runtime.agent import preflight
from liveshift.runtime.agent.arrival.inbox import Inbox
from liveshift.runtime.agent.holding_handlers import HoldingHandlers
from liveshift.runtime.agent.host.running_capsule import CapsuleFactory
from liveshift.runtime.agent.migration_registry import MigrationRegistry
from liveshift.runtime.config.cluster import Files, Paths
from liveshift.runtime.config.tables import WireSettings
from liveshift.runtime.wire import PAGE_TABLE

__all__ = ["key_directory"]

SURVEY = replace(NOTHING, resident=8 * MB, shared_memory=0)
FIRST = some_memory()
BUDGET = 64 * MB


def hold(number: int, survey: Any = SURVEY) -> messages.Hold:
    return messages.Hold(f"s{number}.1", SPEC, survey, HERE, "h0", 3, 1, 64 * MB)


def check(number: int, memory: Memory = FIRST) -> messages.CheckHeld:
    return messages.CheckHeld(f"s{number}.1", "gpt/1", memory_parts.digest(memory))


class Scene(MigrationRegistry):
    """A holder, and its wire."""

    def __init__(self, top: Path, key_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.top = top
        self._busy = set()
        self.facts, self.criu = HERE, None
        self.incoming = {}
        self.receiver, self.endpoint = receiver(key_directory)
        own = SimpleNamespace(
            address="127.0.0.1",
            data=self.receiver.address,
            pages=self.receiver.pages.address,
            memory=None,
        )
        cluster: Any = SimpleNamespace(
            paths=Paths(state=top / "state", run=top / "run", keys=key_directory),
            files=Files(),
            wire=WireSettings(streams=2),
            timeouts=SimpleNamespace(heartbeat=0.01, suspicion=5.0),
            host=lambda _name: own,
        )
        factory = CapsuleFactory(cluster, "h1")
        table = SimpleNamespace(host="h1", cluster=cluster, factory=factory)
        self.table = self._capsule_table = cast(Any, table)
        self.ruled: messages.Ruled | LiveshiftError = messages.Ruled("wait", 3)
        self.claims: list[messages.Claim] = []
        self.checked = 0
        monkeypatch.setattr(preflight, "check", self._check)
        self.handlers = self.again()

    def again(self) -> HoldingHandlers:
        """As a restarted agent has it."""
        self.handlers = HoldingHandlers(self.table, self, self._claimed, BUDGET)
        asyncio.run(self.handlers.recover())
        return self.handlers

    def _check(self, *_: object, **__: object) -> list[tuple[str, str]]:
        self.checked += 1
        return []

    async def _claimed(self, claim: messages.Claim) -> messages.Ruled:
        self.claims.append(claim)
        if isinstance(self.ruled, LiveshiftError):
            raise self.ruled
        return self.ruled

    def hold(self, number: int, survey: Any = SURVEY) -> messages.Holding:
        return asyncio.run(self.handlers.hold(hold(number, survey)))

    def check(self, number: int, memory: Memory = FIRST) -> messages.Held:
        return asyncio.run(self.handlers.check(check(number, memory)))

    def take(self, number: int, memory: Memory = FIRST, incarnation: int = 1) -> None:
        """Take an image that was announced, under this incarnation of the processes."""
        inbox = self.inbox(number)
        source = Source(inbox)
        source.send_pages(memory, incarnation)
        source.send(CORE, b"registers")
        source.send(LOG, b"lines")
        inbox.pages.write(1, memoryview(b""), b"end")
        table = memory_parts.table(memory, incarnation)
        source.send(PAGE_TABLE, msgspec.msgpack.encode(table))
        source.finish()

    def keep(self, number: int, incarnation: int = 1) -> messages.Holding:
        holding = self.hold(number)
        self.take(number, incarnation=incarnation)
        self.check(number)
        return holding

    def inbox(self, number: int) -> Inbox:
        found = self.handlers._images.generations()
        inbox = next(g.inbox for g in found if g.number == number)
        assert inbox is not None
        return inbox

    @property
    def announced(self) -> list[str]:
        """The images that the receiver takes."""
        return sorted(self.receiver._open)

    @property
    def numbers(self) -> list[tuple[int, bool]]:
        """The generations that are here, and whether each is kept."""
        return [(g.number, g.kept) for g in self.handlers._images.generations()]


@pytest.fixture
def scene(key_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="ls-held-", dir="/dev/shm") as place:
        made = Scene(Path(place), key_directory, monkeypatch)
        yield made
        made.handlers.close()
