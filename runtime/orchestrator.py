# SPDX-License-Identifier: Apache-2.0
"""The orchestrator: the one brain of a cluster. Jobs, hosts, taints, migrations, the journal.

Agents reach it over the switchboard (link.py), people over the local socket or relayed by an
agent; who asks is a uid that the kernel vouches for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pwd
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from ..criu_glue.network import Overlay
from ..errors import LiveshiftError, NotFound, NotPermitted, Refused, Unreachable
from . import local_socket, messages, notify
from .config import Cluster
from .evacuation import Evacuation
from .jobs import Capsule, Job, check_request, overlay_for
from .journal import Journal
from .link import Switchboard
from .messages import Message
from .migration import Move
from .spares import HostView, choose_destination, place_job
from .status import status
from .steps import ENDS, Step

log = logging.getLogger("liveshift.orchestrator")

OUTPUT_RETRY_S = 0.05

KEEP_ENDED = 20
"""Ended jobs whose output stays readable; older ones are taken away."""


@dataclass
class HostState:
    """What the orchestrator knows of a host; ``heard`` is monotonic, 0 for never."""

    name: str
    heard: float = 0.0
    memory_free: int = 0


class Orchestrator:
    """One cluster's brain; :meth:`run` serves until cancelled."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.journal = Journal(cluster.paths.state / "journal.sqlite")
        self.hosts = {host.name: HostState(host.name) for host in cluster.hosts}
        self.taints = self.journal.taints()
        self.jobs = self._load_jobs()
        self.moves: dict[str, Move] = {}
        self.evacuation = Evacuation(self)
        self.switchboard = Switchboard(
            str(cluster.orchestrator), cluster.paths.keys, self._from_agent
        )
        self._tasks: set[asyncio.Task[Any]] = set()
        self._serve_person: dict[type[Message], Callable[..., Awaitable[Message | None]]] = {
            messages.Run: self._run_job,
            messages.GetStatus: self._get_status,
            messages.SetTaint: self._set_taint,
            messages.Untaint: self._untaint,
            messages.Migrate: self._migrate,
            messages.GetMigration: self._get_migration,
            messages.ReadOutput: self._read_output,
            messages.SignalJob: self._signal_job,
            messages.GetEvents: self._get_events,
        }

    async def run(self) -> None:
        path = self.cluster.paths.run / "orchestrator.sock"
        await local_socket.serve(path, self._from_person)
        notify.ready()
        await asyncio.gather(self.switchboard.serve(), self.evacuation.run())

    # ---- what a move and the evacuation stand on -----------------------------------------------

    async def ask(self, host: str, message: Message, timeout: float) -> Message | None:
        return await self.switchboard.ask(host, message, timeout)

    def commit(self, capsule: Capsule, host: str, epoch: int) -> None:
        self.journal.commit(capsule.name, host, epoch)
        capsule.host, capsule.epoch = host, epoch

    async def publish(self, job: Job) -> None:
        """Every host hears where the job's addresses are; one that is away hears it on Hello."""
        book = messages.Locate(job.book())
        limit = self.cluster.timeouts.suspicion
        names = [name for name in self.hosts if self.is_up(name)]
        done = await asyncio.gather(
            *(self.ask(name, book, limit) for name in names), return_exceptions=True
        )
        for name, result in zip(names, done, strict=True):
            if isinstance(result, BaseException):
                log.warning("address book of %s at %s: %s", job.name, name, result)

    def is_up(self, host: str) -> bool:
        heard = self.hosts[host].heard
        return bool(heard) and time.monotonic() - heard < self.cluster.timeouts.suspicion

    def host_views(self) -> list[HostView]:
        used = dict.fromkeys(self.hosts, 0)
        for job in self.jobs.values():
            for capsule in job.capsules.values():
                if capsule.code is None and job.state != "ended":
                    used[capsule.host] += 1
        for move in self.moves.values():
            if move.step not in ENDS:  # until it ends it takes a slot on both sides
                there = move.destination if move.capsule.host == move.source else move.source
                used[there] += 1
        return [
            HostView(h.name, h.spare.value, h.slots, used[h.name], self.is_up(h.name),
                     h.name in self.taints)
            for h in self.cluster.hosts
        ]  # fmt: skip

    def start_move(self, job: Job, capsule: Capsule, to: str, reason: str, by: str) -> Move:
        """Begin to move a capsule; raises Refused or NotFound with nothing begun."""
        destination, why = self._destination(job, capsule, to)
        number = self.journal.next_migration()
        move = Move(self, number, job, capsule, destination, reason, by, self._move_changed)
        capsule.migration = move.name
        self.moves[move.name] = move
        self.journal.save_migration(number, move.row())
        self.journal.tell(
            capsule.name, "move", f"{capsule.host} → {destination} begins ({why}): {reason}", by
        )
        self._spawn(self._follow(move))
        return move

    def _destination(self, job: Job, capsule: Capsule, to: str) -> tuple[str, str]:
        if capsule.migration:
            raise Refused(
                f"{capsule.name} is moving already ({capsule.migration})",
                hint=f"`liveshift events {capsule.migration}` shows how it goes",
            )
        if capsule.code is not None or job.state == "ended":
            raise Refused(f"{capsule.name} has ended with code {capsule.code}")
        if not self.is_up(capsule.host):
            raise Unreachable(
                f"the agent on {capsule.host}, where {capsule.name} runs, does not answer",
                hint=f"start it there: liveshift agent --config FILE --host {capsule.host}",
            )
        chosen, why = choose_destination(self.host_views(), capsule.name, capsule.host, to)
        return chosen.name, why

    async def _follow(self, move: Move) -> None:
        await move.run()
        move.capsule.migration = None
        row = move.row()
        if move.step is Step.DONE:
            text = (
                f"{move.source} → {move.destination}: stood still {row.frozen_s:.2f} s, "
                f"image {row.image_bytes / 1e6:.0f} MB"
            )
        else:
            text = f"{move.source} → {move.destination} {move.step.value}: {row.error}"
        self.journal.tell(
            move.capsule.name, "moved" if move.step is Step.DONE else "not moved", text, move.by,
            move.number,
        )  # fmt: skip
        if move.step is Step.LOST:
            await self._capsule_ended(move.job, move.capsule, 137)
        self.evacuation.wake()

    def _move_changed(self, move: Move) -> None:
        self.journal.save_migration(move.number, move.row())

    # ---- agents --------------------------------------------------------------------------------

    async def _from_agent(self, host: str, ask: Message) -> Message | None:
        state = self.hosts.get(host)
        if state is None:
            raise NotPermitted(f"{host} is not in this cluster's file")
        state.heard = time.monotonic()
        if isinstance(ask, messages.Beat):
            state.memory_free = ask.memory_free
            for seen in ask.capsules:
                if (found := self._find(seen.name)) and found[1].epoch == seen.epoch:
                    found[1].seen = seen
            return None
        if isinstance(ask, messages.Hello):
            if ask.digest != self.cluster.digest:
                log.warning("%s runs with another cluster file than the orchestrator", host)
            self.evacuation.wake()
            return messages.Books([j.book() for j in self.jobs.values() if j.state != "ended"])
        if isinstance(ask, messages.Ended):
            found = self._find(ask.capsule)
            if found and found[1].epoch == ask.epoch and found[1].host == host:
                await self._capsule_ended(*found, ask.code)
            return None
        if isinstance(ask, messages.Relay):
            request = messages.decode(ask.request).body
            if request is None:
                raise LiveshiftError("an agent relayed something that is no ask")
            return await self._from_person(ask.uid, request)
        raise LiveshiftError(f"the orchestrator does not serve {type(ask).__name__} to agents")

    async def _capsule_ended(self, job: Job, capsule: Capsule, code: int) -> None:
        if capsule.code is not None:
            return
        capsule.code = code
        self.journal.set_ended(capsule.name, code)
        self.journal.tell(capsule.name, "ended", f"ended on {capsule.host} with code {code}")
        if code != 0 and job.code is None:
            job.code = code  # the first failure is the job's, as torchrun and srun have it
        if all(c.code is not None for c in job.capsules.values()):
            job.state, job.code = "ended", job.code or 0
            self.journal.set_job(job.name, job.state, job.code)
            self.journal.tell(job.name, "ended", f"ended with code {job.code}")
            self._spawn(self._forget_old())
        elif code != 0 and job.state == "running":
            job.state = "ending"
            self._spawn(self._end_rest(job))
        self.evacuation.wake()

    async def _end_rest(self, job: Job) -> None:
        """One capsule failed: the others get a while to notice, then SIGTERM, then SIGKILL."""
        grace = self.cluster.timeouts.grace
        await asyncio.sleep(grace)
        await self._signal_all(job, signal.SIGTERM)
        await asyncio.sleep(grace)
        await self._signal_all(job, signal.SIGKILL)

    async def _signal_all(self, job: Job, signum: int) -> None:
        for capsule in job.capsules.values():
            if capsule.code is None:
                message: Message = (
                    messages.End(capsule.name)
                    if signum == signal.SIGKILL
                    else messages.Signal(capsule.name, signum)
                )
                with contextlib.suppress(LiveshiftError):
                    await self.ask(capsule.host, message, self.cluster.timeouts.grace)

    # ---- people --------------------------------------------------------------------------------

    async def _from_person(self, uid: int, ask: Message) -> Message | None:
        serve = self._serve_person.get(type(ask))
        if serve is None:
            raise NotPermitted(f"{type(ask).__name__} is not for the command line")
        return await serve(uid, ask)

    async def _run_job(self, uid: int, ask: messages.Run) -> messages.Named:
        name = check_request(ask, {n for n, j in self.jobs.items() if j.state != "ended"})
        if uid != 0 and not _may_use_groups(uid, ask):
            raise NotPermitted(f"uid {uid} is not in the groups it asks for")
        await self._forget(name)
        overlay = overlay_for(self.cluster, {j.overlay.vni for j in self.jobs.values()})
        hosts = place_job(self.host_views(), ask.nnodes)
        capsules = {
            f"{name}/{i}": Capsule(f"{name}/{i}", i, host, 1) for i, host in enumerate(hosts)
        }
        spec = msgspec.msgpack.encode({"uid": uid, "run": msgspec.to_builtins(ask)})
        owners = {c.name: (c.index, c.host) for c in capsules.values()}
        started = self.journal.add_job(name, overlay.vni, overlay.subnet, spec, owners)
        job = self.jobs[name] = Job(name, overlay, ask, uid, started, capsules)
        self.journal.tell(
            name, "started", f"on {', '.join(hosts)}: {' '.join(ask.argv)}", _who(uid)
        )
        try:
            await self.publish(job)
            await asyncio.gather(
                *(
                    self.ask(c.host, messages.Start(job.spec(c, self.cluster), job.book(), 1), 60)
                    for c in capsules.values()
                )
            )
        except LiveshiftError as error:
            self.journal.tell(name, "ended", f"could not start: {error}")
            await self._forget(name, even_running=True)
            raise
        return messages.Named(name)

    async def _forget(self, name: str, even_running: bool = False) -> None:
        """Take away what an ended job of that name left, so that the name can be used anew."""
        job = self.jobs.get(name)
        if job is None or (job.state != "ended" and not even_running):
            return
        del self.jobs[name]
        self.journal.remove_job(name)
        for host in self.hosts:
            if self.is_up(host):
                with contextlib.suppress(LiveshiftError):
                    await self.ask(host, messages.Forget(name), self.cluster.timeouts.prepare)

    async def _forget_old(self) -> None:
        ended = [name for name, job in self.jobs.items() if job.state == "ended"]
        for name in ended[:-KEEP_ENDED]:
            await self._forget(name)

    async def _get_status(self, _uid: int, _ask: messages.GetStatus) -> messages.Status:
        return status(self)

    async def _set_taint(self, uid: int, ask: messages.SetTaint) -> None:
        _only_root(uid, "taint a host")
        self.cluster.host(ask.host)
        self.taints[ask.host] = (ask.reason, _who(uid))
        self.journal.set_taint(ask.host, ask.reason, _who(uid))
        self.journal.tell(ask.host, "tainted", ask.reason, _who(uid))
        self.evacuation.retry(ask.host)

    async def _untaint(self, uid: int, ask: messages.Untaint) -> None:
        _only_root(uid, "untaint a host")
        self.cluster.host(ask.host)
        if ask.host not in self.taints:
            raise Refused(f"{ask.host} is not tainted")
        del self.taints[ask.host]
        self.journal.clear_taint(ask.host)
        self.journal.tell(ask.host, "untainted", "work may come back", _who(uid))
        self.evacuation.wake()

    async def _migrate(self, uid: int, ask: messages.Migrate) -> Message:
        job, capsule = self._known(ask.capsule)
        _owner_or_root(uid, job, "migrate it")
        if ask.dry_run:
            return await self._plan(job, capsule, ask.to)
        reason = ask.reason or "asked for"
        return messages.Named(self.start_move(job, capsule, ask.to, reason, _who(uid)).name)

    async def _plan(self, job: Job, capsule: Capsule, to: str) -> messages.Planned:
        """What a move would do and find; nothing is changed."""
        destination, why = self._destination(job, capsule, to)
        limit = self.cluster.timeouts.prepare
        look = await self.ask(capsule.host, messages.Inspect(capsule.name), limit)
        assert isinstance(look, messages.Inspected)
        reserve = messages.Reserve(
            "plan", job.spec(capsule, self.cluster), look.survey, look.facts, capsule.host,
            capsule.epoch + 1, job.book(), dry_run=True,
        )  # fmt: skip
        reserved = await self.ask(destination, reserve, limit)
        assert isinstance(reserved, messages.Reserved)
        checks = [("destination", f"{destination}, {why}"), *reserved.checks]
        size = look.survey.resident + look.survey.shared_memory
        return messages.Planned(
            capsule.name, capsule.host, destination, checks, size, look.carried_bytes
        )

    async def _get_migration(self, _uid: int, ask: messages.GetMigration) -> messages.Migration:
        move = self.moves.get(ask.name)
        if move is None:
            number = ask.name.removeprefix("m")
            row = self.journal.migration(int(number)) if number.isdigit() else None
            if row is None:
                raise NotFound(f'no migration "{ask.name}"', hint="`liveshift events` lists them")
            return messages.Migration(row)
        if move.step is Step.FREEZING or move.step is Step.PRECOPYING:
            with contextlib.suppress(LiveshiftError):
                seen = await self.ask(move.destination, messages.Progress(move.name), 2)
                if isinstance(seen, messages.Moved):
                    move.bytes = seen.bytes
        return messages.Migration(move.row())

    async def _read_output(self, uid: int, ask: messages.ReadOutput) -> messages.Output:
        """From the capsule's owner; across a move the offset stays good, so ask again there."""
        job, capsule = self._known(ask.capsule)
        _owner_or_root(uid, job, "read its output")
        until = time.monotonic() + ask.wait
        while True:
            host = capsule.host
            left = max(0.0, until - time.monotonic())
            try:
                request = messages.ReadOutput(ask.capsule, ask.offset, left)
                answer = await self.ask(host, request, left + 10)
                assert isinstance(answer, messages.Output)
                return answer
            except LiveshiftError:
                if time.monotonic() > until and capsule.host == host and not capsule.migration:
                    raise
            await asyncio.sleep(OUTPUT_RETRY_S)

    async def _signal_job(self, uid: int, ask: messages.SignalJob) -> None:
        job = self._job(ask.job)
        _owner_or_root(uid, job, "signal it")
        self.journal.tell(job.name, "signal", signal.Signals(ask.signum).name, _who(uid))
        await self._signal_all(job, ask.signum)
        if ask.signum == signal.SIGTERM and job.state == "running":
            job.state = "ending"
            self._spawn(self._kill_later(job))

    async def _kill_later(self, job: Job) -> None:
        await asyncio.sleep(self.cluster.timeouts.grace)
        await self._signal_all(job, signal.SIGKILL)

    async def _get_events(self, _uid: int, ask: messages.GetEvents) -> messages.Events:
        subject = ask.subject
        if subject.startswith("m") and subject[1:].isdigit() and subject not in self.jobs:
            row = (await self._get_migration(0, messages.GetMigration(subject))).row
            every = self.journal.events(row.capsule, ask.after)
            return messages.Events(
                [e for e in every if e.migration and e.migration.name == subject]
            )
        events = self.journal.events(subject, ask.after)
        if not events and not ask.after and subject not in {"", *self.hosts, *self.jobs}:
            raise NotFound(f'nothing is known of "{subject}"', hint="`liveshift events` shows all")
        return messages.Events(events)

    # ---- finding things ------------------------------------------------------------------------

    def _find(self, capsule: str) -> tuple[Job, Capsule] | None:
        job = self.jobs.get(capsule.partition("/")[0])
        found = job.capsules.get(capsule) if job else None
        return (job, found) if job and found else None

    def _job(self, name: str) -> Job:
        if name not in self.jobs:
            known = ", ".join(self.jobs) or "none"
            raise NotFound(f'no job "{name}"', hint=f"known jobs: {known}")
        return self.jobs[name]

    def _known(self, capsule: str) -> tuple[Job, Capsule]:
        job = self._job(capsule.partition("/")[0])
        if capsule == job.name and len(job.capsules) == 1:
            capsule = f"{job.name}/0"
        if capsule not in job.capsules:
            raise NotFound(
                f'job {job.name} has no capsule "{capsule}"',
                hint=f"its capsules are: {', '.join(job.capsules)}",
            )
        return job, job.capsules[capsule]

    def _load_jobs(self) -> dict[str, Job]:
        jobs: dict[str, Job] = {}
        for name, vni, subnet, spec, started, state, code in self.journal.jobs():
            raw = msgspec.msgpack.decode(spec)
            request = msgspec.convert(raw["run"], messages.Run)
            capsules = {
                capsule: Capsule(capsule, index, host, epoch, ended)
                for capsule, _, index, host, epoch, ended in self.journal.capsules(name)
            }
            jobs[name] = Job(
                name, Overlay(vni, subnet), request, raw["uid"], started, capsules, state, code
            )
        return jobs

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def serve(cluster: Cluster) -> None:
    """Run the orchestrator until cancelled; raises LiveshiftError when it cannot start."""
    await Orchestrator(cluster).run()


def _who(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _only_root(uid: int, what: str) -> None:
    if uid != 0:
        raise NotPermitted(f"{_who(uid)} may not {what}", hint="ask an operator, or use sudo")


def _owner_or_root(uid: int, job: Job, what: str) -> None:
    if uid not in (0, job.uid):
        raise NotPermitted(f"{job.name} is {_who(job.uid)}'s: {_who(uid)} may not {what}")


def _may_use_groups(uid: int, ask: messages.Run) -> bool:
    """Groups a caller names for the job must be its own: the kernel vouches for the uid only."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return False
    own = {entry.pw_gid, *os.getgrouplist(entry.pw_name, entry.pw_gid)}
    return {ask.gid, *ask.groups} <= own
