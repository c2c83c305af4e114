# SPDX-License-Identifier: Apache-2.0
"""The desk: what people may ask of the orchestrator, and who may ask for what.

The uid comes from the kernel (local_socket.py), on this machine or on the agent's that relayed
the ask. Everyone may look; a job's owner may run, move, signal and read it; hosts are root's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import signal
import time
from collections.abc import Awaitable, Callable

import msgspec

from ..errors import LiveshiftError, NotFound, NotPermitted, Refused
from . import messages
from .endings import Endings
from .evacuation import Evacuation
from .fleet import Fleet
from .jobs import Capsule, Job, check_request, overlay_for
from .messages import Message
from .moves import Moves
from .spares import place_job
from .status import status
from .steps import Step

START_S = 60.0
OUTPUT_RETRY_S = 0.05


class Desk:
    """Serves the command line's asks."""

    def __init__(
        self, fleet: Fleet, moves: Moves, endings: Endings, evacuation: Evacuation
    ) -> None:
        self._fleet = fleet
        self._moves = moves
        self._endings = endings
        self._evacuation = evacuation
        self._serve: dict[type[Message], Callable[..., Awaitable[Message | None]]] = {
            messages.Run: self._run,
            messages.GetStatus: self._get_status,
            messages.SetTaint: self._set_taint,
            messages.Untaint: self._untaint,
            messages.Migrate: self._migrate,
            messages.GetMigration: self._get_migration,
            messages.ReadOutput: self._read_output,
            messages.SignalJob: self._signal_job,
            messages.GetEvents: self._get_events,
        }

    async def serve(self, uid: int, ask: Message) -> Message | None:
        """Answer one ask of the user ``uid``; raises what is to be told to that person."""
        serve = self._serve.get(type(ask))
        if serve is None:
            raise NotPermitted(f"{type(ask).__name__} is not for the command line")
        return await serve(uid, ask)

    # ---- jobs ----------------------------------------------------------------------------------

    async def _run(self, uid: int, ask: messages.Run) -> messages.Named:
        fleet = self._fleet
        taken = {n for n, j in fleet.jobs.items() if j.state != "ended"}
        name = check_request(ask, taken, fleet.cluster)
        if uid != 0 and not _may_use_groups(uid, ask):
            raise NotPermitted(f"uid {uid} is not in the groups it asks for")
        await self._endings.forget(name)
        if name in fleet.jobs:  # another ask was quicker meanwhile
            raise Refused(f'a job "{name}" is running already', hint="choose another --name")
        overlay = overlay_for(fleet.cluster, {j.overlay.vni for j in fleet.jobs.values()})
        hosts = place_job(fleet.views(), ask.nnodes)
        capsules = {
            f"{name}/{i}": Capsule(f"{name}/{i}", i, host, 1) for i, host in enumerate(hosts)
        }
        spec = msgspec.msgpack.encode({"uid": uid, "run": msgspec.to_builtins(ask)})
        owners = {c.name: (c.index, c.host) for c in capsules.values()}
        started, first = fleet.journal.add_job(name, overlay.vni, overlay.subnet, spec, owners)
        for capsule in capsules.values():
            capsule.epoch = first
        job = fleet.jobs[name] = Job(name, overlay, ask, uid, started, capsules)
        where, what = ", ".join(hosts), " ".join(ask.argv)
        fleet.journal.tell(name, "started", f"on {where}: {what}", _who(uid))
        try:
            await self._start(job)
        except LiveshiftError as error:
            fleet.journal.tell(name, "ended", f"could not start: {error}")
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
        # All of them first: what is taken away while another host still builds would stay there.
        for failed in (result for result in done if isinstance(result, BaseException)):
            raise failed
        for capsule in job.capsules.values():
            capsule.started = True

    async def _signal_job(self, uid: int, ask: messages.SignalJob) -> None:
        job = self._fleet.job(ask.job)
        _owner_or_root(uid, job, "signal it")
        name = signal.Signals(ask.signum).name
        self._fleet.journal.tell(job.name, "signal", name, _who(uid))
        await self._endings.signal(job, ask.signum)

    async def _read_output(self, uid: int, ask: messages.ReadOutput) -> messages.Output:
        """From the capsule's owner; across a move the offset stays good, so ask again there."""
        job, capsule = self._fleet.capsule(ask.capsule)
        _owner_or_root(uid, job, "read its output")
        until = time.monotonic() + ask.wait
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

    # ---- hosts ---------------------------------------------------------------------------------

    async def _set_taint(self, uid: int, ask: messages.SetTaint) -> None:
        _only_root(uid, "taint a host")
        self._fleet.cluster.host(ask.host)
        self._fleet.taints[ask.host] = (ask.reason, _who(uid))
        self._fleet.journal.set_taint(ask.host, ask.reason, _who(uid))
        self._fleet.journal.tell(ask.host, "tainted", ask.reason, _who(uid))
        self._evacuation.retry(ask.host)

    async def _untaint(self, uid: int, ask: messages.Untaint) -> None:
        _only_root(uid, "untaint a host")
        self._fleet.cluster.host(ask.host)
        if ask.host not in self._fleet.taints:
            raise Refused(f"{ask.host} is not tainted")
        del self._fleet.taints[ask.host]
        self._fleet.journal.clear_taint(ask.host)
        self._fleet.journal.tell(ask.host, "untainted", "work may come back", _who(uid))
        self._evacuation.wake()

    # ---- migrations ----------------------------------------------------------------------------

    async def _migrate(self, uid: int, ask: messages.Migrate) -> Message:
        job, capsule = self._fleet.capsule(ask.capsule)
        _owner_or_root(uid, job, "migrate it")
        if ask.dry_run:
            return await self._moves.plan(job, capsule, ask.to)
        move = self._moves.start(job, capsule, ask.to, ask.reason or "asked for", _who(uid))
        return messages.Named(move.name)

    async def _get_migration(self, _uid: int, ask: messages.GetMigration) -> messages.Migration:
        move = self._fleet.moves.get(ask.name)
        if move is None:
            number = ask.name.removeprefix("m")
            row = self._fleet.journal.migration(int(number)) if number.isdigit() else None
            if row is None:
                raise NotFound(f'no migration "{ask.name}"', hint="`liveshift events` lists them")
            return messages.Migration(row)
        if move.step in (Step.PRECOPYING, Step.FREEZING):
            with contextlib.suppress(LiveshiftError):
                seen = await self._moves.ask(move.destination, messages.Progress(move.name), 2)
                if isinstance(seen, messages.Arrived):
                    move.times.bytes = seen.bytes
        return messages.Migration(move.row())

    # ---- looking -------------------------------------------------------------------------------

    async def _get_status(self, _uid: int, _ask: messages.GetStatus) -> messages.Status:
        return status(self._fleet)

    async def _get_events(self, uid: int, ask: messages.GetEvents) -> messages.Events:
        subject, journal = ask.subject, self._fleet.journal
        if subject.startswith("m") and subject[1:].isdigit() and subject not in self._fleet.jobs:
            row = (await self._get_migration(uid, messages.GetMigration(subject))).row
            every = journal.events(row.capsule, ask.after)
            about = [e for e in every if e.migration and e.migration.name == subject]
            return messages.Events(about)
        events = journal.events(subject, ask.after)
        known = {"", *self._fleet.hosts, *self._fleet.jobs}
        if not events and not ask.after and subject not in known:
            raise NotFound(f'nothing is known of "{subject}"', hint="`liveshift events` shows all")
        return messages.Events(events)


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
