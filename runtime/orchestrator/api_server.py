# SPDX-License-Identifier: Apache-2.0
"""Takes people's requests to the orchestrator, finds out who asks, and passes each one on to the
method that answers it. rights.py says who may do what.

Requests come over the local socket, through an agent, or with an operator's key (access.py). All
users may see the hosts. A job, its moves and its events are shown to its owner and to the role
"view". An owner may move, signal and read a job; "operate" may move and end any, and taint hosts.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from ...errors import NotPermitted, Refused, no_such
from .. import messages
from ..config.access import Principal, Role, Roles
from ..control.keyring import Holder
from ..daemon.lookups import look_up
from ..fleet.address_book import AddressBook
from ..fleet.agents import Agents
from ..fleet.endings import Endings
from ..fleet.fleet import Fleet
from ..fleet.rights import Rights
from ..fleet.status import status
from ..fleet.stopping import Stopping
from ..messages import Message
from ..messages.request_text import request_to
from ..moves.evacuation import Evacuation
from ..moves.host_marks import HostMarks
from ..moves.migration_requests import MigrationRequests
from ..moves.migration_service import MigrationService
from ..moves.planning import MigrationPlanner
from ..protection.ordered_snapshots import OrderedSnapshots
from ..protection.rewinds import Rewinds
from ..protection.suspensions import Suspensions
from .job_requests import JobRequests

log = logging.getLogger("liveshift.api")

CHANGING = (
    messages.RunJob,
    messages.Migrate,
    messages.Cancel,
    messages.SignalJob,
    messages.EndUnknown,
    messages.RewindJob,
    messages.SnapshotJob,
    messages.SuspendJob,
    messages.ResumeJob,
)


class ApiServer:
    """The orchestrator has one instance, which answers the requests of all people. It has a
    ``handle`` method for each way to reach it: the local socket, an agent, an operator's key. Each
    method raises NotPermitted if the caller may not make the request."""

    def __init__(
        self,
        fleet: Fleet,
        agents: Agents,
        address_book: AddressBook,
        planner: MigrationPlanner,
        migrations: MigrationService,
        endings: Endings,
        evacuation: Evacuation,
        stopping: Stopping,
        rewinds: Rewinds,
        ordered: OrderedSnapshots,
        suspensions: Suspensions,
    ) -> None:
        self._fleet = fleet
        self._rights = rights = Rights(fleet)
        self._roles = Roles(fleet.cluster.access)
        for name in self._roles.unknown():
            log.warning('access: this machine knows no "%s"', name)
        marks = HostMarks(fleet, rights, evacuation)
        jobs = JobRequests(
            fleet, rights, agents, address_book, endings, stopping, rewinds, ordered, suspensions
        )
        self._migration_requests = MigrationRequests(
            fleet, rights, agents, planner, migrations, evacuation
        )
        self._handlers: dict[type[Message], Callable[..., Awaitable[Message | None]]] = {
            messages.RunJob: jobs.run,
            messages.GetStatus: self._get_status,
            messages.SetTaint: marks.set_taint,
            messages.PlanEvacuation: marks.plan_evacuation,
            messages.Untaint: marks.untaint,
            messages.Cordon: marks.cordon,
            messages.Uncordon: marks.uncordon,
            messages.Migrate: self._migration_requests.migrate,
            messages.Cancel: self._migration_requests.cancel,
            messages.GetMigration: self._migration_requests.get_migration,
            messages.ReadOutput: jobs.read_output,
            messages.ReadRepeated: jobs.read_repeated,
            messages.GetInspection: jobs.get_inspection,
            messages.SignalJob: jobs.signal_job,
            messages.EndUnknown: jobs.end_unknown,
            messages.RewindJob: jobs.rewind,
            messages.SnapshotJob: jobs.snapshot,
            messages.SuspendJob: jobs.suspend,
            messages.WithdrawOrder: jobs.withdraw,
            messages.ResumeJob: jobs.resume,
            messages.GetEvents: self._get_events,
            messages.WhoAmI: self._who_am_i,
        }

    async def handle(self, uid: int, request: Message) -> Message | None:
        """Answer a request of a user on this machine. Raises errors meant for that user."""
        who = await look_up(lambda: self._roles.local(uid))
        return await self._answer(who, request)

    async def handle_relayed(self, host: str, uid: int, request: Message) -> Message | None:
        """Answer a request of a user on a host; the host's agent vouches for the uid."""
        who = await look_up(lambda: self._roles.relayed(host, uid))
        return await self._answer(who, request)

    async def handle_operator(self, holder: Holder, request: Message) -> Message | None:
        """Answer a request of the holder of an operator's key."""
        assert holder.role is not None
        return await self._answer(self._roles.operator(holder.name, holder.role), request)

    async def _answer(self, who: Principal, request: Message) -> Message | None:
        if isinstance(request, CHANGING) and (waits := self._fleet.unreported()):
            raise Refused(
                "the journal was put back from a backup: nothing is started, moved or ended before"
                f" {', '.join(waits)} reported what is there",
                hint="start the agents there; a host that will not return is taken out of the"
                " cluster file",
            )
        handler = self._handlers.get(type(request))
        if handler is None:
            raise NotPermitted(f"{request_to(request)} is not for the command line")
        return await handler(who, request)

    # ---- what is known -----------------------------------------------------------------------

    async def _get_status(self, who: Principal, request: messages.GetStatus) -> messages.Status:
        return status(
            self._fleet,
            lambda job: self._rights.sees(who, job),
            sees_all=who.may(Role.VIEW),
            only=request.job,
        )

    async def _get_events(self, who: Principal, request: messages.GetEvents) -> messages.Events:
        subject, journal, sees = request.subject, self._fleet.journal, self._rights.seen_by(who)
        if subject.startswith("m") and subject[1:].isdigit() and subject not in self._fleet.jobs:
            asked_for = messages.GetMigration(subject)
            await self._migration_requests.get_migration(who, asked_for)  # checks the rights
            number = int(subject[1:])
            return messages.Events(journal.events_of_migration(number, request.after, sees))
        job = self._fleet.jobs.get(subject.partition("/")[0])
        if job is not None and subject not in self._fleet.hosts:
            self._rights.need_to_see(who, job)
        is_host = subject in self._fleet.hosts
        events = journal.events(subject, request.after, is_host, sees)
        known = {"", *self._fleet.hosts, *self._fleet.jobs}
        if not events and not request.after and subject not in known:
            own = [name for name, each in self._fleet.jobs.items() if self._rights.sees(who, each)]
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
