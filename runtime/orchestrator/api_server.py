# SPDX-License-Identifier: Apache-2.0
"""The desk: answers people's requests to the orchestrator, and decides who may ask for what.

Requests come over the local socket, through an agent, or with an operator's key (access.py). All
users may see the hosts. A job, its moves and its events are shown to its owner and to the role
"view". An owner may move, signal and read a job; "operate" may move and end any, and taint hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from ...errors import LiveshiftError, NotFound, NotPermitted, Refused, no_such
from .. import messages
from ..config.access import Principal, Role, Roles, groups_of, refusal
from ..config.choices import Way
from ..control.keyring import Holder
from ..messages import Event, Message
from ..messages.words import request_to
from ..migration.host_migration import HostMigration
from ..model.gpu_asked import asked
from ..model.jobs import Capsule, Job, check_request, overlay_for
from ..model.steps import MigrationStep
from .endings import Endings
from .evacuation import Evacuation
from .fleet import Fleet
from .host_marks import HostMarks
from .journal import shortened
from .migration_service import MigrationService
from .spares import place_job
from .status import status
from .stopping import Stopping

log = logging.getLogger("liveshift.api")

START_S = 60.0
OUTPUT_RETRY_S = 0.05
INSPECT_S = 20.0
MOST_EVENTS = 10_000
"""A query returns at most this many events, the newest ones."""

MOST_WAIT_S = 60.0
"""A request for output waits at most this many seconds if there is no new output."""

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
"""Signals that end a job. Its owner and "operate" may send these; other signals take "admin"."""

CHANGING = (
    messages.RunJob,
    messages.Migrate,
    messages.Cancel,
    messages.SignalJob,
    messages.EndUnknown,
)

LOOKUPS = 2
"""This many threads look up users and groups: only they wait if a directory service hangs."""

T = TypeVar("T")


class ApiServer:
    """Answers the requests of the command line."""

    def __init__(
        self,
        fleet: Fleet,
        moves: MigrationService,
        endings: Endings,
        evacuation: Evacuation,
        stopping: Stopping,
    ) -> None:
        self._fleet = fleet
        self._moves = moves
        self._endings = endings
        self._evacuation = evacuation
        self._stopping = stopping
        self._roles = Roles(fleet.cluster.access)
        self._lookups = ThreadPoolExecutor(LOOKUPS, "lookup")
        for name in self._roles.unknown():
            log.warning('access: this machine knows no "%s"', name)
        marks = HostMarks(fleet, evacuation)
        self._serve: dict[type[Message], Callable[..., Awaitable[Message | None]]] = {
            messages.RunJob: self._run,
            messages.GetStatus: self._get_status,
            messages.SetTaint: marks.set_taint,
            messages.Untaint: marks.untaint,
            messages.Cordon: marks.cordon,
            messages.Uncordon: marks.uncordon,
            messages.Migrate: self._migrate,
            messages.Cancel: self._cancel,
            messages.GetMigration: self._get_migration,
            messages.ReadOutput: self._read_output,
            messages.GetInspection: self._get_inspection,
            messages.SignalJob: self._signal_job,
            messages.EndUnknown: self._end_unknown,
            messages.GetEvents: self._get_events,
            messages.WhoAmI: self._who_am_i,
        }

    async def serve(self, uid: int, ask: Message) -> Message | None:
        """Answer a request of a user on this machine. Raises errors meant for that user."""
        return await self._answer(await self._look_up(lambda: self._roles.local(uid)), ask)

    async def serve_relayed(self, host: str, uid: int, ask: Message) -> Message | None:
        """Answer a request of a user on a host; the host's agent vouches for the uid."""
        return await self._answer(await self._look_up(lambda: self._roles.relayed(host, uid)), ask)

    async def serve_operator(self, holder: Holder, ask: Message) -> Message | None:
        """Answer a request of the holder of an operator's key."""
        assert holder.role is not None
        return await self._answer(self._roles.operator(holder.name, holder.role), ask)

    async def _answer(self, who: Principal, ask: Message) -> Message | None:
        if isinstance(ask, CHANGING) and (waits := self._fleet.unreported()):
            raise Refused(
                "the journal was put back from a backup: nothing is started, moved or ended before"
                f" {', '.join(waits)} told what is there",
                hint="start the agents there; a host that is gone for good is taken out of the"
                " cluster file",
            )
        serve = self._serve.get(type(ask))
        if serve is None:
            raise NotPermitted(f"{request_to(ask)} is not for the command line")
        return await serve(who, ask)

    async def _look_up(self, look: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._lookups, look)

    # ---- jobs ----------------------------------------------------------------------------------

    async def _run(self, who: Principal, ask: messages.RunJob) -> messages.Named:
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
            await self._look_up(lambda: _check_groups(who, uid, ask))
        # An ended job keeps its output for its owner: another user must not take over the name.
        kept = {n for n, j in fleet.jobs.items() if j.state == "ended" and not who.owns(j.uid)}
        if ask.name in kept and not who.may(Role.OPERATE):
            raise Refused(f'"{ask.name}" is another user\'s job', hint="choose another --name")
        running = {n for n, j in fleet.jobs.items() if j.state != "ended"}
        taken = running if ask.name else running | kept
        name = check_request(ask, taken, fleet.cluster, fleet.journal.next_number())
        await self._endings.forget(name)
        if name in fleet.jobs:  # another request took the name meanwhile
            raise Refused(f'a job "{name}" is running already', hint="choose another --name")
        for host, unknown in fleet.unknown.items():
            if unknown:  # it uses a subnet, and the journal does not know which
                one = unknown[0].name
                raise Refused(
                    f"{host} runs {one}, which the journal does not know",
                    hint=f"`liveshift stop {one.partition('/')[0]} --unknown {host}` ends it",
                )
        overlay = overlay_for(fleet.cluster, {j.overlay.vni for j in fleet.jobs.values()})
        hosts = place_job(fleet.views(), ask.nnodes)
        capsules = {
            f"{name}/{i}": Capsule(f"{name}/{i}", i, host, 1) for i, host in enumerate(hosts)
        }
        spec = msgspec.msgpack.encode({"uid": uid, "run": msgspec.to_builtins(ask)})
        owners = {c.name: (c.index, c.host) for c in capsules.values()}
        where, what = ", ".join(hosts), shortened(" ".join(ask.argv))
        with fleet.journal.together():
            started, first = fleet.journal.add_job(name, overlay.vni, overlay.subnet, spec, owners)
            fleet.journal.tell(name, "started", f"started on {where}: {what}", who.shown)
        for capsule in capsules.values():
            capsule.epoch = first
        job = fleet.jobs[name] = Job(name, overlay, ask, uid, started, capsules)
        try:
            await self._start(job)
        except LiveshiftError as error:
            fleet.journal.note(name, "ended", f"did not start: {error}")
            await self._endings.forget(name, even_running=True)
            raise
        return messages.Named(name)

    async def _start(self, job: Job) -> None:
        await self._moves.publish(job)
        starts = [
            (c.host, messages.Start(job.spec(c, self._fleet.cluster), job.book(), c.epoch))
            for c in job.capsules.values()
        ]
        asks = (self._moves.ask(host, start, START_S) for host, start in starts)
        done = await asyncio.gather(*asks, return_exceptions=True)
        # Wait for all hosts: a host that still builds would keep what is built after the clean-up.
        for failed in (result for result in done if isinstance(result, BaseException)):
            raise failed
        for capsule in job.capsules.values():
            capsule.started = True

    async def _signal_job(self, who: Principal, ask: messages.SignalJob) -> None:
        job = self._job(who, ask.job)
        try:
            sent = signal.Signals(ask.signum)
        except ValueError:
            raise Refused(f"there is no signal {ask.signum}") from None
        if not who.owns(job.uid):
            ends = sent in ENDING
            what = f"end {job.name}" if ends else f"send {sent.name} to {job.name}"
            self._need(who, Role.OPERATE if ends else Role.ADMIN, what, job)
        self._fleet.journal.note(job.name, "signal", f"received {sent.name}", who.shown)
        await self._stopping.signal(job, sent, who.shown)

    async def _end_unknown(self, who: Principal, ask: messages.EndUnknown) -> None:
        """End a host's capsules of a job that the journal does not know; remove what they leave."""
        if who.rules != ask.host:
            self._need(who, Role.OPERATE, f"end {ask.job} on {ask.host}")
        host = self._fleet.cluster.host(ask.host).name
        here = [c for c in self._fleet.unknown.get(host, ()) if c.name.startswith(f"{ask.job}/")]
        if not here or ask.job in self._fleet.jobs:
            raise NotFound(
                f"{host} runs nothing of {ask.job} that the journal does not know",
                hint="`liveshift status` shows what is unknown",
            )
        limit = self._fleet.cluster.timeouts.prepare
        for capsule in here:
            await self._moves.ask(host, messages.End(capsule.name, capsule.epoch), limit)
        await self._moves.ask(host, messages.Forget(ask.job), limit)
        left = [c for c in self._fleet.unknown.get(host, ()) if c not in here]
        self._fleet.unknown[host] = left
        journal = self._fleet.journal
        try:
            journal.end_unknown(ask.job, max(capsule.epoch for capsule in here))
        except LiveshiftError as error:  # a full disk must not prevent the end
            log.error("%s is ended; its name may be used again: %s", ask.job, error)
        journal.note(host, "ended", f"ended {ask.job}, which was unknown", who.shown)

    async def _read_output(self, who: Principal, ask: messages.ReadOutput) -> messages.Output:
        """Read output from the host that owns the capsule. Offsets stay valid across a move, so a
        request that fails is repeated at the capsule's host of that moment."""
        job = self._job(who, ask.capsule)
        if not who.owns(job.uid):
            self._need(who, Role.ADMIN, f"read the output of {job.name}", job)
        capsule = self._fleet.capsule(ask.capsule)[1]
        until = time.monotonic() + (min(ask.wait, MOST_WAIT_S) if ask.wait > 0 else 0)
        while True:
            host = capsule.host
            left = max(0.0, until - time.monotonic())
            try:
                request = messages.ReadOutput(capsule.name, ask.offset, left)
                answer = await self._moves.ask(host, request, left + 10)
                assert isinstance(answer, messages.Output)
                return answer
            except LiveshiftError:
                if time.monotonic() > until and capsule.host == host and not capsule.migration:
                    raise
            await asyncio.sleep(OUTPUT_RETRY_S)

    async def _get_inspection(
        self, who: Principal, ask: messages.GetInspection
    ) -> messages.Inspection:
        """Ask the agent of the host that has the capsule."""
        self._need_to_see(who, self._job(who, ask.capsule))
        capsule = self._fleet.capsule(ask.capsule)[1]
        answer = await self._moves.ask(capsule.host, ask, INSPECT_S)
        assert isinstance(answer, messages.Inspection)
        return answer

    # ---- migrations ----------------------------------------------------------------------------

    async def _migrate(self, who: Principal, ask: messages.Migrate) -> Message:
        job = self._job(who, ask.capsule)
        if not who.owns(job.uid) and not self._rules(who, ask.capsule):
            self._need(who, Role.OPERATE, f"move {ask.capsule}", job)
        capsule = self._fleet.capsule(ask.capsule)[1]
        if ask.way and ask.way not in set(Way):
            raise Refused(
                f'there is no way "{ask.way}" to move memory', hint=f"ways: {', '.join(Way)}"
            )
        reason, moves = shortened(ask.reason) or "asked for", self._moves
        within = ask.within if ask.within > 0 else None
        gpu = asked(ask, capsule)
        if gpu is not None and gpu.host == capsule.host:
            if ask.way or within:
                raise Refused(
                    f"{ask.capsule} stays on {capsule.host}: neither a way nor a deadline goes"
                    " with that",
                    hint="leave --way and --within out, or name a GPU of another host",
                )
            if ask.dry_run:
                return await moves.plan_swap(job, capsule, gpu)
            swap = moves.start_swap(job, capsule, gpu, reason, who.shown, verify=ask.verify)
            return messages.Named(swap.name)
        to = ask.to if gpu is None else gpu.host
        if ask.dry_run:
            return await moves.plan(job, capsule, to, gpu, ask.way, within)
        until = None if within is None else time.monotonic() + within
        move = moves.start(
            job,
            capsule,
            to,
            reason,
            who.shown,
            verify=ask.verify,
            gpu=gpu,
            way=ask.way,
            until=until,
        )
        return messages.Named(move.name)

    async def _cancel(self, who: Principal, ask: messages.Cancel) -> None:
        row = (await self._get_migration(who, messages.GetMigration(ask.name))).row
        move = self._fleet.moves.get(ask.name)
        if move is None:
            raise Refused(f"{ask.name} is over: {row.state}")
        if not who.owns(move.job.uid) and not self._rules(who, row.capsule):
            self._need(who, Role.OPERATE, f"cancel {ask.name}", move.job)
        move.cancel(who.shown)
        self._evacuation.leave(move.capsule)

    async def _get_migration(
        self, who: Principal, ask: messages.GetMigration
    ) -> messages.MigrationDetails:
        move = self._fleet.moves.get(ask.name)
        if move is None:
            number = ask.name.removeprefix("m")
            known = number.isdecimal() and len(number) < 18  # SQLite's integers have 64 bits
            row = self._fleet.journal.migration(int(number)) if known else None
            if row is None:
                raise NotFound(f'no migration "{ask.name}"', hint="`liveshift events` lists them")
            if not self._saw(who, row.capsule, row.asked):
                raise refusal(who, f"see {ask.name}", Role.VIEW, f"it moved {row.capsule}")
            return messages.MigrationDetails(row)
        if not self._sees(who, move.job):
            raise refusal(who, f"see {ask.name}", Role.VIEW, _whose(who, move.job))
        if isinstance(move, HostMigration) and move.step in (
            MigrationStep.PRECOPYING,
            MigrationStep.QUIESCING,
            MigrationStep.FREEZING,
        ):
            with contextlib.suppress(LiveshiftError):
                seen = await self._moves.ask(move.destination, messages.Progress(move.name), 2)
                if isinstance(seen, messages.Arrived):
                    move.times.bytes = seen.bytes
        return messages.MigrationDetails(move.row())

    # ---- looking -------------------------------------------------------------------------------

    async def _get_status(self, who: Principal, _ask: messages.GetStatus) -> messages.Status:
        return status(self._fleet, lambda job: self._sees(who, job), sees_all=who.may(Role.VIEW))

    async def _get_events(self, who: Principal, ask: messages.GetEvents) -> messages.Events:
        subject, journal = ask.subject, self._fleet.journal
        if subject.startswith("m") and subject[1:].isdigit() and subject not in self._fleet.jobs:
            row = (await self._get_migration(who, messages.GetMigration(subject))).row
            every = journal.events(row.capsule, ask.after)
            about = [e for e in every if e.migration and e.migration.name == subject]
            return messages.Events(self._seen(who, about))
        job = self._fleet.jobs.get(subject.partition("/")[0])
        if job is not None and subject not in self._fleet.hosts:
            self._need_to_see(who, job)
        is_host = subject in self._fleet.hosts
        events = self._seen(who, journal.events(subject, ask.after, is_host))
        known = {"", *self._fleet.hosts, *self._fleet.jobs}
        if not events and not ask.after and subject not in known:
            own = [name for name, each in self._fleet.jobs.items() if self._sees(who, each)]
            said, names = f'nothing is known of "{subject}"', [*self._fleet.hosts, *own]
            raise no_such(said, subject, names, "known hosts and jobs")
        return messages.Events(events)

    async def _who_am_i(self, who: Principal, _ask: messages.WhoAmI) -> messages.Me:
        return messages.Me(
            name=who.name,
            role=who.role.value,
            why=who.why,
            uid=who.uid,
            through=who.host or "",
            cluster=self._fleet.cluster.name,
            may=who.rights(),
            shared=list(map(str, self._fleet.cluster.files.shared)),
        )

    # ---- rights --------------------------------------------------------------------------------

    def _sees(self, who: Principal, job: Job) -> bool:
        """Whether ``who`` may see a job. Root of a host may see what runs there, as in ps."""
        ruled = who.rules is not None and any(c.host == who.rules for c in job.capsules.values())
        return who.may(Role.VIEW) or who.owns(job.uid) or ruled

    def _saw(self, who: Principal, subject: str, when: float) -> bool:
        """Whether ``who`` may see a past event or move: its job must be visible, and not a later
        job of the same name. The journal does not know the owner of a forgotten job."""
        if who.may(Role.VIEW) or subject in self._fleet.hosts:
            return True
        job = self._fleet.jobs.get(subject.partition("/")[0])
        return job is not None and when >= job.started and self._sees(who, job)

    def _seen(self, who: Principal, events: Iterable[Event]) -> list[Event]:
        return [e for e in events if self._saw(who, e.subject, e.time)][-MOST_EVENTS:]

    def _rules(self, who: Principal, capsule: str) -> bool:
        """Whether the capsule runs on the host whose root ``who`` is."""
        found = self._fleet.find(capsule)
        return found is not None and found[1].host == who.rules

    def _job(self, who: Principal, name: str) -> Job:
        """Return a job by its name or by a capsule's name. Raises NotFound, which names only jobs
        that ``who`` may see."""
        name = name.partition("/")[0]
        if name not in self._fleet.jobs:
            known = [n for n, job in self._fleet.jobs.items() if self._sees(who, job)]
            raise no_such(f'no job "{name}"', name, known, "known jobs")
        return self._fleet.jobs[name]

    def _need_to_see(self, who: Principal, job: Job) -> None:
        if not self._sees(who, job):
            self._need(who, Role.VIEW, f"see {job.name}", job)

    def _need(self, who: Principal, role: Role, what: str, job: Job | None = None) -> None:
        if not who.may(role):
            raise refusal(who, what, role, _whose(who, job) if job else "")


def _whose(who: Principal, job: Job) -> str:
    """Say whose a job is; only a caller with the role "view" learns the uid."""
    return f"it belongs to uid {job.uid}" if who.may(Role.VIEW) else "it is another user's"


def _check_groups(who: Principal, uid: int, ask: messages.RunJob) -> None:
    """Raise NotPermitted unless all groups of the request are the caller's own: the kernel vouches
    for the uid only."""
    own = groups_of(uid)
    if not own:
        raise NotPermitted(
            f"{who.shown} may not run a job: the orchestrator's machine knows no user {uid}",
            hint="users and groups must be the same on every machine of the cluster",
        )
    if others := sorted({ask.gid, *ask.groups} - set(own)):
        numbers = ", ".join(map(str, others))
        raise NotPermitted(
            f"{who.shown} may not run a job with the groups {numbers}: on the orchestrator's"
            f" machine {who.name} is not in them",
            hint="users and groups must be the same on every machine of the cluster",
        )
