# SPDX-License-Identifier: Apache-2.0
"""A real orchestrator whose switchboard only notes what hosts are told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fleet_scene import CLUSTER

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.errors import Unreachable
from liveshift.runtime import messages
from liveshift.runtime.config import cluster as config
from liveshift.runtime.messages import HostFacts, Message, RunJob
from liveshift.runtime.model.jobs import Capsule, Job
from liveshift.runtime.orchestrator.orchestrator import Orchestrator

FACTS = HostFacts("6.12", "x86_64", "a processor", [], "4.2", "0.1")


class Line:
    def drop(self) -> None:
        """Nothing was asked."""


class Switchboard:
    """Keeps what hosts are told; those in ``silent`` do not answer."""

    def __init__(self, *_: Any) -> None:
        self.connections = {name: Line() for name in ("h0", "h1", "h2")}
        self.told: list[tuple[str, messages.Book]] = []
        self.silent: set[str] = set()

    async def request(self, host: str, message: Message, _timeout: float) -> None:
        assert isinstance(message, messages.Locate)
        if host in self.silent:
            raise Unreachable(f"{host} did not answer")
        self.told.append((host, message.book))


@pytest.fixture
def brain(tmp_path: Path) -> Orchestrator:
    """An orchestrator with a job of two on h0 and h1, and a host that has none of it."""
    cluster = config.parse(CLUSTER.replace("{state}", str(tmp_path))).cluster
    board: Any = Switchboard()
    made = Orchestrator(cluster, board)
    capsules = {f"a/{n}": Capsule(f"a/{n}", n, f"h{n}", 1) for n in range(2)}
    run = RunJob("a", 2, ["true"], {}, "/", 0, [])
    made.fleet.jobs["a"] = Job("a", Overlay(1, "10.99.0.0/24"), run, 0, 0.0, capsules)
    return made


def board(brain: Orchestrator) -> Switchboard:
    found: Any = brain.switchboard
    assert isinstance(found, Switchboard)
    return found


def says(brain: Orchestrator, host: str, ask: Message) -> Message | None:
    return asyncio.run(brain._handle_agent(host, ask))
