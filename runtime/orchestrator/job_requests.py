# SPDX-License-Identifier: Apache-2.0
"""Answers the requests about jobs: run, signal, rewind, save, suspend, resume, read."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from dataclasses import dataclass

import msgspec

from ...criu_glue.capsule.output import REWIND, rewinds_at
from ...errors import LiveshiftError, NotFound, NotPermitted, Refused, Unreachable, WrongUsage
from ...texts import shortened
from .. import messages
from ..config.access import Principal, Role, groups_of, refusal
from ..daemon.lookups import look_up
from ..fleet.address_book import AddressBook
from ..fleet.agents import Agents
from ..fleet.endings import Endings
from ..fleet.fleet import Fleet
from ..fleet.rights import Rights
from ..fleet.stopping import Stopping
from ..messages.answers import expected
from ..model import run_spec
from ..model.jobs import Capsule, Job, check_request, overlay_for
from ..model.spares import place_job
from ..protection.ordered_snapshots import OrderedSnapshots
from ..protection.rewinds import Rewinds
from ..protection.suspensions import Suspensions

log = logging.getLogger("liveshift.api")

START_S = 60.0
OUTPUT_RETRY_S = 0.05
REPEATED_S = 10.0
INSPECT_S = 20.0
MOST_WAIT_S = 60.0
"""A request for output waits at most this many seconds if there is no new output."""

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
"""Signals that end a job. Its owner and "operate" may send these; other signals take "admin"."""


@dataclass
class JobRequests:
    """The ApiServer has one instance. Each public method answers one kind of request, for the
    caller ``who``. It raises NotFound for an unknown job, NotPermitted if ``who`` may not do that,
    Refused if the state of the job or of the cluster does not allow it, and what an agent
    raised."""

    _fleet: Fleet
    _rights: Rights
    _agents: Agents
    _address_book: AddressBook
    _endings: Endings
    _stopping: Stopping
    _rewinds: Rewinds
    _ordered: OrderedSnapshots
    _suspensions: Suspensions

    async def run(self, who: Principal, request: messages.RunJob) -> messages.Named:
        fleet = self._fleet
        if (uid := who.uid) is None:
            raise NotPermitted(
                f"{who.shown} may not run a job: it runs as a user of the hosts, whom the kernel"
                " vouches for, and a key is none",
                hint="log in where an agent or the orchestrator runs, and `liveshift run` there",
            )
        if who.squashed:
            raise refusal(who, "run a job as root on other hosts", Role.ADMIN)
        if uid != 0:
            await look_up(lambda: _check_groups(who, uid, request))
        # An ended job keeps its output for its owner: another user must not take over the name.
        kept = {n for n, j in fleet.jobs.items() if j.state == "ended" and not who.owns(j.uid)}
        if request.name in kept and not who.may(Role.OPERATE):
            raise Refused(f'"{request.name}" is another user\'s job', hint="choose another --name")
        running = {n for n, j in fleet.jobs.items() if j.state != "ended"}
        name = check_request(request, running, fleet.cluster, fleet.journal.next_number())
        await self._endings.forget(name)
        if name in fleet.jobs:  # another request took the name meanwhile
            raise Refused(f'a job "{name}" is running already', hint="choose another --name")
        fleet.refuse_unknown()
        overlay = overlay_for(fleet.cluster, {j.overlay.vni for j in fleet.jobs.values()})
        hosts = place_job(fleet.views(), request.nnodes)
        capsules = {
            f"{name}/{i}": Capsule(f"{name}/{i}", i, host, 1) for i, host in enumerate(hosts)
        }
        spec = run_spec.encode(request, uid)
        owners = {c.name: (c.index, c.host) for c in capsules.values()}
        where, what = ", ".join(hosts), shortened(" ".join(request.argv))
        rewinds = fleet.journal.snapshots.rewinds(name)  # of an earlier job of that name
        with fleet.journal.together():
            started, first = fleet.journal.add_job(name, overlay.vni, overlay.subnet, spec, owners)
            fleet.journal.add_event(name, "started", f"started on {where}: {what}", who.shown)
            since = fleet.journal.last_event()
        for capsule in capsules.values():
            capsule.epoch = first
        job = Job(name, overlay, request, uid, started, capsules, rewinds=rewinds, since=since)
        fleet.jobs[name] = job
        try:
            await self._start(job)
        except LiveshiftError as error:
            fleet.journal.note(name, "ended", f"did not start: {error}")
            await self._endings.forget(name, even_running=True)
            raise
        return messages.Named(name)

    async def _start(self, job: Job) -> None:
        await self._address_book.publish(job)
        starts = [
            (c.host, messages.Start(job.spec(c, self._fleet.cluster), job.book(), c.epoch))
            for c in job.capsules.values()
        ]
        requests = (self._agents.request(host, start, START_S) for host, start in starts)
        done = await asyncio.gather(*requests, return_exceptions=True)
        # Wait for all hosts: a host that still builds would keep what is built after the clean-up.
        for failed in (result for result in done if isinstance(result, BaseException)):
            raise failed
        for capsule in job.capsules.values():
            capsule.started = True

    async def signal_job(self, who: Principal, request: messages.SignalJob) -> None:
        job = self._rights.job(who, request.job)
        try:
            sent = signal.Signals(request.signum)
        except ValueError:
            raise Refused(f"there is no signal {request.signum}") from None
        if not who.owns(job.uid):
            ends = sent in ENDING
            what = f"end {job.name}" if ends else f"send {sent.name} to {job.name}"
            self._rights.need(who, Role.OPERATE if ends else Role.ADMIN, what, job)
        if sent not in (signal.SIGTERM, signal.SIGKILL):
            _check_not_suspended(job, f"{sent.name} reaches nothing of it")
        if job.state != "ended":  # it reaches nothing, and each note is a write to the disk
            self._fleet.journal.note(job.name, "signal", f"received {sent.name}", who.shown)
        await self._stopping.signal(job, sent, who.shown)

    async def rewind(self, who: Principal, request: messages.RewindJob) -> messages.RewindOrdered:
        """Order a rewind. Only "operate" may call a host dead: a job would train twice if it is
        not."""
        job = self._rights.job(who, request.job)
        if request.lost or not who.owns(job.uid):
            self._rights.need(who, Role.OPERATE, f"rewind {job.name}", job)
        return self._rewinds.order(who.shown, job, request.lost, dry_run=request.dry_run)

    async def snapshot(
        self, who: Principal, request: messages.SnapshotJob
    ) -> messages.SnapshotOrdered:
        job = self._own(who, request.job, "save")
        if not request.to:
            raise WrongUsage("no directory is named", hint="`--to /nfs/liveshift`, for example")
        self._check_directory(who, request.to)
        return self._ordered.save(who.shown, job, request.to, dry_run=request.dry_run)

    async def suspend(
        self, who: Principal, request: messages.SuspendJob
    ) -> messages.SuspensionOrdered:
        job = self._own(who, request.job, "suspend")
        self._check_directory(who, request.to)
        return self._suspensions.suspend(who.shown, job, to=request.to, dry_run=request.dry_run)

    async def withdraw(self, who: Principal, request: messages.WithdrawOrder) -> messages.Withdrawn:
        job = self._own(who, request.job, "take back an order for")
        return messages.Withdrawn(self._ordered.withdraw(who.shown, job))

    async def resume(
        self, who: Principal, request: messages.ResumeJob
    ) -> messages.ResumptionOrdered:
        self._check_directory(who, request.source)
        there = self._fleet.jobs.get(request.job)
        if request.source and (there is None or there.state == "ended"):
            return await self._suspensions.resume_saved(
                who.shown, request.job, request.source, request.snapshot, dry_run=request.dry_run
            )
        job = self._own(who, request.job, "resume")
        return await self._suspensions.resume(
            who.shown,
            job,
            source=request.source,
            snapshot=request.snapshot,
            dry_run=request.dry_run,
        )

    def _check_directory(self, who: Principal, directory: str) -> None:
        """Agents use a directory as root, so only "operate" may name one."""
        if not directory:
            return
        self._rights.need(who, Role.OPERATE, f"let agents use {directory}")
        if not directory.startswith("/"):
            raise Refused(f'"{directory}" is no absolute path', hint="all hosts must find it")

    def _own(self, who: Principal, name: str, what: str) -> Job:
        """The job, which its owner and "operate" may suspend and resume."""
        job = self._rights.job(who, name)
        if not who.owns(job.uid):
            self._rights.need(who, Role.OPERATE, f"{what} {job.name}", job)
        return job

    async def end_unknown(
        self, who: Principal, request: messages.EndUnknown
    ) -> messages.UnknownEnded:
        """End a host's capsules of a job that the journal does not know; remove what they leave.

        A host that is not up may never come back, and must not keep all others from running jobs.
        The journal then has the job as one that has ended: the host ends it when it is heard.
        """
        if who.rules != request.host:
            self._rights.need(who, Role.OPERATE, f"end {request.job} on {request.host}")
        host = self._fleet.cluster.host(request.host).name
        unknown = self._fleet.unknown.get(host, ())
        here = [c for c in unknown if c.name.startswith(f"{request.job}/")]
        if not here or request.job in self._fleet.jobs:
            raise NotFound(
                f"{host} runs nothing of {request.job} that the journal does not know",
                hint="`liveshift status` shows what is unknown",
            )
        journal, limit = self._fleet.journal, self._fleet.cluster.timeouts.prepare
        later, epoch = not self._fleet.is_up(host), max(capsule.epoch for capsule in here)
        if later:
            journal.end_unknown(request.job, epoch)
        else:
            for capsule in here:
                await self._agents.request(host, messages.End(capsule.name, capsule.epoch), limit)
            await self._agents.request(host, messages.Forget(request.job), limit)
            try:
                journal.end_unknown(request.job, epoch)
            except LiveshiftError as error:  # a full disk must not prevent the end
                log.error("%s is ended; its name may be used again: %s", request.job, error)
        left = [c for c in self._fleet.unknown.get(host, ()) if c not in here]
        self._fleet.unknown[host] = left
        text = f"ended {request.job}, which was unknown"
        if later:
            text += f"; {host} is not up: what it runs of it is ended when it is back"
        journal.note(host, "ended", text, who.shown)
        return messages.UnknownEnded(later)

    async def read_output(self, who: Principal, request: messages.ReadOutput) -> messages.Output:
        """Read output from the host that owns the capsule. Offsets stay valid across a move, so a
        request that fails is repeated at the capsule's host of that moment."""
        job, capsule = self._readable(who, request.capsule)
        until = time.monotonic() + (min(request.wait, MOST_WAIT_S) if request.wait > 0 else 0)
        while True:
            _check_not_suspended(job, "its output is part of its image")
            host = capsule.host
            left = max(0.0, until - time.monotonic())
            try:
                read = messages.ReadOutput(capsule.name, request.offset, left)
                answer = await self._agents.request(host, read, left + 10)
                return expected(messages.Output, host, read, answer)
            except LiveshiftError as error:
                if isinstance(error, NotFound) and job.state in ("rewinding", "suspended"):
                    text = f"{job.name} is {job.state}: {capsule.name} is on no host just now"
                    raise Refused(text) from error  # the reader tries again; NotFound would end it
                if time.monotonic() > until and capsule.host == host and not capsule.migration:
                    raise
            await asyncio.sleep(OUTPUT_RETRY_S)

    async def read_repeated(
        self, who: Principal, request: messages.ReadRepeated
    ) -> messages.Repeated:
        """Read output that a rewind has cut off from the host on which the capsule was then."""
        job, capsule = self._readable(who, request.capsule)
        row = self._fleet.journal.snapshots.cut_off(
            job.name, rewinds_at(request.offset), rewinds_at(request.until)
        )
        if row is None:  # the job was adopted, say
            return messages.Repeated(b"", request.until, gone="the journal knows nothing of it")
        end = min(row.rewinds * REWIND, request.until)
        host = row.left.get(capsule.name, "")
        if not host:  # no copy of that time has run: the job was suspended, or taken back again
            return messages.Repeated(b"", end)
        read = messages.ReadRepeated(capsule.name, request.offset, end)
        if not self._fleet.is_up(host):
            return messages.Repeated(b"", end, host=host, gone=f"{host} is not up")
        try:
            answer = await self._agents.request(host, read, REPEATED_S)
        except (NotFound, Unreachable) as gone:
            return messages.Repeated(b"", end, host=host, gone=str(gone))
        found = expected(messages.Repeated, host, read, answer)
        return msgspec.structs.replace(found, host=host)

    def _readable(self, who: Principal, name: str) -> tuple[Job, Capsule]:
        """The capsule and its job. Raises NotPermitted if the caller may not read its output."""
        job = self._rights.job_of(who, name)
        if not who.owns(job.uid):
            self._rights.need(who, Role.ADMIN, f"read the output of {job.name}", job)
        return job, job.capsule(name)

    async def get_inspection(
        self, who: Principal, request: messages.GetInspection
    ) -> messages.Inspection:
        """Ask the agent of the host that has the capsule."""
        job = self._rights.job_of(who, request.capsule)
        self._rights.need_to_see(who, job)
        _check_not_suspended(job, "no host runs it")
        capsule = job.capsule(request.capsule)
        answer = await self._agents.request(capsule.host, request, INSPECT_S)
        return expected(messages.Inspection, capsule.host, request, answer)


def _check_not_suspended(job: Job, why: str) -> None:
    """Raise Refused if a job is suspended; ``why``: what that means for the request."""
    if job.state == "suspended":
        raise Refused(
            f"{job.name} is suspended: {why}", hint=f"`liveshift resume {job.name}` lets it go on"
        )


def _check_groups(who: Principal, uid: int, request: messages.RunJob) -> None:
    """Raise NotPermitted unless all groups of the request are the caller's own: the kernel vouches
    for the uid only."""
    own = groups_of(uid)
    if not own:
        raise NotPermitted(
            f"{who.shown} may not run a job: the orchestrator's machine knows no user {uid}",
            hint="users and groups must be the same on every machine of the cluster",
        )
    if others := sorted({request.gid, *request.groups} - set(own)):
        numbers = ", ".join(map(str, others))
        raise NotPermitted(
            f"{who.shown} may not run a job with the groups {numbers}: on the orchestrator's"
            f" machine {who.name} is not in them",
            hint="users and groups must be the same on every machine of the cluster",
        )
