# SPDX-License-Identifier: Apache-2.0
"""Makes the heartbeats of an agent: what its host has, and how its capsules are.

They have a thread of their own. Each image that is saved, loaded or compared takes one of the
agent's threads for seconds; if these were all taken, the host would count as lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from .. import messages
from ..config.cluster import Cluster
from ..model import link_rates
from .destination_handlers import DestinationHandlers
from .gpu.watch import GpuWatch
from .holding_handlers import HoldingHandlers
from .host import data_link, host_facts
from .host.capsule_table import CapsuleTable
from .host.running_capsule import RunningCapsule
from .migration_registry import MigrationRegistry

log = logging.getLogger("liveshift.agent")

T = TypeVar("T")

LINK_S = 5.0
"""The agent looks at the interface that carries images every LINK_S seconds."""


class Heartbeats:
    """The agent has one instance, and sends what ``make`` returns as the heartbeat of ``host``. A
    thread of the instance reads the facts that take time. ``make`` leaves out a capsule whose state
    cannot be read."""

    def __init__(
        self,
        cluster: Cluster,
        host: str,
        capsule_table: CapsuleTable,
        registry: MigrationRegistry,
        gpus: GpuWatch,
        destination: DestinationHandlers,
        holding: HoldingHandlers,
    ) -> None:
        self._cluster = cluster
        self._host = host
        self._capsule_table = capsule_table
        self._registry = registry
        self._gpus = gpus
        self._destination = destination
        self._holding = holding
        self._thread = ThreadPoolExecutor(1, "heartbeat")
        self._link: messages.DataLink | None = None
        self._link_seen = 0.0

    async def make(self) -> messages.Heartbeat:
        self._capsule_table.idle.heartbeat()
        running = [c for c in self._capsule_table.capsules.values() if c.code is None]
        seen = [await self._in_thread(partial(self.state_of, each)) for each in running]
        states = [each for each in seen if each is not None]
        for capsule in running:
            capsule.deaths.follow()
        # A Reserve counts only what gives way now.
        memory = self._destination.memory_offered(await self._in_thread(self._holding.own_bytes))
        seats = self._gpus.seats(self._registry.gpus_taken())
        # This host drops its copies first. Also what gives way in a moment counts here: with hardly
        # any memory left, a snapshot of another job that is held here would be dropped for good.
        left = host_facts.memory_left(await self._in_thread(self._holding.own_bytes_soon))
        link = await self._data_link()
        errors = self._gpus.errors(self._cluster.timeouts.fault + messages.LAUNCHER_S)
        return messages.Heartbeat(self._host, memory, states, seats, link, left, errors)

    def state_of(self, capsule: RunningCapsule) -> messages.CapsuleState | None:
        """None if it cannot be said: one job's oddity must not make the host fall silent."""
        try:
            return capsule.state(self._gpus.used_by)
        except Exception:
            log.exception("the state of %s cannot be read", capsule.spec.name)
            return None

    async def _data_link(self) -> messages.DataLink:
        if self._link is None or time.monotonic() - self._link_seen > LINK_S:
            own = self._cluster.host(self._host).address
            rates = link_rates.load(self._cluster.paths.run)
            self._link = await self._in_thread(lambda: data_link.read_link(self._host, own, rates))
            self._link_seen = time.monotonic()
        return self._link

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
