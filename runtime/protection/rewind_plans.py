# SPDX-License-Identifier: Apache-2.0
"""Says whether a job can be taken back, to which snapshot and onto which hosts, as things are."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..fleet.agents import Agents
from ..fleet.fleet import Fleet
from ..losses.lookout import Lookout
from ..migration.beside_rewinds import going_on
from ..migration.migration import Migration
from ..model.jobs import Job
from ..model.rewind_places import Place, rewind_plan
from ..model.snapshots import Generation
from ..snapshot.images_gone import images_gone
from ..snapshot.protection_notes import offer


class RewindPlans:
    """The plans for all jobs. The class implements FencingContext too, because the fencing asks the
    same questions before it switches a host off. ``gone`` has the numbers of the snapshots that
    have lost an image."""

    def __init__(self, fleet: Fleet, agents: Agents, lookout: Lookout) -> None:
        self.cluster = fleet.cluster
        self.gone = set[int]()
        self.request = agents.request
        self.is_up = fleet.is_up
        self.silent_since = lookout.silent_since
        self.call_dead = lookout.vouch
        self._fleet = fleet
        self._lookout = lookout
        self._protection = fleet.journal.snapshots

    def protected(self, job: Job) -> bool:
        """Whether the job could be rewound, as far as its own state goes."""
        newest = job.newest
        return (
            newest is not None
            and newest.number not in self.gone
            and newest.owners.keys() == job.capsules.keys()
            and job.state in ("running", "rewinding")
            and all(capsule.code is None for capsule in job.capsules.values())
        )

    def plan(
        self, job: Job, generation: Generation, lost: Collection[str]
    ) -> dict[str, Place] | str:
        """As rewind_plan, with what is known of links."""
        views, links = self._fleet.views(job), self._lookout.links(job)
        last = self._fleet.left_hosts.recent()
        if links.leaves:  # first those that are known to reach the hosts that stay
            last |= {view.name for view in views} - links.reach
        avoid = links.leaves | links.miss
        return rewind_plan(views, generation, job.owners, lost, avoid, last)

    def going_on(self, job: Job, away: Collection[str] = ()) -> list[Migration]:
        """The job's migrations that a rewind lets come to their end. ``away``: capsules that count
        as lost besides those that are."""
        lost = {*away, *self._lookout.lost(job), *self._lookout.lacking(job)}
        return going_on(self._fleet.moves_of(job), lost)

    def away(self, job: Job, hosts: Collection[str]) -> set[str]:
        """The capsules that are lost if these hosts are."""
        return {c.name for c in job.capsules.values() if c.host in hosts} | self._lookout.lost(job)

    def offer(self, job: Job, generation: Generation) -> str:
        """Return an advice for the case that the holders of an image do not come back, or ""."""
        if all(any(map(self.is_up, hosts)) for hosts in generation.holders.values()):
            return ""
        text = offer(self._protection.saved(job.name), job.name)
        return text and f"{text}, after `liveshift stop {job.name}`"

    # ---- the rest of FencingContext ------------------------------------------------------------

    def unproven(self, job: Job) -> tuple[str, ...]:
        if job.state not in ("running", "rewinding") or not self.protected(job):
            return ()
        if hosts := self._protection.before(job.name) if job.state == "rewinding" else []:
            hosts = [] if self._lookout.vouched(job).keys() & set(hosts) else hosts
        elif self._lookout.perhaps_dead(job):
            hosts = list(dict.fromkeys(job.owners.values()))
        silent = all(self.silent_since(host) is not None for host in hosts)
        return tuple(hosts) if silent else ()

    def why_not(self, job: Job, hosts: Sequence[str]) -> str:
        if problem := self._fleet.journal.file.problem:
            return problem
        if job.state == "rewinding" and self._protection.before(job.name):
            return ""  # it is planned, and waits for nothing else
        generation, away = job.newest, self.away(job, hosts)
        if generation is None:
            return "no snapshot of it is left"
        if moving := self.going_on(job, away):
            return f"{moving[0].name} is under way and may save it"
        plan = self.plan(job, generation, away)
        return plan if isinstance(plan, str) else ""

    async def images_missing(self, job: Job, hosts: Sequence[str]) -> str:
        generation = job.newest
        if generation is None or self._protection.before(job.name):
            return ""
        plan = self.plan(job, generation, self.away(job, hosts))
        if isinstance(plan, str):  # since why_not had a plan, which will say so again
            return plan
        return await images_gone(self, job, generation, plan, trains=True)

    def voters(self) -> list[str]:
        digest = self.cluster.digest
        return [host for host in self._fleet.up() if self._fleet.hosts[host].digest == digest]

    def others_on(self, host: str, job: Job) -> int:
        return len(set(self._fleet.held().get(host, ())) - job.capsules.keys())

    def note(self, job: Job, kind: str, text: str) -> None:
        self._fleet.journal.note(job.name, kind, text)
