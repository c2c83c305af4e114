# SPDX-License-Identifier: Apache-2.0
"""Copies the images of suspended jobs to further hosts, so that any one host may die.

A suspended job in memory is nothing but its images. Each comes to one holder, and the death of that
host would end the job. So the holder sends it on, to a host in another failure domain, as soon as
no copy of the job is left that could hinder it. The orchestrator records the further holder once
that has compared the image with what the first one kept. If a holder dies later, or loses its
memory, what it had is copied again.

The images of a job go one after the other, and a resumption does not wait for them. An orchestrator
that is restarted begins again with the image that was on its way: its ruling ends what has come. A
host that has kept such an image refuses another one until then.
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
from ..model.holders import choose_second
from ..model.jobs import Job
from ..model.snapshots import Generation, image_name
from ..snapshot.images_gone import HostsAsked, look_limit
from ..snapshot.protection_row import Holders, holders_of, reachable
from ..snapshot.rewound_capsule import SPARE_BYTES

log = logging.getLogger("liveshift.copies")
M = TypeVar("M", bound=Message)

LOOK_S = 0.1
"""While a host works on a copy, this often it is seen whether the job is suspended still."""

STEADY_S = 60.0
"""A host that could not take a copy is not asked for so many seconds, if another one can."""


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
        self._next: dict[str, float] = {}  # by job: when it is looked at again (monotonic)
        self._refused: defaultdict[str, dict[str, float]] = defaultdict(dict)  # job → host → when
        self._noted: dict[str, str] = {}  # by job: what was last noted
        self._tasks = Tasks()

    def copy_what_is_alone(self, job: Job) -> None:
        """Begin to copy those images of a suspended job that only one host has, if there are any
        and that was not tried just before. Never raises or waits."""
        now = time.monotonic()
        if job.name in self._copying or now < self._next.get(job.name, 0.0):
            return
        self._next[job.name] = now + self._fleet.cluster.timeouts.heartbeat
        if self._alone(job):
            self._copying.add(job.name)
            self._tasks.spawn(self._copy_all(job))

    def forget(self, job: str) -> None:
        """Forget what is known of a job that is not suspended any more."""
        for known in (self._next, self._refused, self._noted):
            known.pop(job, None)

    # ---- which images --------------------------------------------------------------------------

    def _alone(self, job: Job) -> dict[str, str]:
        """The capsules whose images only one host has → that host. None of a job that a directory
        has: that outlives all hosts."""
        newest = job.newest
        if job.state != "suspended" or newest is None or newest.directory:
            return {}
        if job.name in self._others:
            return {}
        return {n: hosts[0] for n, hosts in self._giving(job).items() if len(hosts) == 1}

    def _giving(self, job: Job) -> dict[str, list[str]]:
        """As :func:`reachable`, now."""
        return reachable(job, Holders.of(self._fleet.views()))

    def _choose(self, job: Job, name: str, first: str) -> str:
        """The host that gets a copy of a capsule's image. Raises Refused if there is none."""
        now, views = time.monotonic(), self._fleet.views()
        held = reachable(job, Holders.of(views))
        load = Counter(host for hosts in held.values() for host in hosts)
        refused = {h for h, at in self._refused[job.name].items() if now - at < STEADY_S}
        chosen: dict[str, str] | str = ""
        for without in (refused, set[str]()) if refused else (refused,):
            willing = [view for view in views if view.name not in without]
            chosen = choose_second(willing, {name: first}, self._fleet.cluster.domains, load)
            if not isinstance(chosen, str):
                return chosen[name]
        raise Refused(str(chosen))

    # ---- one job -------------------------------------------------------------------------------

    async def _copy_all(self, job: Job) -> None:
        failed: Exception | None = None
        try:
            for name, first in self._alone(job).items():
                try:
                    await self._copy(job, name, first)
                except _Over:
                    return
                except Exception as error:  # tried again with a later heartbeat, after the others
                    if not isinstance(error, LiveshiftError):
                        log.exception("%s: an internal error while it was copied", name)
                    failed = failed or error
            self._note(job, failed)
        finally:
            self._copying.discard(job.name)

    def _note(self, job: Job, failed: Exception | None) -> None:
        """Note what came of an attempt; the same failure only once in a row."""
        if job.state != "suspended" or job.newest is None:
            return
        if failed is not None:
            kind, text = "not copied", f"{job.newest.name} is on one host only: {failed}"
            if self._noted.get(job.name) == text:
                return
        elif min(map(len, self._giving(job).values())) < 2:
            return  # of another image there is no copy any more, which `status` says
        else:
            hosts = ", ".join(holders_of(job))
            kind = "copied"
            text = f"{job.newest.name} is in the memory of {hosts}: each image on two of them"
        self._noted[job.name] = text
        with contextlib.suppress(LiveshiftError):  # a full disk, say: the images are there
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
        job.copying_to[image] = second  # so it is told to keep what comes
        try:
            there = await self._ask(job, generation, second, hold, limits.prepare, messages.Holding)
            send = messages.ForwardHeld(image, image, name, second, there.endpoint)
            await self._ask(job, generation, first, send, limits.precopy, messages.Frozen)
            check = messages.CheckHeld(image, name, facts.digest)
            limit = look_limit(cluster, generation)
            await self._ask(job, generation, second, check, limit, messages.Held)
            self._record(job, generation, name, [first, second])
        except _Over:
            raise
        except LiveshiftError:
            self._refused[job.name][second] = time.monotonic()
            raise
        finally:
            job.copying_to.pop(image, None)

    def _record(self, job: Job, at: Generation, name: str, holders: list[str]) -> None:
        """Record who holds a capsule's image now. A holder that is not up is none any more."""
        self._check(job, at)
        assert job.newest is not None
        copied = replace(job.newest, holders={**job.newest.holders, name: holders})
        self._fleet.journal.snapshots.rewrite(copied)
        job.newest = copied
        image = image_name(at.number, job.capsules[name].index)
        for host in holders:  # which it may have lost before
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
        """Ask a host, as long as the job is suspended. Raises _Over once it is not."""
        work = asyncio.ensure_future(self._hosts.request(host, message, timeout))
        work.add_done_callback(lambda done: done.cancelled() or done.exception())  # it is over
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=LOOK_S)
                self._check(job, at)
        finally:
            work.cancel()
        return expected(expect, host, message, work.result())
