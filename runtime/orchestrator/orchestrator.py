# SPDX-License-Identifier: Apache-2.0
"""The orchestrator: the one daemon that decides for a cluster. It is made of these parts:

fleet              what is known                    api_server   people's requests
migration_service  begins migrations                evacuation   moves off tainted hosts
planning           whether, where to, at what cost  endings      how jobs end
claims             which copy may run               stopping     signals, jobs that must end
rewinds            what is lost of jobs             suspensions  jobs that run nowhere
ordered_snapshots  what people order                catch_up     after a backup was put back
address_book       which host has which capsule     link         messages to and from agents
context            what a migration needs of these   protection   snapshots of jobs
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec

from ...errors import LiveshiftError, NotPermitted, Unreachable
from .. import messages
from ..config.cluster import Cluster
from ..control import local_socket
from ..control.link import Switchboard
from ..daemon import heap, notify, state_lock
from ..daemon.bounded_command import not_runnable
from ..daemon.cluster_file import ClusterFile
from ..fleet.address_book import AddressBook
from ..fleet.agents import Agents
from ..fleet.catch_up import CatchUp
from ..fleet.claims import ClaimJudge
from ..fleet.endings import Endings
from ..fleet.fleet import Fleet
from ..fleet.stopping import Stopping
from ..journal.journal_file import JournalError
from ..messages import Message
from ..messages.request_text import request_to
from ..migration.migration import Migration
from ..migration.migration_records import MigrationRecords
from ..model.jobs import KILLED
from ..model.ownership import Ruling, is_stray
from ..model.steps import MigrationStep
from ..moves.context import OrchestratorContext
from ..moves.costing import Costing
from ..moves.evacuation import Evacuation
from ..moves.migration_service import MigrationService
from ..moves.planning import MigrationPlanner
from ..protection.job_snapshots import JobSnapshots
from ..protection.ordered_snapshots import OrderedSnapshots
from ..protection.protection import Protection
from ..protection.rewinds import Rewinds
from ..protection.saved_jobs import SavedJobs
from ..protection.suspensions import Suspensions
from ..quiesce.gates import Gates
from ..snapshot.directory_images import DirectoryImages
from .api_server import ApiServer

log = logging.getLogger("liveshift.orchestrator")

BACKUP_S = 60.0
"""The orchestrator backs the journal up every BACKUP_S seconds, if it was changed meanwhile."""

LIMIT_S, LIMIT_REST_S = 3600.0, 0.1
"""The orchestrator looks for old events every LIMIT_S seconds, and rests LIMIT_REST_S seconds after
each removal."""

GIVE_BACK_S, GIVE_BACK_AT_MOST_S = 60.0, 600.0
"""The orchestrator gives freed memory back less often than agents do (daemon/heap.py): Python looks
at every object for it, and one of a thousand hosts has many."""

FROM_AGENTS = (
    messages.Heartbeat,
    messages.Register,
    messages.Claim,
    messages.Progressed,
    messages.CapsuleEnded,
    messages.Relay,
)
"""The only messages that the orchestrator accepts from an agent."""


class Orchestrator:
    """The orchestrator of one cluster; :meth:`run` serves until it is cancelled."""

    def __init__(self, cluster: Cluster, switchboard: Switchboard) -> None:
        self.cluster = cluster
        self.switchboard = switchboard
        self.fleet = fleet = Fleet(cluster)
        self.stopping = Stopping(fleet, switchboard)
        self.endings = Endings(fleet, switchboard, self.stopping)
        agents, records = Agents(fleet, switchboard), MigrationRecords(fleet.journal)
        self.address_book = AddressBook(fleet, switchboard)
        self.claims = ClaimJudge(fleet, records)
        planner, gates = MigrationPlanner(fleet, agents), Gates(agents.request)
        context = OrchestratorContext(fleet, agents, self.address_book, planner, records, gates)
        costing = Costing(fleet, agents, records.record_cost)
        self.migrations = MigrationService(
            fleet, context, planner, records, costing, self._migration_ended
        )
        self.rewinds = Rewinds(fleet, agents, self.address_book, context, gates, self.endings)
        self.images = images = DirectoryImages(cluster, agents.request)
        self.snapshots = JobSnapshots(fleet, context, images)
        self.protection = Protection(fleet, context, self.snapshots)
        self.ordered = OrderedSnapshots(fleet, self.snapshots, images)
        saved = SavedJobs(fleet, images, self.endings)
        self.suspensions = Suspensions(fleet, self.ordered, self.rewinds, self.endings, saved)
        self.evacuation = Evacuation(fleet, planner, self.migrations)
        self.api = ApiServer(
            fleet,
            agents,
            self.address_book,
            planner,
            self.migrations,
            self.endings,
            self.evacuation,
            self.stopping,
            self.rewinds,
            self.ordered,
            self.suspensions,
        )
        self.catch_up = CatchUp(fleet, self.endings.capsule_ended)
        self._decided = asyncio.Event()  # set once the journal is up to date

    @classmethod
    async def start(cls, cluster: Cluster) -> Orchestrator:
        """Start an orchestrator that continues what an earlier one has left.

        It binds the port before it opens the journal: if another orchestrator listens, it touches
        nothing. Raises LiveshiftError; then nothing is left behind.
        """
        path = cluster.paths.run / "orchestrator.sock"
        agents = {host.name: str(host.data) for host in cluster.hosts}
        switchboard = Switchboard(str(cluster.orchestrator), cluster.paths.keys, agents)
        with contextlib.ExitStack() as undo:
            await switchboard.listen()
            undo.callback(switchboard.close)
            listener = local_socket.listen(path)
            undo.callback(path.unlink, missing_ok=True)
            undo.callback(listener.close)
            made = cls(cluster, switchboard)
            undo.callback(made.fleet.journal.file.close)
            if made.fleet.journal.file.restored:
                made.catch_up.begin()
            else:
                made.migrations.recover()
                made.snapshots.recover()
                made.ordered.recover()
                made._start_deciding()
            await local_socket.serve_on(listener, path, made.api.handle)
            undo.pop_all()
        notify.ready()
        return made

    async def run(self) -> None:
        serving = self.switchboard.serve(self._handle_agent, self.api.handle_operator)
        parts = (
            self.protection.run,
            self.ordered.run,
            self.rewinds.run,
            self.suspensions.run,
            self.fleet.failures.run,
        )
        working = (self._evacuate(), *map(self._once_decided, parts))
        giving_back = heap.give_back(self.idle, GIVE_BACK_S, GIVE_BACK_AT_MOST_S)
        limiting = self._once_decided(self._limit_history)
        await asyncio.gather(serving, *working, self._keep_backup(), limiting, giving_back)

    def _start_deciding(self) -> None:
        self.stopping.resume()
        self._decided.set()

    async def _evacuate(self) -> None:
        await self._decided.wait()
        for job in list(self.fleet.jobs.values()):  # others start and are forgotten meanwhile
            if self.fleet.reports and job.state != "ended":  # the hosts' books may be out of date
                await self.address_book.publish(job)
        await self.evacuation.run()

    async def _once_decided(self, run: Callable[[], Awaitable[None]]) -> None:
        await self._decided.wait()
        await run()

    async def _keep_backup(self) -> None:
        """Back the journal up at the start, and every BACKUP_S seconds if it was changed."""
        file, copied = self.fleet.journal.file, -1
        while True:
            if not file.restored and (changes := file.changes) != copied:
                try:
                    await asyncio.to_thread(file.back_up)
                    copied = changes
                except LiveshiftError as error:
                    log.error("%s", error)
            await asyncio.sleep(BACKUP_S)

    async def _limit_history(self) -> None:
        """Remove what is older than the last ``jobs.keep_events`` events, every LIMIT_S seconds."""
        journal, keep = self.fleet.journal, self.cluster.jobs.keep_events
        while True:
            try:
                while journal.old_events.remove(keep):
                    await asyncio.sleep(LIMIT_REST_S)
            except LiveshiftError as error:
                log.error("the history is not shortened: %s", error)
            await asyncio.sleep(LIMIT_S)

    def idle(self) -> bool:
        """Whether no migration or rewind is under way, no job is paused for a snapshot and none is
        saved or loaded, so that a restart interrupts none."""
        if self.fleet.under_way() or self.rewinds.under_way() or self.images.busy:
            return False
        return all(each.released.is_set() for each in self.fleet.snapshots.values())

    def objection(self, cluster: Cluster) -> str:
        """Return why a changed cluster file cannot be used; "" if it can."""
        return self.fleet.missing(host.name for host in cluster.hosts)

    async def _migration_ended(self, migration: Migration) -> None:
        while migration.step is MigrationStep.LOST and migration.capsule.code is None:
            capsule = migration.capsule
            if self.rewinds.host_lost(capsule.host, migration.job, capsule):
                break
            try:
                self.endings.capsule_ended(migration.job, migration.capsule, KILLED)
            except JournalError as error:  # nobody else ends the job of a lost rank: try again
                log.error("%s is lost, and this cannot be recorded: %s", migration.name, error)
                await asyncio.sleep(self.cluster.timeouts.heartbeat)
        self.evacuation.wake()

    async def _handle_agent(self, host: str, request: Message) -> Message | None:
        state = self.fleet.hosts.get(host)
        if state is None:
            raise NotPermitted(f"{host} is not in this cluster's file")
        if not isinstance(request, FROM_AGENTS):  # a command line that uses a host's key
            raise NotPermitted(
                f"the key of the host {host} is no operator's: it may not make"
                f" {request_to(request)}",
                hint="`liveshift keys add-operator NAME` makes one, where the cluster's keys are",
            )
        state.heard = time.monotonic()
        if isinstance(request, messages.Heartbeat):
            self._note_heartbeat(host, request)
            if not state.books_current:  # an agent may not notice that it was cut off for a moment
                raise Unreachable(f"{host} may have missed address books: it must report again")
            return None
        if isinstance(request, messages.Register):
            state.digest = request.digest
            if request.digest != self.cluster.digest:
                log.warning("%s runs with another cluster file than the orchestrator", host)
            if self.fleet.journal.file.restored:
                if self.catch_up.report(host, request):
                    self._start_deciding()
            elif request.boot_id != state.boot_id:
                self._end_lost(host, request)  # an agent that runs on reports ends by itself
            state.boot_id = request.boot_id
            state.lost = self.fleet.images_lost(host, request.held)
            self.evacuation.wake()
            state.books_current = True
            running = [j.book() for j in self.fleet.jobs.values() if j.state != "ended"]
            if self.fleet.journal.file.restored:  # the journal does not know yet where they are
                running = [msgspec.structs.replace(book, where={}) for book in running]
            return messages.Books(running)
        if isinstance(request, messages.Claim):
            if self.fleet.journal.file.restored:
                return messages.Ruled(Ruling.WAIT.value, 0)
            return self.claims.rule(host, request)
        if isinstance(request, messages.Progressed):
            self.migrations.progressed(host, request)
            return None
        if isinstance(request, messages.CapsuleEnded):
            if waits := self.fleet.unreported():  # the owner is not known yet: report it again
                raise Unreachable(f"the journal waits for {', '.join(waits)} to report")
            found = self.fleet.find(request.capsule)
            if found and (found[1].host, found[1].epoch) == (host, request.epoch):
                if self.rewinds.takes_back(*found, request):
                    raise Unreachable(f"{found[0].name} may be taken back: report it again")
                self.endings.capsule_ended(*found, request.code)
                self.evacuation.wake()
            return None
        if isinstance(request, messages.Relay):
            relayed = messages.decode(request.request).body
            if relayed is None:
                raise LiveshiftError("an agent relayed a message that is not a request")
            return await self.api.handle_relayed(host, request.uid, relayed)
        raise AssertionError(request)

    def _end_lost(self, host: str, register: messages.Register) -> None:
        """End the capsules that a host owns but no longer has: the host was switched off, say. Take
        those of protected jobs back instead.

        Raises Unreachable if a capsule of a rewind may have been granted after the host has made
        its list. Then the host reports again, and has had the grant before it does.
        """
        lacking = [
            (job, capsule)
            for job, capsule in self.fleet.living()
            if capsule.host == host and capsule.started and capsule.granted
            if not capsule.migration and capsule.name not in register.epochs
        ]
        state = self.fleet.hosts[host]
        before = state.lacking
        state.lacking = frozenset(
            (each.name, each.epoch) for job, each in lacking if job.state == "rewinding"
        )
        just = state.lacking - before
        for job, capsule in lacking:
            waits = (capsule.name, capsule.epoch) in just
            if waits or self.rewinds.host_lost(host, job, capsule):
                continue
            self.endings.capsule_ended(job, capsule, KILLED)
            self.fleet.journal.note(capsule.name, "lost", f"{host} came back without it")
        if names := ", ".join(sorted(name for name, _ in just)):  # last: others do not wait
            raise Unreachable(f"{host} has no {names} yet, or not any more: it must report again")

    def _note_heartbeat(self, host: str, heartbeat: messages.Heartbeat) -> None:
        state = self.fleet.hosts[host]
        state.memory_free, state.gpus = heartbeat.memory_free, tuple(heartbeat.gpus)
        state.link, state.memory_left = heartbeat.link, heartbeat.memory_left
        self.rewinds.note_device_errors(host, heartbeat.device_errors)
        if self.fleet.journal.file.restored:
            return
        unknown = self.fleet.unknown[host] = []
        for seen in heartbeat.capsules:
            found = self.fleet.find(seen.name)
            if found is None:
                last = self.fleet.journal.last_epoch(seen.name.partition("/")[0])
                if not last:
                    unknown.append(seen)
                elif seen.epoch <= last:  # its job has ended and was forgotten while it was away
                    self.endings.end_stray(host, seen.name, seen.epoch)
                continue
            job, capsule = found
            if (capsule.host, capsule.epoch) == (host, seen.epoch):
                self.rewinds.note_heartbeat(capsule, seen)
                capsule.seen = seen
            elif job.state in ("rewinding", "suspended") and seen.rewinds < job.rewinds:
                continue  # the rewind or the suspension ends it, behind a locked network
            elif is_stray(
                host,
                seen.epoch,
                capsule.owner,
                bool(capsule.migration),
                copy_rewinds=seen.rewinds,
                job_rewinds=job.rewinds,
            ):
                log.error("%s still runs on %s under epoch %d", seen.name, host, seen.epoch)
                self.endings.end_stray(host, seen.name, seen.epoch)


async def serve(cluster: Cluster, file: ClusterFile) -> None:
    """Run the orchestrator until its cluster file has changed; the caller must then start it again.

    Raises LiveshiftError if it cannot start.
    """
    heap.bound()
    for key, argv in (
        ("fence", cluster.snapshots.fence),
        ("on_rewind", cluster.snapshots.on_rewind),
    ):
        # The log names the fault now. Otherwise it would show only after a host has died.
        if why := not_runnable(argv):
            log.error("snapshots.%s of the cluster file: %s", key, why)
    with state_lock.held(cluster.paths.state, "orchestrator"):
        orchestrator = await Orchestrator.start(cluster)
        await file.follow(orchestrator.run(), orchestrator.idle, orchestrator.objection)
