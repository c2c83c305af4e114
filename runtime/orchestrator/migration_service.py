# SPDX-License-Identifier: Apache-2.0
"""Begins migrations, plans them for --dry-run, and serves the running ones (see Ground)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec

from ... import units
from ...errors import Refused, StepFailed, Unreachable
from .. import messages
from ..config.cluster import Cluster
from ..control.link import Switchboard
from ..cost import model as cost
from ..cost.comparison import costed
from ..cost.prediction import Load, learn, predict, rate_between
from ..daemon.tasks import Tasks
from ..messages import Message, MigrationRow
from ..messages.words import request_to
from ..migration import second_look
from ..migration.context import expected_bytes, limit_bytes, what_breaks
from ..migration.gpu_swap import GpuSwap, way_of
from ..migration.host_migration import HostMigration
from ..migration.migration import Migration
from ..model.gpu_asked import GpuAsked, left, seat
from ..model.jobs import Capsule, Job
from ..model.ownership import BEFORE_COMMIT, Ruling, Side, may_pass, rule
from ..model.steps import ENDS, MigrationStep
from ..quiesce.gates import Gates
from .costing import Costing
from .fleet import Fleet
from .journal_file import JournalTrouble
from .spares import choose_destination

log = logging.getLogger("liveshift.moves")

LIVENESS_LOOK_S = 0.5
PUBLISH_AT_ONCE, PUBLISHED_AT_ONCE = 50, 4
"""Limits for hosts whose answer no job waits for: the orchestrator sends one address book to 50
hosts at a time, and 4 books at a time."""
KEEP_MOVES = 200
"""Memory keeps this many ended migrations; the journal keeps all."""

LESSONS = 50
"""A prediction looks at this many last moves that were done, and learns from the similar ones."""

UNHURRIED = frozenset(
    {
        MigrationStep.FREEZING,
        MigrationStep.COMMITTED,
        MigrationStep.RESTORING,
        MigrationStep.RESUMING,
    }
)
SOON_S = 0.004
"""The job is frozen in the UNHURRIED steps of a move, so the move does not wait for the disk: the
journal gets the step SOON_S seconds later. A restarted orchestrator sees a commit in the journal
(_left_behind), and the destination answers a repeated request as before. If the journal says
"quiescing", the restarted orchestrator allows for an image that is complete."""

SAVE_AGAIN_S = 1.0

UNCOMMITTED = frozenset(step.value for step in {*BEFORE_COMMIT, MigrationStep.ROLLING_BACK})


class MigrationService:
    """All migrations of the cluster."""

    def __init__(
        self,
        fleet: Fleet,
        switchboard: Switchboard,
        over: Callable[[Migration], Awaitable[None]],
    ) -> None:
        self.cluster: Cluster = fleet.cluster
        self._fleet = fleet
        self._switchboard = switchboard
        self._over = over
        self._tasks = Tasks()
        self._publishing = asyncio.Semaphore(PUBLISHED_AT_ONCE)
        self._gates = Gates(self.ask)
        self._unsaved: dict[int, asyncio.TimerHandle] = {}
        self._costing = Costing(fleet, self.ask, self._measured)
        self._not_saved: set[int] = set()  # migrations whose last step the journal lacks

    def start(
        self,
        job: Job,
        capsule: Capsule,
        to: str,
        reason: str,
        by: str,
        *,
        verify: bool = False,
        gpu: GpuAsked | None = None,
        way: str = "",
        until: float | None = None,
    ) -> HostMigration:
        """Begin to move a capsule. Raises Refused, NotFound or Unreachable; then nothing has begun.

        ``verify``: compare every byte of device memory after the move. ``gpu``: the GPU to use on
        ``to``. ``way``: replaces precopy.way. ``until``: the monotonic time by which the capsule
        must be gone.
        """
        destination, why = self._destination(job, capsule, to)
        to_gpu = self._seat(gpu)
        number = self._fleet.journal.next_migration()
        move = HostMigration(self, number, job, capsule, destination, reason, by, self._changed)
        move.verify, move.copy_way, move.until = verify, way, until
        move.to_gpu, move.from_gpu = to_gpu, gpu.leave if gpu else ""
        self._begin(move, why)
        return move

    def start_swap(
        self,
        job: Job,
        capsule: Capsule,
        gpu: GpuAsked,
        reason: str,
        by: str,
        *,
        verify: bool = False,
    ) -> GpuSwap:
        """Begin to move a capsule to another GPU of its host; raises as :meth:`start` does."""
        self._check_free(job, capsule)
        if self._fleet.hosts[capsule.host].gpus:  # else the swap asks the host, which knows more
            self._seat(gpu)
        number = self._fleet.journal.next_migration()
        swap = GpuSwap(self, number, job, capsule, gpu.gpu, gpu.leave, reason, by, self._changed)
        swap.verify = verify
        self._begin(swap, "as asked")
        return swap

    def _begin(self, move: Migration, why: str) -> None:
        journal, (source, destination) = self._fleet.journal, move.way
        words = f"{move.name} begins: {source} → {destination} ({why}): {move.reason}"
        with journal.together():
            journal.save_migration(move.number, move.row())
            journal.tell(move.capsule.name, "move", words, move.by, move.number)
        move.capsule.migration = move.name
        self._fleet.moves[move.name] = move
        if isinstance(move, HostMigration):
            self._tasks.spawn(self._costing.begin(move))
        self._tasks.spawn(self._follow(move, move.run()))

    async def _take_up_once_up(self, move: Migration) -> None:
        """Wait until both hosts are up, at most twice ``timeouts.suspicion``, then take the move
        up: a question to a host that has not reported yet would fail."""
        until = time.monotonic() + 2 * self.cluster.timeouts.suspicion
        while not all(map(self._fleet.is_up, (move.source, move.destination))):
            if time.monotonic() > until:
                break
            await asyncio.sleep(self.cluster.timeouts.heartbeat / 10)
        await move.take_up()

    def take_up(self) -> None:
        """Continue the migrations that an earlier orchestrator has left under way."""
        ends = [step.value for step in ENDS]
        for number, row in self._fleet.journal.migrations_not_in(ends):
            found = self._fleet.find(row.capsule)
            if found is None:
                words = f"the job of {row.capsule} ended while no orchestrator ran"
                over = msgspec.structs.replace(
                    row, state=MigrationStep.JOB_ENDED.value, error=words
                )
                self._fleet.journal.save_migration(number, over)
                continue
            move = self._left_behind(*found, row)
            move.capsule.migration = move.name
            self._fleet.moves[move.name] = move
            self.tell(move, f"the orchestrator was restarted while it was {move.step.value}")
            self._tasks.spawn(self._follow(move, self._take_up_once_up(move)))

    def _left_behind(self, job: Job, capsule: Capsule, row: MigrationRow) -> Migration:
        if row.kind == GpuSwap.kind:
            return GpuSwap.left_behind(self, job, capsule, row, self._changed)
        if capsule.host not in (row.source, row.destination):  # just passed on to another spare
            row = msgspec.structs.replace(row, destination=capsule.host)
        if capsule.host == row.destination and row.state in UNCOMMITTED:
            # The move was committed, but the orchestrator ended before it wrote that step.
            row = msgspec.structs.replace(row, state=MigrationStep.COMMITTED.value)
        return HostMigration.left_behind(self, job, capsule, row, self._changed)

    async def plan(
        self,
        job: Job,
        capsule: Capsule,
        to: str,
        gpu: GpuAsked | None = None,
        way: str = "",
        within: float | None = None,
        watch: bool = True,
    ) -> messages.Planned:
        """Say what a move would do and find; changes nothing. Raises the errors of a real move.

        ``watch``: the source watches for some seconds how much memory the capsule writes."""
        destination, why = self._destination(job, capsule, to)
        to_gpu = self._seat(gpu)
        limit = self.cluster.timeouts.prepare
        look = await self.ask(capsule.host, messages.Inspect(capsule.name, watch), limit)
        assert isinstance(look, messages.Inspected)

        async def ask(look: messages.Inspected) -> messages.Reserved:
            reserve = messages.Reserve(
                "plan",
                job.spec(capsule, self.cluster),
                look.survey,
                look.facts,
                capsule.host,
                capsule.epoch + 1,
                job.book(),
                limit_bytes(look),
                dry_run=True,
                gpu=look.gpu,
                gpus_wanted=[(left(capsule.name, look.gpu, gpu.leave), to_gpu)] if gpu else [],
                full_dump=look.full_dump,
            )
            reserved = await self.ask(destination, reserve, limit)
            assert isinstance(reserved, messages.Reserved)
            return reserved

        async def again() -> messages.Inspected:
            seen = await self.ask(capsule.host, messages.Inspect(capsule.name), limit)
            assert isinstance(seen, messages.Inspected)
            return seen

        look, reserved = await second_look.reserve(look, ask, again)
        checks = [("destination", f"{destination}, {why}"), *reserved.checks]
        if breaks := what_breaks(look.outside):
            checks.append(("warning", breaks))
        if capsule.failed:
            checks.append(("warning", capsule.failed))
        return messages.Planned(
            capsule.name,
            capsule.host,
            destination,
            checks,
            expected_bytes(look),
            look.carried_bytes,
            self.predict(capsule, destination, look, reserved, way, within),
        )

    async def plan_swap(self, job: Job, capsule: Capsule, gpu: GpuAsked) -> messages.Planned:
        """Say what a swap to another GPU of the same host would do and find; changes nothing."""
        self._check_free(job, capsule)
        look = messages.LookAtGpus(capsule.name, gpu.gpu, gpu.leave)
        found = await self.ask(capsule.host, look, self.cluster.timeouts.prepare)
        assert isinstance(found, messages.SwapPlan)
        return messages.Planned(capsule.name, *way_of(capsule.host, found), found.checks, 0, 0)

    # ---- Ground: what a move needs of the orchestrator -----------------------------------------

    async def ask(self, host: str, message: Message, timeout: float) -> Message | None:
        """Ask a host. Raises Unreachable as soon as the host is no longer up, or at the timeout."""
        answer = asyncio.ensure_future(self._switchboard.ask(host, message, timeout))
        while not (await asyncio.wait({answer}, timeout=LIVENESS_LOOK_S))[0]:
            if not self._fleet.is_up(host):
                answer.cancel()
                raise Unreachable(f"{host} fell silent during {request_to(message)}")
        return answer.result()

    def commit(self, capsule: Capsule, host: str, *, still: bool) -> None:
        if not may_pass(capsule.owner, still):
            raise Refused(f"{capsule.name} may run on {capsule.host}: it cannot pass to {host}")
        if capsule.code is not None:
            raise Refused(f"{capsule.name} has ended with code {capsule.code}")
        epoch = capsule.epoch + 1
        self._fleet.journal.commit(capsule.name, host, epoch)
        capsule.host, capsule.epoch, capsule.granted = host, epoch, False

    def predict(
        self,
        capsule: Capsule,
        to: str,
        look: messages.Inspected,
        reserved: messages.Reserved,
        way: str = "",
        within: float | None = None,
    ) -> messages.Prediction:
        load = Load.of(look, look.full_dump or reserved.full_dump)
        rows = self._fleet.journal.migrations_in(MigrationStep.DONE.value, LESSONS)
        job = capsule.name.partition("/")[0]
        lessons = learn(rows, load.way, job)
        rate = rate_between(rows, capsule.host, to)
        found = predict(load, lessons, rate)
        learnt = cost.learn(rows, job, frozenset({capsule.host, to}))
        timeouts = self._fleet.capsule(capsule.name)[0].timeouts(self.cluster)
        return costed(
            found,
            look,
            reserved,
            rate or self._link(capsule.host, to),
            lessons,
            learnt,
            self.cluster.precopy,
            timeouts,
            way,
            within,
        )

    def _link(self, source: str, destination: str) -> float | None:
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

    def tell(self, move: Migration, text: str) -> None:
        log.warning("%s: %s", move.name, text)
        self._fleet.journal.note(move.capsule.name, "moving", text, move.by, move.number)

    async def quiesce(self, move: Migration) -> str:
        boundary = await self._gates.close(
            move.job, move.job.timeouts(self.cluster), shared=bool(self._others_at_gates(move))
        )
        asyncio.get_running_loop().call_later(  # the job is paused: do not wait for the disk
            SOON_S,
            self._fleet.journal.note,
            move.capsule.name,
            "boundary",
            boundary.words,
            move.by,
            move.number,
        )
        return boundary.words

    async def reopen(self, move: Migration) -> str:
        if self._others_at_gates(move):
            return "another move of the job holds them still"
        job, said = move.job, ""
        while job.state != "ended":
            try:
                return await self._gates.open(job, job.timeouts(self.cluster))
            except Exception as error:  # try again: the job needs its communicators to go on
                if said != str(error):
                    said = str(error)
                    self.tell(move, f"the gates of {job.name} are not open yet: {error}")
                if any(capsule.code is not None for capsule in job.capsules.values()):
                    break  # a rank is missing for good
                await asyncio.sleep(self.cluster.timeouts.heartbeat)
        self._gates.forget(job.name)
        return "the job has ended"

    def _others_at_gates(self, move: Migration) -> list[Migration]:
        """List the other moves of the same job that hold its ranks at a boundary."""
        under_way = self._fleet.under_way()
        return [m for m in under_way if m is not move and m.job is move.job and m.holds_gates]

    async def publish(self, job: Job) -> None:
        """Send the job's address book to every host; a host that is away gets it after its Hello.

        Returns once the job's own hosts have answered. The other hosts have no capsule that talks
        to the job; they get the book a few at a time, so that heartbeats are not delayed.
        """
        book, up = messages.Locate(job.book()), self._fleet.up()
        for host in self._fleet.hosts.keys() - set(up):
            self._fleet.hosts[host].told = False
        own = {capsule.host for capsule in job.capsules.values()}
        self._tasks.spawn(self._publish_to([name for name in up if name not in own], book))
        await self._locate([name for name in up if name in own], book)

    async def _publish_to(self, hosts: list[str], book: messages.Locate) -> None:
        async with self._publishing:
            for first in range(0, len(hosts), PUBLISH_AT_ONCE):
                await self._locate(hosts[first : first + PUBLISH_AT_ONCE], book)

    async def _locate(self, hosts: list[str], book: messages.Locate) -> None:
        limit = self.cluster.timeouts.suspicion  # a silent host counts as up for this long
        asks = (self._switchboard.ask(host, book, limit) for host in hosts)
        done = await asyncio.gather(*asks, return_exceptions=True)
        for host, result in zip(hosts, done, strict=True):
            if isinstance(result, BaseException):
                self._fleet.hosts[host].told = False
                log.warning("address book of %s at %s: %s", book.book.job, host, result)

    def another_spare(self, move: HostMigration) -> str:
        views = [v for v in self._fleet.views() if v.name not in move.tried]
        need = self._fleet.gpu_need(move.capsule, move.source)
        return choose_destination(views, move.capsule.name, move.source, "", gpus=need)[0].name

    # ---- what agents ask -----------------------------------------------------------------------

    def rule(self, host: str, claim: messages.Claim) -> messages.Ruled:
        """Answer a claim: say what becomes of the host's copy. A grant is durable before that."""
        found = self._fleet.find(claim.capsule)
        if found is None:
            return self._rule_forgotten(host, claim)
        capsule = found[1]
        move = self._fleet.moves.get(claim.migration)
        step = move.step if move else self._ended_as(claim.migration)
        side = Side(claim.side)
        ruling = rule(side, host, claim.epoch, capsule.owner, step)
        if capsule.code is not None:
            ruling = Ruling.END
        if ruling is Ruling.RUN and not claim.ready:
            ruling = Ruling.WAIT
        leaves = move if ruling is Ruling.RUN and side is Side.LEAVING else None
        if leaves is not None and leaves.number in self._not_saved:
            # Write the step first: else a restarted orchestrator might still commit this move.
            self._save(leaves)
        if ruling is Ruling.RUN and not capsule.granted:
            self._fleet.journal.grant(capsule.name, host, capsule.epoch)
            capsule.granted = True
        if isinstance(leaves, HostMigration):
            leaves.released = True
        log.log(
            logging.DEBUG if ruling is Ruling.WAIT else logging.INFO,
            "%s: %s on %s, %s under epoch %d: %s",
            claim.migration,
            claim.capsule,
            host,
            side.value,
            claim.epoch,
            ruling.value,
        )
        return messages.Ruled(ruling.value, capsule.epoch)

    def _ended_as(self, migration: str) -> MigrationStep | None:
        number = migration.removeprefix("m")
        row = self._fleet.journal.migration(int(number)) if number.isdigit() else None
        return MigrationStep(row.state) if row else None

    def _rule_forgotten(self, host: str, claim: messages.Claim) -> messages.Ruled:
        """Answer a claim for a capsule that the journal does not have. A forgotten job's copy must
        end. A copy of a job that was never known waits: perhaps the journal is wrong."""
        last = self._fleet.journal.last_epoch(claim.capsule.partition("/")[0])
        if claim.epoch <= last:
            return messages.Ruled(Ruling.END.value, last)
        log.error("%s holds %s, which this journal does not know", host, claim.capsule)
        return messages.Ruled(Ruling.WAIT.value, 0)

    def progressed(self, host: str, word: messages.Progressed) -> None:
        """Take a source's report how far its pre-copy is; a late report changes nothing."""
        move = self._fleet.moves.get(word.migration)
        if isinstance(move, HostMigration) and move.source == host:
            move.progressed(word)

    # ---- one move ------------------------------------------------------------------------------

    def _destination(self, job: Job, capsule: Capsule, to: str) -> tuple[str, str]:
        self._check_free(job, capsule)
        chosen, why = choose_destination(
            self._fleet.views(),
            capsule.name,
            capsule.host,
            to,
            avoid=self._failed_at(capsule),
            gpus=self._fleet.gpu_need(capsule, capsule.host),
        )
        return chosen.name, why

    def _seat(self, gpu: GpuAsked | None) -> str:
        """Return the UUID of the requested GPU from its host's beats; "" if none was requested."""
        return seat(gpu.gpu, gpu.host, self._fleet.hosts[gpu.host].gpus) if gpu else ""

    def _check_free(self, job: Job, capsule: Capsule) -> None:
        """Raise unless the capsule runs, its host is up, and no migration moves it."""
        if capsule.migration:
            raise Refused(
                f"{capsule.name} is moving already ({capsule.migration})",
                hint=f"`liveshift events {capsule.migration}` shows how it goes",
            )
        if capsule.code is not None or job.state == "ended":
            raise Refused(f"{capsule.name} has ended with code {capsule.code}")
        if job.state == "ending":
            raise Refused(f"{job.name} is being ended: nothing of it is moved any more")
        if not self._fleet.is_up(capsule.host):
            raise Unreachable(
                f"the agent on {capsule.host}, where {capsule.name} runs, does not answer",
                hint=f"start it there: liveshift agent --config FILE --host {capsule.host}",
            )

    def _failed_at(self, capsule: Capsule) -> set[str]:
        """Return the destinations of this capsule's failed moves; other hosts are tried first."""
        return {
            host
            for move in self._fleet.moves.values()
            if isinstance(move, HostMigration)
            and move.capsule is capsule
            and move.step is MigrationStep.FAILED
            for host in {*move.tried, move.destination}
        }

    async def _follow(self, move: Migration, work: Awaitable[None]) -> None:
        await work
        self._fleet.forget_moves(KEEP_MOVES)
        if isinstance(move, HostMigration):
            self._tasks.spawn(self._costing.end(move))
        await self._over(move)

    def _measured(self, move: HostMigration, words: str) -> None:
        """Save the cost of a move, or why it is not known, some seconds after the move's end."""
        self._save_at_last(move)
        if words:
            self._fleet.journal.note(move.capsule.name, "cost", words, move.by, move.number)

    def _changed(self, move: Migration) -> None:
        if isinstance(move, HostMigration) and move.step in UNHURRIED:
            if move.number not in self._unsaved:
                loop = asyncio.get_running_loop()
                self._unsaved[move.number] = loop.call_later(SOON_S, self._save_at_last, move)
            return
        self._save_at_last(move)
        if move.step in ENDS:
            move.capsule.migration = None
            _remember(move)
            self._tell_end(move)

    def _save(self, move: Migration) -> None:
        if (waiting := self._unsaved.pop(move.number, None)) is not None:
            waiting.cancel()
        self._not_saved.add(move.number)
        self._fleet.journal.save_migration(move.number, move.row())
        self._not_saved.discard(move.number)

    def _save_at_last(self, move: Migration) -> None:
        """Save the move; while the journal cannot be written, try again every SAVE_AGAIN_S."""
        try:
            self._save(move)
        except JournalTrouble as error:
            log.error("%s is %s: %s", move.name, move.step.value, error)
            loop = asyncio.get_running_loop()
            self._unsaved[move.number] = loop.call_later(SAVE_AGAIN_S, self._save_at_last, move)

    def _tell_end(self, move: Migration) -> None:
        row = move.row()
        way = f"{row.source} → {row.destination}"
        if move.step is MigrationStep.DONE:
            kind, text = "moved", f"moved {way}: paused {units.pause(row.frozen_s)}"
            if row.predicted is not None:
                text += f" (predicted {units.pause(row.predicted.seconds)})"
            if isinstance(move, HostMigration):
                ahead = f"{units.size(row.precopy.bytes)} running, " if row.precopy else ""
                text += f"; copied {ahead}{units.size(row.image_bytes)} paused"
        elif move.step is MigrationStep.JOB_ENDED:
            kind, text = "not moved", f"{row.error}"
        else:
            kind, text = "not moved", f"did not move {way}, {move.step.value}: {row.error}"
        self._fleet.journal.note(move.capsule.name, kind, text, move.by, move.number)


def _remember(move: Migration) -> None:
    """Remember a failed dump or restore: plans show it as a warning until the capsule has moved."""
    if move.step is MigrationStep.DONE:
        move.capsule.failed = ""
    elif isinstance(move.error, StepFailed) and move.error.step in ("dump", "restore"):
        move.capsule.failed = f"its last move from here, {move.name}, failed: {move.error}"
