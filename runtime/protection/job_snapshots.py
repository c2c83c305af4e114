# SPDX-License-Identifier: Apache-2.0
"""The snapshots of jobs that are under way: whether one can be taken now, who holds it, and what an
earlier orchestrator has left.

A job has one snapshot under way at most, and none while one of its capsules moves: both need the
tracker of the capsule's memory. A move that begins meanwhile ends the snapshot; one that a person
has ordered is tried again after the move (ordered_snapshots.py). None is taken either while the
images of the one before are written into a directory: its holders must keep it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from ...errors import LiveshiftError
from ..daemon.tasks import Tasks
from ..fleet.fleet import Fleet
from ..losses.cut_links import EARLY, silences
from ..model.holders import beside, choose_holders, choose_neighbours, die_together
from ..model.jobs import Job
from ..snapshot.context import SnapshotContext
from ..snapshot.directory_images import DirectoryImages
from ..snapshot.protection_row import Holders, withstands
from ..snapshot.snapshot import Snapshot

log = logging.getLogger("liveshift.protection")

PATIENCE = 2.0
"""A job's own hosts hold its snapshots once no other host has been able to for so many times
``timeouts.suspicion``."""

AWAY_S = 10.0
"""While another host is away, they wait for at least so many seconds: it may just be restarted. A
spare that holds the images is worth that, since capsules go back there without the network."""

STEADY_S = 600.0
"""A host that could not hold an image of a job is asked after the others for so many seconds. And
if a job's own hosts hold its snapshots, other hosts must have been able to for as long before they
do: all memory goes to a new holder."""

Chosen = dict[str, str] | str
"""The holder of each capsule's image, or why there is none."""


@dataclass
class _Search:
    """What is known of the search for holders of ``job``. All times are monotonic seconds.
    ``refused``: by host, when it could not hold an image. ``without``: since when no host outside
    the job can hold its images; ``able``: since when some can. None if it is not so."""

    job: Job
    refused: dict[str, float] = field(default_factory=dict)
    without: float | None = None
    able: float | None = None

    def note(self, now: float, *, able: bool) -> None:
        """Note whether hosts outside the job can hold its images now."""
        self.without = None if able else self.without or now
        self.able = (self.able or now) if able else None


class JobSnapshots:
    """``ordered``: the jobs of which a person wants a snapshot next."""

    def __init__(self, fleet: Fleet, context: SnapshotContext, images: DirectoryImages) -> None:
        self._fleet = fleet
        self._context = context
        self._images = images
        self._journal = fleet.journal.snapshots
        self._searches: dict[str, _Search] = {}  # by job
        self._tasks = Tasks()
        self.ordered: set[str] = set()

    def recover(self) -> None:
        """Undo the snapshots that an earlier orchestrator has left under way."""
        for number, name in self._journal.snapshots_under_way():
            job = self._fleet.jobs.get(name)
            if job is None or job.state in ("ended", "rewinding"):  # a rewind opens the gates
                self._give_up(number)
                continue
            snapshot = Snapshot(self._context, number, job, {})
            self._enter(snapshot)
            self._tasks.spawn(self._recover(snapshot))

    # ---- whether, and where --------------------------------------------------------------------

    def taken_up(self, job: Job) -> bool:
        """Whether no snapshot may be due now: one is under way, is ordered, or is being saved."""
        return (
            job.name in self._fleet.snapshots
            or job.name in self.ordered
            or job.name in self._images.busy
        )

    def moves(self, job: Job) -> list[str]:
        """The names of the moves that a snapshot of the job waits for."""
        return [each.name for each in self._fleet.moves_of(job)]

    def ended(self, job: Job) -> str:
        """Return a lasting reason why no snapshot of the job can be taken; "" if there is none."""
        over = [capsule.name for capsule in job.capsules.values() if capsule.code is not None]
        return f"{over[0]} has ended" if over else ""

    def hindrance(self, job: Job) -> str:
        """Return a passing reason why no snapshot can be taken now; "" if one can."""
        if moving := self.moves(job):
            return f"{', '.join(moving)} is under way: the next snapshot is taken after it"
        if ended := self.ended(job):
            return ended
        for capsule in job.capsules.values():
            if not (capsule.started and capsule.granted):
                return f"{capsule.name} does not run yet"
            if not self._fleet.is_up(capsule.host):
                return f"{capsule.host}, which runs {capsule.name}, is not up"
        limits = self._fleet.cluster.timeouts
        for one, other in silences(job, time.monotonic(), limits, EARLY * limits.heartbeat):
            return f"{one} and {other} do not reach each other"
        return ""

    def withstands(self, job: Job) -> bool:
        """Whether the job's newest snapshot is there, and no single death destroys it. A holder
        that has been silent for less than AWAY_S may have it yet."""
        now, hosts = time.monotonic(), Holders.of(self._fleet.views())
        away = {name for name, heard in self._fleet.heard().items() if now - heard < AWAY_S}
        known = replace(hosts, up={*hosts.up, *away})
        return withstands(job, self._fleet.cluster.domains, known)

    def holders(self, job: Job, *, ordered: bool = False, alone: bool = False) -> Chosen:
        """Return a holder for each capsule's image, or a text that says why there is none.

        If no host outside the job can hold it, its own hosts do. Hosts may be away for a moment,
        and all memory has to go to a new holder. So that must last for a while, unless the snapshot
        is ``ordered``. A host that has refused an image, did not answer or damaged one comes last:
        it may do better by now. So does one that a job has left because of its links. If ``alone``,
        a capsule's own host may hold its image alone where no other host can hold it.
        """
        search, now = self._search(job), time.monotonic()
        find = self._finder(job)
        among = partial(choose_neighbours, itself=alone)
        refused = {host for host, at in search.refused.items() if now - at < STEADY_S}
        for others in (refused, set[str]()) if refused else (refused,):
            outside = find(choose_holders, others)
            able = not isinstance(outside, str)
            if others == refused:
                search.note(now, able=able)
            stays = able and not ordered and self._stays_among(search, now)
            lasts = ordered or now - (search.without or now) > self._patience(job)
            if stays or (lasts and not able):
                neighbours = find(among, others)
                if not isinstance(neighbours, str):
                    return neighbours
            if able:
                return outside
        return outside

    def _patience(self, job: Job) -> float:
        """For how many seconds no host outside the job must have been able to hold its images
        before its own hosts do."""
        owners = set(job.owners.values())
        away = any(not view.up for view in self._fleet.views() if view.name not in owners)
        return max(PATIENCE * self._fleet.cluster.timeouts.suspicion, AWAY_S if away else 0.0)

    def _stays_among(self, search: _Search, now: float) -> bool:
        """Whether the job's own hosts hold its newest snapshot well, and no other host has been
        able to for long."""
        job, domains = search.job, self._fleet.cluster.domains
        if job.newest is None or now - (search.able or now) >= STEADY_S:
            return False
        owners = list(job.owners.values())
        held = {host for hosts in job.newest.holders.values() for host in hosts}
        near = any(beside(host, owners, domains) for host in held)
        return near and die_together(job.newest.holders, owners, domains) is None

    def _search(self, job: Job) -> _Search:
        found = self._searches.get(job.name)
        if found is None or found.job is not job:
            found = self._searches[job.name] = _Search(job)
        return found

    def _finder(self, job: Job) -> Callable[[Callable[..., Chosen], set[str]], Chosen]:
        """Return what lets a function choose a holder for each image, among the hosts as they are
        now but for some."""
        cluster, views = self._fleet.cluster, self._fleet.views()
        newest = job.newest.holders if job.newest else {}
        before = {c: hosts[0] for c, hosts in newest.items() if hosts}
        # What such a host holds already stays there: elsewhere all memory would have to go.
        last = self._fleet.left_hosts.recent() - {*before.values()}
        gpus = {c.name: self._fleet.gpu_need(c, c.host) for c in job.capsules.values()}

        def find(choose: Callable[..., Chosen], without: set[str]) -> Chosen:
            for others in ({*without, *last}, without) if last else (without,):
                willing = [view for view in views if view.name not in others]
                chosen = choose(willing, job.owners, cluster.domains, before, gpus)
                if not isinstance(chosen, str):
                    break
            return chosen

        return find

    # ---- one snapshot --------------------------------------------------------------------------

    def begin(
        self,
        job: Job,
        holders: dict[str, str],
        *,
        suspends: str = "",
        to: str = "",
        asked: bool = True,
        ordered: bool = False,
        weaker: bool = False,
    ) -> Snapshot:
        """Begin a snapshot, which the caller runs and then ends here. Raises LiveshiftError.
        ``suspends``, ``to``, ``asked``, ``ordered``, ``weaker``: as in Snapshot."""
        for gone in self._searches.keys() - self._fleet.jobs.keys():
            del self._searches[gone]
        number = self._journal.begin_snapshot(job.name)
        snapshot = Snapshot(
            self._context,
            number,
            job,
            holders,
            suspends=suspends,
            to=to,
            asked=asked,
            ordered=ordered,
            weaker=weaker,
        )
        self._enter(snapshot)
        return snapshot

    def end(self, snapshot: Snapshot) -> None:
        job = snapshot.job
        if self._fleet.snapshots.get(job.name) is snapshot:
            del self._fleet.snapshots[job.name]
        if job.taking == snapshot.number:
            job.taking = 0
        for problem in snapshot.problems:
            self._fleet.journal.note(job.name, "snapshot", f"{snapshot.name}: {problem}")
        if snapshot.generation is not None:
            return
        if snapshot.refused:
            now = time.monotonic()
            self._search(job).refused.update(dict.fromkeys(snapshot.refused, now))
        self._give_up(snapshot.number)

    def _enter(self, snapshot: Snapshot) -> None:
        snapshot.job.taking = snapshot.number  # so its holders keep what they have of it
        self._fleet.snapshots[snapshot.job.name] = snapshot

    def _give_up(self, number: int) -> None:
        try:
            self._journal.give_up_snapshot(number)
        except LiveshiftError as error:  # a later orchestrator gives it up again
            log.error("s%d is given up, and this cannot be recorded: %s", number, error)

    async def _recover(self, snapshot: Snapshot) -> None:
        """Undo it once the job's hosts are up; wait for them for twice timeouts.suspicion."""
        timeouts = self._fleet.cluster.timeouts
        until = time.monotonic() + 2 * timeouts.suspicion
        hosts = {capsule.host for capsule in snapshot.job.capsules.values()}
        while not all(map(self._fleet.is_up, hosts)) and time.monotonic() < until:
            await asyncio.sleep(timeouts.heartbeat / 10)
        await snapshot.recover()
        self.end(snapshot)
