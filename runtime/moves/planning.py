# SPDX-License-Identifier: Apache-2.0
"""Plans migrations: whether a capsule may move and to which host, what --dry-run says of it, and
what it is predicted to cost."""

from __future__ import annotations

from dataclasses import replace

from ...errors import Refused, Unreachable
from .. import messages
from ..cost import model as cost
from ..cost.comparison import costed
from ..cost.prediction import Load, learn, predict, rate_between
from ..fleet.agents import Agents
from ..fleet.fleet import Fleet
from ..messages.answers import expected
from ..migration import second_look
from ..migration.before_pause import gpus_wanted, reserve_request
from ..migration.context import expected_bytes, what_breaks
from ..migration.gpu_swap import way_of
from ..migration.host_migration import HostMigration
from ..migration.order import Order
from ..model.gpu_asked import GpuAsked, seat
from ..model.jobs import Capsule
from ..model.spares import choose_destination
from ..model.steps import MigrationStep

LESSONS = 50
"""A prediction looks at this many last moves that were done, and learns from the similar ones."""


class MigrationPlanner:
    """Chooses destinations and makes plans; changes nothing."""

    def __init__(self, fleet: Fleet, agents: Agents) -> None:
        self._fleet = fleet
        self._agents = agents

    def resolve(self, order: Order) -> tuple[Order, str]:
        """Return the order with a destination, and with the UUID of the GPU to use if that is on
        another host; and why it is that host. Raises Refused, NotFound or Unreachable if the
        capsule cannot go there."""
        capsule, gpu = order.capsule, order.gpu
        self._check_free(order)
        if gpu is not None and gpu.host == capsule.host:
            if self._fleet.hosts[capsule.host].gpus:  # else only the host can check
                self._uuid(gpu)  # raises if there is no such GPU; the host takes it as it was named
            return replace(order, destination=capsule.host), "as asked"
        chosen, why = choose_destination(
            self._fleet.views(),
            capsule.name,
            capsule.host,
            order.destination,
            avoid=self._failed_at(capsule) | self._fleet.left_hosts.recent(),
            gpus=self._fleet.gpu_need(capsule, capsule.host),
        )
        uuid = replace(gpu, gpu=self._uuid(gpu)) if gpu is not None else None
        return replace(order, destination=chosen.name, gpu=uuid), why

    def another_spare(self, migration: HostMigration) -> str:
        """Return a host that the migration has not tried. Raises Refused if there is none."""
        capsule, source = migration.capsule, migration.source
        views = [view for view in self._fleet.views() if view.name not in migration.tried]
        need, last = self._fleet.gpu_need(capsule, source), self._fleet.left_hosts.recent()
        return choose_destination(views, capsule.name, source, "", last, need)[0].name

    async def plan(
        self, order: Order, within: float | None = None, watch: bool = True
    ) -> messages.Planned:
        """Say what a migration would do and find. Raises the errors of a real one.

        ``within``: seconds until the capsule must be gone. ``watch``: the source watches for some
        seconds how much memory the capsule writes.
        """
        if order.is_swap:
            return await self._plan_swap(order)
        order, why = self.resolve(order)
        capsule = order.capsule
        inspected, reserved = await second_look.reserve(
            await self._inspect(capsule, watch),
            lambda inspected: self._reserve(order, inspected),
            lambda: self._inspect(capsule),
        )
        checks = [("destination", f"{order.destination}, {why}"), *reserved.checks]
        if breaks := what_breaks(inspected.outside):
            checks.append(("warning", breaks))
        if capsule.failed:
            checks.append(("warning", capsule.failed))
        return messages.Planned(
            capsule.name,
            capsule.host,
            order.destination,
            checks,
            expected_bytes(inspected),
            inspected.carried_bytes,
            self.predict(order, inspected, reserved, within),
        )

    def predict(
        self,
        order: Order,
        inspected: messages.Inspected,
        reserved: messages.Reserved,
        within: float | None,
    ) -> messages.Prediction:
        """Predict what a move costs; see MigrationContext.predict."""
        load = Load.of(inspected, inspected.full_dump or reserved.full_dump)
        rows = self._fleet.journal.migrations_in(MigrationStep.DONE.value, LESSONS)
        job, source, to = order.job, order.capsule.host, order.destination
        lessons = learn(rows, load.way, job.name)
        rate = rate_between(rows, source, to)
        return costed(
            predict(load, lessons, rate),
            inspected,
            reserved,
            rate or self._link_rate(source, to),
            lessons,
            cost.learn(rows, job.name, frozenset({source, to})),
            self._fleet.cluster.precopy,
            job.timeouts(self._fleet.cluster),
            order.copy_way,
            within,
        )

    # ---- parts of a plan -----------------------------------------------------------------------

    async def _plan_swap(self, order: Order) -> messages.Planned:
        self._check_free(order)
        capsule, gpu = order.capsule, order.gpu
        assert gpu is not None
        swap = messages.LookAtGpus(capsule.name, gpu.gpu, gpu.leave)
        limit = self._fleet.cluster.timeouts.prepare
        answer = await self._agents.request(capsule.host, swap, limit)
        found = expected(messages.SwapPlan, capsule.host, swap, answer)
        return messages.Planned(capsule.name, *way_of(capsule.host, found), found.checks, 0, 0)

    async def _inspect(self, capsule: Capsule, watch: bool = False) -> messages.Inspected:
        inspect = messages.Inspect(capsule.name, watch)
        limit = self._fleet.cluster.timeouts.prepare
        answer = await self._agents.request(capsule.host, inspect, limit)
        return expected(messages.Inspected, capsule.host, inspect, answer)

    async def _reserve(self, order: Order, inspected: messages.Inspected) -> messages.Reserved:
        """Let the destination check the capsule; it reserves nothing."""
        cluster, source = self._fleet.cluster, order.capsule.host
        wanted = gpus_wanted(order, inspected)
        reserve = reserve_request("plan", order, inspected, source, cluster, wanted, dry_run=True)
        limit = cluster.timeouts.prepare
        answer = await self._agents.request(order.destination, reserve, limit)
        return expected(messages.Reserved, order.destination, reserve, answer)

    def _link_rate(self, source: str, destination: str) -> float | None:
        """Return the bytes per second between two hosts: the measured rate, else the speed of the
        slower interface, else None."""
        links = [self._fleet.hosts[name].link for name in (source, destination)]
        rates = [
            link.rates[to]
            for link, to in zip(links, (destination, source), strict=True)
            if link is not None and to in link.rates
        ]
        speeds = [link.speed / 8 for link in links if link is not None and link.speed]
        return rates[0] if rates else min(speeds, default=None)

    def _uuid(self, gpu: GpuAsked) -> str:
        """Return the UUID of the requested GPU, as its host's heartbeats list it."""
        return seat(gpu.gpu, gpu.host, self._fleet.hosts[gpu.host].gpus)

    def _check_free(self, order: Order) -> None:
        """Raise unless the capsule runs, its host is up, and no migration moves it."""
        job, capsule = order.job, order.capsule
        if capsule.migration:
            raise Refused(
                f"{capsule.name} is moving already ({capsule.migration})",
                hint=f"`liveshift events {capsule.migration}` shows how it goes",
            )
        if capsule.code is not None or job.state == "ended":
            raise Refused(f"{capsule.name} has ended with code {capsule.code}")
        if job.state == "ending":
            raise Refused(f"{job.name} is being ended: nothing of it is moved any more")
        if job.state == "suspended":
            raise Refused(
                f"{job.name} is suspended, and is on no host",
                hint=f"`liveshift resume {job.name}` lets it go on",
            )
        if job.state == "rewinding":
            raise Refused(
                f"{job.name} goes back to a snapshot: nothing of it is moved meanwhile",
                hint=f"`liveshift events {job.name}` shows how far it is",
            )
        if not self._fleet.is_up(capsule.host):
            raise Unreachable(
                f"the agent on {capsule.host}, where {capsule.name} runs, does not answer",
                hint=f"start it there: liveshift agent --config FILE --host {capsule.host}",
            )

    def _failed_at(self, capsule: Capsule) -> set[str]:
        """Return the destinations of this capsule's failed migrations; other hosts are tried
        first."""
        return {
            host
            for migration in self._fleet.migrations.values()
            if isinstance(migration, HostMigration)
            and migration.capsule is capsule
            and migration.step is MigrationStep.FAILED
            for host in {*migration.tried, migration.destination}
        }
