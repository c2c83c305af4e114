# SPDX-License-Identifier: Apache-2.0
"""Copies the images of suspended jobs to further hosts, so that any one host may die.

A suspended job in memory is nothing but its images. Each comes to one holder, and the death of that
host would end the job. So the holder sends it on, to a host in another failure domain, as soon as
no copy of the job is left on a host that is up. The new host compares the image with the digest
that the first holder kept, and then the orchestrator records it as a holder. If a holder dies
later, or loses its memory, the orchestrator has its images copied again. It waits for some seconds
before that, since the host may just be restarting.

The images of a job are copied one after the other. A resumption does not wait for them. A restarted
orchestrator begins again with the image that was being copied: its ruling ends what has come to the
new host. Until that ruling, a host that has kept the copy refuses another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import replace
from typing import TypeVar

from ...errors import LiveshiftError, NotFound, Refused
from .. import messages
from ..daemon.tasks import Tasks
from ..fleet.fleet import Fleet
from ..messages import Message
from ..messages.answers import expected
from ..model.holders import HostSeen, choose_second
from ..model.jobs import Job
from ..model.snapshots import Generation, image_name
from ..model.spares import NO_GPUS
from ..snapshot.images_gone import HostsAsked, look_limit
from ..snapshot.protection_notes import same, words
from ..snapshot.protection_row import Holders, holders_of, reachable
from ..snapshot.rewound_capsule import SPARE_BYTES
from .job_snapshots import AWAY_S

log = logging.getLogger("liveshift.copies")
M = TypeVar("M", bound=Message)

LOOK_S = 0.1
"""The orchestrator checks this often whether the job is still suspended, while a host copies."""

STEADY_S = 60.0
"""A host that could not take a copy is not asked again for this long, if another host can. After
failed attempts, the next one comes after this long at the latest."""


class _Over(LiveshiftError):
    """The job is not suspended any more, or its images go elsewhere."""


class SecondCopies:
    """The orchestrator has one instance. ``busy``: the jobs whose images are being saved in a
    directory or loaded from one; they are not copied meanwhile."""

    def __init__(self, fleet: Fleet, hosts: HostsAsked, busy: Collection[str]) -> None:
        self._fleet = fleet
        self._hosts = hosts
        self._others = busy
        self._copying: set[str] = set()  # jobs
        self._began = time.monotonic()
        self._next: dict[str, float] = {}  # by job: when it is looked at again (monotonic)
        self._failed: Counter[str] = Counter()  # by job: attempts in a row
        self._refused: defaultdict[str, dict[str, float]] = defaultdict(dict)  # job → host → when
        self._noted: defaultdict[str, set[str]] = defaultdict(set)  # job → what has failed
        self._tasks = Tasks()

    def copy_what_is_alone(self, job: Job) -> None:
        """Begin to copy the images of a suspended job that only one host has. It does nothing if
        there are none, or soon after the last attempt. It never raises or waits."""
        now = time.monotonic()
        if job.name in self._copying or now < self._next.get(job.name, 0.0):
            return
        self._next[job.name] = now + self._fleet.cluster.timeouts.heartbeat
        if self._alone(job):
            self._copying.add(job.name)
            self._tasks.spawn(self._copy_all(job))

    def forget(self, job: str) -> None:
        """Forget what is known of a job that is not suspended any more."""
        for known in (self._next, self._failed, self._refused, self._noted):
            known.pop(job, None)

    # ---- which images --------------------------------------------------------------------------

    def _alone(self, job: Job) -> dict[str, str]:
        """Return the capsules whose images only one host has, each with that host. A job that is
        saved in a directory has none: it outlives all hosts."""
        newest = job.newest
        if job.state != "suspended" or newest is None or newest.directory:
            return {}
        if job.name in self._others:
            return {}
        hosts = Holders.of(self._fleet.views())
        soon = reachable(job, replace(hosts, up={*hosts.up, *self._away()}))
        alone = {name: held[0] for name, held in soon.items() if len(held) == 1}
        return {name: host for name, host in alone.items() if host in hosts.up}

    def _away(self) -> list[str]:
        """Return the hosts that are not up but may soon be. Their agents, or this orchestrator, may
        just have been restarted."""
        now, restart = time.monotonic(), max(AWAY_S, 2 * self._fleet.cluster.timeouts.suspicion)
        began = self._began + restart - AWAY_S  # for a host that was not heard yet
        heard = self._fleet.heard()
        return [name for name, at in heard.items() if now - (at or began) < AWAY_S]

    def _choose(self, job: Job, name: str, first: str) -> str:
        """The host that gets a copy of a capsule's image. Raises Refused if there is none."""
        newest, owners = job.newest, job.owners.values()
        assert newest is not None
        now, views, domains = time.monotonic(), self._fleet.views(), self._fleet.cluster.domains
        held = reachable(job, Holders.of(views))
        load = Counter(host for hosts in held.values() for host in hosts)
        refused = {h for h, at in self._refused[job.name].items() if now - at < STEADY_S}
        need = newest.gpus.get(name, NO_GPUS)
        chosen: HostSeen | str = ""
        for without in (refused, set[str]()) if refused else (refused,):
            willing = [view for view in views if view.name not in without]
            chosen = choose_second(willing, first, owners, domains, load, need)
            if not isinstance(chosen, str):
                return chosen.name
        raise Refused(f"no other host can hold the image of {name}: {chosen}")

    # ---- one job -------------------------------------------------------------------------------

    async def _copy_all(self, job: Job) -> None:
        failed: LiveshiftError | None = None
        try:
            for name, first in self._alone(job).items():
                try:
                    await self._copy(job, name, first)
                except _Over:
                    return
                except Exception as error:  # tried again later, after the others
                    if not isinstance(error, LiveshiftError):
                        log.exception("%s: an internal error while it was copied", name)
                        error = LiveshiftError(f"an internal error: {error!r}")
                    failed = failed or error
            if job.state == "suspended":
                self._end_attempt(job, failed)
        finally:
            self._copying.discard(job.name)

    def _end_attempt(self, job: Job, failed: LiveshiftError | None) -> None:
        """Record in the history what came of an attempt, and set the time of the next one. Each
        failure is recorded once."""
        assert job.newest is not None
        name = job.newest.name
        if failed is None:
            self._failed.pop(job.name, None)
            if min(map(len, reachable(job, Holders.of(self._fleet.views())).values())) > 1:
                self._noted.pop(job.name, None)
                hosts = ", ".join(holders_of(job))
                text = f"{name} is in the memory of {hosts}: each image on two of them"
                self._note(job, "copied", text)
            return
        self._failed[job.name] += 1
        wait = self._fleet.cluster.timeouts.heartbeat * 2 ** min(10, self._failed[job.name])
        self._next[job.name] = time.monotonic() + min(STEADY_S, wait)
        text = words(failed)
        if same(text) not in self._noted[job.name]:
            self._noted[job.name].add(same(text))
            self._note(job, "not copied", f"an image of {name} is on one host only: {text}")

    def _note(self, job: Job, kind: str, text: str) -> None:
        with contextlib.suppress(LiveshiftError):  # the disk is full, say: the images are there
            self._fleet.journal.note(job.name, kind, text)

    # ---- one image -----------------------------------------------------------------------------

    async def _copy(self, job: Job, name: str, first: str) -> None:
        """Let the host ``first`` send the image of a capsule to a further one, and record that as a
        holder. Raises LiveshiftError; then the image is where it was."""
        generation, cluster = job.newest, self._fleet.cluster
        assert generation is not None
        image = image_name(generation.number, job.capsules[name].index)
        limits = cluster.timeouts
        get = messages.GetHeld(image, name)
        try:
            facts = await self._ask(job, generation, first, get, limits.prepare, messages.HeldFacts)
        except NotFound:  # it was damaged, and so it was removed
            self._fleet.hosts[first].lost |= {image}
            raise
        if not facts.digest:
            raise Refused(f"{first} has no digest of {image}, with which a copy is compared")
        second = self._choose(job, name, first)
        dumped_on, epoch = generation.owners[name]
        hold = messages.Hold(
            image=image,
            spec=job.spec(job.capsules[name], cluster),
            survey=facts.survey.in_place() if second == dumped_on else facts.survey,
            facts=facts.facts,
            source=first,
            epoch=epoch,
            rewinds=generation.rewinds,
            limit_bytes=2 * facts.image_bytes + SPARE_BYTES,
            gpu=facts.gpu,
            anew=True,
        )
        job.copying_to[image] = second  # so the judge of claims lets it keep what comes
        try:
            there = await self._ask(job, generation, second, hold, limits.prepare, messages.Holding)
            send = messages.ForwardHeld(image, image, name, second, there.endpoint)
            await self._ask(job, generation, first, send, limits.precopy, messages.Frozen)
            check = messages.CheckHeld(image, name, facts.digest)
            limit = look_limit(cluster, generation)
            await self._ask(job, generation, second, check, limit, messages.Held)
            if name in self._alone(job):  # else an earlier holder has come back with its own
                self._record(job, generation, name, [first, second])
        except _Over:
            raise
        except LiveshiftError:
            self._refused[job.name][second] = time.monotonic()
            raise
        finally:
            job.copying_to.pop(image, None)

    def _record(self, job: Job, at: Generation, name: str, holders: list[str]) -> None:
        """Record who holds a capsule's image now. A holder that is not up is dropped."""
        self._check(job, at)
        assert job.newest is not None
        copied = replace(job.newest, holders={**job.newest.holders, name: holders})
        self._fleet.journal.snapshots.rewrite(copied)
        job.newest = copied
        image = image_name(at.number, job.capsules[name].index)
        for host in holders:  # it may have lost an earlier copy
            self._fleet.hosts[host].lost -= {image}

    def _check(self, job: Job, at: Generation) -> None:
        newest = job.newest
        if job.state != "suspended" or newest is None or not newest.same_images(at):
            raise _Over(f"{job.name} is not suspended at {at.name} any more")
        if job.name in self._others:
            raise _Over(f"{job.name}: {at.name} is being saved or loaded")

    async def _ask(
        self, job: Job, at: Generation, host: str, message: Message, timeout: float, expect: type[M]
    ) -> M:
        """Return a host's answer. Raises _Over as soon as the job is not suspended any more."""
        work = asyncio.ensure_future(self._hosts.request(host, message, timeout))
        work.add_done_callback(lambda done: done.cancelled() or done.exception())  # read
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=LOOK_S)
                self._check(job, at)
        finally:
            work.cancel()
        return expected(expect, host, message, work.result())
