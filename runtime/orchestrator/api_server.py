# SPDX-License-Identifier: Apache-2.0
"""Answers people's requests to the orchestrator, and decides who may request what.

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
from ..migration.order import Order
from ..model.gpu_asked import asked
from ..model.jobs import Capsule, Job, check_request, overlay_for
from ..model.steps import MigrationStep
from .address_book import AddressBook
from .agents import Agents
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
        agents: Agents,
        address_book: AddressBook,
        migrations: MigrationService,
        endings: Endings,
        evacuation: Evacuation,
        stopping: Stopping,
    ) -> None:
        self._fleet = fleet
        self._agents = agents
        self._address_book = address_book
        self._migrations = migrations
        self._endings = endings
        self._evacuation = evacuation
        self._stopping = stopping
        self._roles = Roles(fleet.cluster.access)
        self._lookups = ThreadPoolExecutor(LOOKUPS, "lookup")
        for name in self._roles.unknown():
            log.warning('access: this machine knows no "%s"', name)
        marks = HostMarks(fleet, evacuation)
        self._handlers: dict[type[Message], Callable[..., Awaitable[Message | None]]] = {
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

    async def handle(self, uid: int, request: Message) -> Message | None:
        """Answer a request of a user on this machine. Raises errors meant for that user."""
        who = await self._in_lookup_thread(lambda: self._roles.local(uid))
        return await self._answer(who, request)

    async def handle_relayed(self, host: str, uid: int, request: Message) -> Message | None:
        """Answer a request of a user on a host; the host's agent vouches for the uid."""
        who = await self._in_lookup_thread(lambda: self._roles.relayed(host, uid))
        return await self._answer(who, request)

    async def handle_operator(self, holder: Holder, request: Message) -> Message | None:
        """Answer a request of the holder of an operator's key."""
        assert holder.role is not None
        return await self._answer(self._roles.operator(holder.name, holder.role), request)

    async def _answer(self, who: Principal, request: Message) -> Message | None:
        if isinstance(request, CHANGING) and (waits := self._fleet.unreported()):
            raise Refused(
                "the journal was put back from a backup: nothing is started, moved or ended before"
                f" {', '.join(waits)} told what is there",
                hint="start the agents there; a host that is gone for good is taken out of the"
                " cluster file",
            )
        handler = self._handlers.get(type(request))
        if handler is None:
            raise NotPermitted(f"{request_to(request)} is not for the command line")
        return await handler(who, request)

    async def _in_lookup_thread(self, look_up: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._lookups, look_up)

    # ---- jobs ----------------------------------------------------------------------------------

    async def _run(self, who: Principal, request: messages.RunJob) -> messages.Named:
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
            await self._in_lookup_thread(lambda: _check_groups(who, uid, request))
        # An ended job keeps its output for its owner: another user must not take over the name.
        kept = {n for n, j in fleet.jobs.items() if j.state == "ended" and not who.owns(j.uid)}
        if request.name in kept and not who.may(Role.OPERATE):
            raise Refused(f'"{request.name}" is another user\'s job', hint="choose another --name")
        running = {n for n, j in fleet.jobs.items() if j.state != "ended"}
        taken = running if request.name else running | kept
        name = check_request(request, taken, fleet.cluster, fleet.journal.next_number())
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
        hosts = place_job(fleet.views(), request.nnodes)
        capsules = {
            f"{name}/{i}": Capsule(f"{name}/{i}", i, host, 1) for i, host in enumerate(hosts)
        }
        spec = msgspec.msgpack.encode({"uid": uid, "run": msgspec.to_builtins(request)})
        owners = {c.name: (c.index, c.host) for c in capsules.values()}
        where, what = ", ".join(hosts), shortened(" ".join(request.argv))
        with fleet.journal.together():
            started, first = fleet.journal.add_job(name, overlay.vni, overlay.subnet, spec, owners)
            fleet.journal.tell(name, "started", f"started on {where}: {what}", who.shown)
        for capsule in capsules.values():
            capsule.epoch = first
        job = fleet.jobs[name] = Job(name, overlay, request, uid, started, capsules)
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

    async def _signal_job(self, who: Principal, request: messages.SignalJob) -> None:
        job = self._job(who, request.job)
        try:
            sent = signal.Signals(request.signum)
        except ValueError:
            raise Refused(f"there is no signal {request.signum}") from None
        if not who.owns(job.uid):
            ends = sent in ENDING
            what = f"end {job.name}" if ends else f"send {sent.name} to {job.name}"
            self._need(who, Role.OPERATE if ends else Role.ADMIN, what, job)
        self._fleet.journal.note(job.name, "signal", f"received {sent.name}", who.shown)
        await self._stopping.signal(job, sent, who.shown)

    async def _end_unknown(self, who: Principal, request: messages.EndUnknown) -> None:
        """End a host's capsules of a job that the journal does not know; remove what they leave."""
        if who.rules != request.host:
            self._need(who, Role.OPERATE, f"end {request.job} on {request.host}")
        host = self._fleet.cluster.host(request.host).name
        unknown = self._fleet.unknown.get(host, ())
        here = [c for c in unknown if c.name.startswith(f"{request.job}/")]
        if not here or request.job in self._fleet.jobs:
            raise NotFound(
                f"{host} runs nothing of {request.job} that the journal does not know",
                hint="`liveshift status` shows what is unknown",
            )
        limit = self._fleet.cluster.timeouts.prepare
        for capsule in here:
            await self._agents.request(host, messages.End(capsule.name, capsule.epoch), limit)
        await self._agents.request(host, messages.Forget(request.job), limit)
        left = [c for c in self._fleet.unknown.get(host, ()) if c not in here]
        self._fleet.unknown[host] = left
        journal = self._fleet.journal
        try:
            journal.end_unknown(request.job, max(capsule.epoch for capsule in here))
        except LiveshiftError as error:  # a full disk must not prevent the end
            log.error("%s is ended; its name may be used again: %s", request.job, error)
        journal.note(host, "ended", f"ended {request.job}, which was unknown", who.shown)

    async def _read_output(self, who: Principal, request: messages.ReadOutput) -> messages.Output:
        """Read output from the host that owns the capsule. Offsets stay valid across a move, so a
        request that fails is repeated at the capsule's host of that moment."""
        job = self._job(who, request.capsule)
        if not who.owns(job.uid):
            self._need(who, Role.ADMIN, f"read the output of {job.name}", job)
        capsule = self._fleet.capsule(request.capsule)[1]
        until = time.monotonic() + (min(request.wait, MOST_WAIT_S) if request.wait > 0 else 0)
        while True:
            host = capsule.host
            left = max(0.0, until - time.monotonic())
            try:
                read = messages.ReadOutput(capsule.name, request.offset, left)
                answer = await self._agents.request(host, read, left + 10)
                assert isinstance(answer, messages.Output)
                return answer
            except LiveshiftError:
                if time.monotonic() > until and capsule.host == host and not capsule.migration:
                    raise
            await asyncio.sleep(OUTPUT_RETRY_S)

    async def _get_inspection(
        self, who: Principal, request: messages.GetInspection
    ) -> messages.Inspection:
        """Ask the agent of the host that has the capsule."""
        self._need_to_see(who, self._job(who, request.capsule))
        capsule = self._fleet.capsule(request.capsule)[1]
        answer = await self._agents.request(capsule.host, request, INSPECT_S)
        assert isinstance(answer, messages.Inspection)
        return answer

    # ---- migrations ----------------------------------------------------------------------------

    async def _migrate(self, who: Principal, request: messages.Migrate) -> Message:
        job = self._job(who, request.capsule)
        if not who.owns(job.uid) and not self._rules(who, request.capsule):
            self._need(who, Role.OPERATE, f"move {request.capsule}", job)
        capsule = self._fleet.capsule(request.capsule)[1]
        if request.way and request.way not in set(Way):
            raise Refused(
                f'there is no way "{request.way}" to move memory', hint=f"ways: {', '.join(Way)}"
            )
        within = request.within if request.within > 0 else None
        gpu = asked(request, capsule)
        order = Order(
            job,
            capsule,
            request.to if gpu is None else gpu.host,
            shortened(request.reason) or "asked for",
            who.shown,
            gpu,
            request.verify,
            request.way,
            None if within is None else time.monotonic() + within,
        )
        if order.is_swap and (request.way or within):
            raise Refused(
                f"{request.capsule} stays on {capsule.host}: neither a way nor a deadline goes"
                " with that",
                hint="leave --way and --within out, or name a GPU of another host",
            )
        if request.dry_run:
            return await self._migrations.plan(order, within)
        return messages.Named(self._migrations.start(order).name)

    async def _cancel(self, who: Principal, request: messages.Cancel) -> None:
        row = (await self._get_migration(who, messages.GetMigration(request.name))).row
        migration = self._fleet.migrations.get(request.name)
        if migration is None:
            raise Refused(f"{request.name} is over: {row.state}")
        if not who.owns(migration.job.uid) and not self._rules(who, row.capsule):
            self._need(who, Role.OPERATE, f"cancel {request.name}", migration.job)
        migration.cancel(who.shown)
        self._evacuation.leave(migration.capsule)

    async def _get_migration(
        self, who: Principal, request: messages.GetMigration
    ) -> messages.MigrationDetails:
        migration = self._fleet.migrations.get(request.name)
        if migration is None:
            number = request.name.removeprefix("m")
            known = number.isdecimal() and len(number) < 18  # SQLite's integers have 64 bits
            row = self._fleet.journal.migration(int(number)) if known else None
            if row is None:
                raise NotFound(
                    f'no migration "{request.name}"', hint="`liveshift events` lists them"
                )
            if not self._saw(who, row.capsule, row.asked):
                raise refusal(who, f"see {request.name}", Role.VIEW, f"it moved {row.capsule}")
            return messages.MigrationDetails(row)
        if not self._sees(who, migration.job):
            raise refusal(who, f"see {request.name}", Role.VIEW, _whose(who, migration.job))
        if isinstance(migration, HostMigration) and migration.step in (
            MigrationStep.PRECOPYING,
            MigrationStep.QUIESCING,
            MigrationStep.FREEZING,
        ):
            with contextlib.suppress(LiveshiftError):
                progress = messages.Progress(migration.name)
                seen = await self._agents.request(migration.destination, progress, 2)
                if isinstance(seen, messages.Arrived):
                    migration.times.bytes = seen.bytes
        return messages.MigrationDetails(migration.row())

    # ---- looking -------------------------------------------------------------------------------

    async def _get_status(self, who: Principal, _ask: messages.GetStatus) -> messages.Status:
        return status(self._fleet, lambda job: self._sees(who, job), sees_all=who.may(Role.VIEW))

    async def _get_events(self, who: Principal, request: messages.GetEvents) -> messages.Events:
        subject, journal = request.subject, self._fleet.journal
        if subject.startswith("m") and subject[1:].isdigit() and subject not in self._fleet.jobs:
            row = (await self._get_migration(who, messages.GetMigration(subject))).row
            every = journal.events(row.capsule, request.after)
            about = [e for e in every if e.migration and e.migration.name == subject]
            return messages.Events(self._seen(who, about))
        job = self._fleet.jobs.get(subject.partition("/")[0])
        if job is not None and subject not in self._fleet.hosts:
            self._need_to_see(who, job)
        is_host = subject in self._fleet.hosts
        events = self._seen(who, journal.events(subject, request.after, is_host))
        known = {"", *self._fleet.hosts, *self._fleet.jobs}
        if not events and not request.after and subject not in known:
            own = [name for name, each in self._fleet.jobs.items() if self._sees(who, each)]
            text, names = f'nothing is known of "{subject}"', [*self._fleet.hosts, *own]
            raise no_such(text, subject, names, "known hosts and jobs")
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
