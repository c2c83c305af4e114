# SPDX-License-Identifier: Apache-2.0
"""A double of an agent, as far as the orchestrator can see it. For tests only.

It has its host's key, speaks the real messages over a real CURVE socket and keeps to the protocol
(it asks before it lets a copy run, and says no more than it knows), but nothing runs behind it: a
capsule is a name with an epoch, a step of a migration takes as long as :class:`Pace` says. The
real one is runtime/agent/agent.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import xxhash

from liveshift.criu_glue.survey.found import Survey
from liveshift.errors import LiveshiftError, NotFound, StepFailed, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.config.cluster import Cluster
from liveshift.runtime.control.link import Uplink
from liveshift.runtime.messages import CapsuleState, HostFacts, Message, Phase
from liveshift.runtime.model.ownership import Ruling, Side

from .cluster import agent_keys, images

IMAGE_BYTES = 250 << 20
BUSY_LOOK_S = 0.005
IMAGE_LOOK_S = 0.05
MEMORY_FREE = 64 << 30
FACTS = HostFacts(
    kernel="6.12.0",
    machine="x86_64",
    cpu="a simulated processor",
    cpu_flags=[f"flag{number}" for number in range(100)],
    criu="4.2",
    liveshift="simulated",
)
SURVEY = Survey((2, 3, 4), IMAGE_BYTES, 1 << 20, (), (), (), (), ())


@dataclass(frozen=True)
class Pace:
    """Seconds that each step takes a simulated agent."""

    inspect: float = 0.05
    reserve: float = 0.1
    precopy: float = 0.1
    freeze: float = 0.7
    restore: float = 0.5
    resume: float = 0.05

    @property
    def frozen(self) -> float:
        """How long a job is frozen at least."""
        return self.freeze + self.restore

    @property
    def move(self) -> float:
        return self.inspect + self.reserve + self.precopy + self.frozen + self.resume


@dataclass(frozen=True)
class Copy:
    """What a host holds of a migration; it does not run."""

    capsule: str
    epoch: int


@dataclass
class Tally:
    """What an agent, or a crowd of them, has seen since it was last asked; seconds."""

    round_trips: list[float] = field(default_factory=list)
    silences: int = 0
    hellos: int = 0  # that were answered
    asked: int = 0  # messages to the orchestrator that ask
    served: int = 0  # asks of the orchestrator that were answered
    claims: int = 0


class SimulatedAgent:
    """One host's double; ``tally``: where it counts."""

    def __init__(self, cluster: Cluster, host: str, pace: Pace, tally: Callable[[], Tally]) -> None:
        self.host = host
        address, keys = str(cluster.orchestrator), agent_keys(cluster)
        self.uplink = Uplink(host, address, keys, self._handle)
        self.capsules: dict[str, int] = {}  # those that run, and their epochs
        self.leaving: dict[str, Copy] = {}  # by migration: frozen here
        self.coming: dict[str, Copy] = {}  # by migration: a sandbox, and an image
        self._cluster = cluster
        self._digest = cluster.digest
        self.pace = pace
        self.may_answer = asyncio.Event()
        """While it is not set, the host answers no Inspect: migrations that are asked for one after
        the other then begin together."""
        self.may_answer.set()
        self.completes = True
        """Whether a freeze that begins now ends with a complete image. If not, it lasts until its
        destination closes the image, as a restarted orchestrator has it do."""
        self._tally = tally
        self._boot_id = uuid.uuid4().hex
        self._aims: dict[str, int] = {}  # by job: the version of its targets
        self._busy: set[str] = set()  # migrations that are being worked on here
        self._counts = itertools.count(1000)
        self._tasks: set[asyncio.Task[None]] = set()
        self._serve: dict[type[Message], Callable[..., Awaitable[Message | None]]] = {
            messages.Start: self._start,
            messages.Signal: self._signal,
            messages.End: self._end,
            messages.Forget: self._forget,
            messages.Locate: self._locate,
            messages.Inspect: self._inspect,
            messages.Reserve: self._reserve,
            messages.StartPrecopy: self._precopy,
            messages.Freeze: self._freeze,
            messages.RestoreCapsule: self._restore,
            messages.Resume: self._resume,
            messages.Settle: self._settle,
            messages.Progress: self._progress,
            messages.StartMeasure: self._start_measure,
            messages.EndMeasure: self._end_measure,
            messages.Arm: self._arm,
            messages.SetTargets: self._aimed,
            messages.Shut: self._aimed,
            messages.OpenGate: self._open_gate,
        }

    async def report(self, after: float) -> None:
        """Hello, then beats, until cancelled; like Agent._report, beginning after some seconds."""
        await asyncio.sleep(after)
        greeted = False
        while True:
            try:
                if not greeted:
                    await self._ask(self._register())
                    greeted = True
                    self._tally().hellos += 1
                began = time.monotonic()
                await self._ask(self._heartbeat())
                self._tally().round_trips.append(time.monotonic() - began)
            except LiveshiftError:
                self._tally().silences += 1
                greeted = False
            await asyncio.sleep(self._cluster.timeouts.heartbeat)

    async def _handle(self, _peer: str, ask: Message) -> Message | None:
        """Answer the orchestrator."""
        serve = self._serve.get(type(ask))
        if serve is None:
            raise LiveshiftError(f"a simulated agent does not serve {type(ask).__name__}")
        self._tally().served += 1
        return await serve(ask)

    # ---- to the orchestrator -------------------------------------------------------------------

    async def _ask(self, ask: Message) -> Message | None:
        self._tally().asked += 1
        return await self.uplink.connection.request(ask, self._cluster.timeouts.suspicion)

    def _register(self) -> messages.Register:
        held = [*self.leaving.values(), *self.coming.values()]
        epochs = {copy.capsule: copy.epoch for copy in held} | self.capsules
        return messages.Register(self.host, FACTS, epochs, self._digest, self._boot_id)

    def _heartbeat(self) -> messages.Heartbeat:
        count = next(self._counts)
        states = [
            CapsuleState(name, epoch, 3, IMAGE_BYTES, count, 12.5, [0], "python train.py")
            for name, epoch in self.capsules.items()
        ]
        return messages.Heartbeat(self.host, MEMORY_FREE, states)

    async def _claim(
        self, migration: str, side: Side, copy: Copy, ready: bool
    ) -> tuple[Ruling, int]:
        """The ruling, and the owner's epoch."""
        self._tally().claims += 1
        claim = messages.Claim(migration, copy.capsule, side.value, copy.epoch, ready)
        ruled = await self._ask(claim)
        assert isinstance(ruled, messages.Ruled)
        return Ruling(ruled.ruling), ruled.epoch

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- capsules ------------------------------------------------------------------------------

    async def _start(self, ask: messages.Start) -> None:
        self.capsules[ask.spec.name] = ask.epoch

    async def _signal(self, ask: messages.Signal) -> None:
        self._spawn(self._ended(ask.capsule, 128 + ask.signum))

    async def _end(self, ask: messages.End) -> None:
        self._spawn(self._ended(ask.capsule, 128 + signal.SIGKILL))

    async def _ended(self, capsule: str, code: int) -> None:
        epoch = self.capsules.pop(capsule, None)
        while epoch is not None:
            with contextlib.suppress(LiveshiftError):
                await self._ask(messages.CapsuleEnded(capsule, epoch, code))
                return
            await asyncio.sleep(self._cluster.timeouts.heartbeat)

    async def _forget(self, ask: messages.Forget) -> None:
        for name in [name for name in self.capsules if name.startswith(f"{ask.job}/")]:
            del self.capsules[name]

    async def _locate(self, _ask: messages.Locate) -> None:
        """Nothing is routed here."""

    # ---- the gates of a job: one communicator over all ranks, always at its target -------------

    async def _arm(self, ask: messages.Arm) -> messages.Armed:
        ranks = [
            int(name.partition("/")[2])
            for name in (*self.capsules, *(copy.capsule for copy in self.leaving.values()))
            if name.startswith(f"{ask.job}/")
        ]
        clock = xxhash.xxh3_64_intdigest(ask.job.encode())
        who = [messages.Member(clock, "gloo", "", len(ranks), rank, rank, 1) for rank in ranks]
        return messages.Armed({clock: 100}, who, len(ranks), [])

    async def _aimed(self, ask: messages.SetTargets | messages.Shut) -> messages.TargetsSet:
        if isinstance(ask, messages.SetTargets):
            self._aims[ask.job] = ask.version
        return messages.TargetsSet(self._aims[ask.job], True, {}, [])

    async def _open_gate(self, _ask: messages.OpenGate) -> messages.TornDown:
        return messages.TornDown([], 0.0)

    # ---- a migration's source ------------------------------------------------------------------

    async def _inspect(self, ask: messages.Inspect) -> messages.Inspected:
        self._running(ask.capsule)
        await self.may_answer.wait()
        await asyncio.sleep(self.pace.inspect)
        return messages.Inspected(SURVEY, FACTS, 0)

    async def _precopy(self, ask: messages.StartPrecopy) -> messages.Moved:
        self._running(ask.capsule)
        return await self._takes(self.pace.precopy, "pre-copy", 1 << 20)

    async def _freeze(self, ask: messages.Freeze) -> messages.Frozen:
        epoch = self._running(ask.capsule)
        with self._working(ask.migration):
            self.leaving[ask.migration] = Copy(ask.capsule, epoch)
            del self.capsules[ask.capsule]
            completes = self.completes
            moved = await self._takes(self.pace.freeze, "freeze", IMAGE_BYTES)
            while not completes and not self._image(ask.migration):
                await asyncio.sleep(IMAGE_LOOK_S)
        if self._image(ask.migration, "complete") != "complete":
            raise StepFailed("freeze", f"the image of {ask.capsule} is taken no more")
        return messages.Frozen(IMAGE_BYTES, moved.phases)

    # ---- a migration's destination -------------------------------------------------------------

    async def _reserve(self, ask: messages.Reserve) -> messages.Reserved:
        await asyncio.sleep(self.pace.reserve)
        if not ask.dry_run:
            self.coming[ask.migration] = Copy(ask.spec.name, ask.epoch)
        data = self._cluster.host(self.host).data
        return messages.Reserved([("simulated", "yes")], f"tcp://{data}")

    async def _start_measure(self, ask: messages.StartMeasure) -> None:
        """What is simulated makes no steps."""

    async def _end_measure(self, ask: messages.EndMeasure) -> messages.Worked:
        why = "it is simulated"
        return messages.Worked("", 0.0, None, 0.0, 0.0, 0.0, 0.0, why_not=why)

    async def _progress(self, ask: messages.Progress) -> messages.Arrived:
        if ask.migration not in self.coming:
            return messages.Arrived(0, 0, False)
        complete = self._image(ask.migration, "closed" if ask.close else "") == "complete"
        return messages.Arrived(IMAGE_BYTES, IMAGE_BYTES if complete else 0, complete)

    async def _restore(self, ask: messages.RestoreCapsule) -> messages.Moved:
        """Restore, ask, run; like DestinationHandlers.restore."""
        while ask.migration in self._busy:
            await asyncio.sleep(BUSY_LOOK_S)
        if self.capsules.get(ask.capsule) == ask.epoch and ask.migration not in self.coming:
            return messages.Moved(0, [])
        if ask.migration not in self.coming:
            raise NotFound(f"{self.host} has no image of {ask.capsule} (any more)")
        if self._image(ask.migration) != "complete":
            raise StepFailed("restore", "the image is not complete")
        with self._working(ask.migration):
            moved = await self._takes(self.pace.restore, "restore", IMAGE_BYTES)
            copy = Copy(ask.capsule, ask.epoch)
            await self._may_run(ask.migration, copy)
            self.capsules[ask.capsule] = ask.epoch
            del self.coming[ask.migration]
        return moved

    async def _may_run(self, migration: str, copy: Copy) -> None:
        """Return when it may; raises StepFailed when it may not. Like RestoreAttempt."""
        while True:
            with contextlib.suppress(Unreachable):
                ruling, _ = await self._claim(migration, Side.COMING, copy, True)
                if ruling is Ruling.RUN:
                    return
                if ruling is Ruling.END:
                    raise StepFailed("restore", f"{copy.capsule} may not run on {self.host}")
                await asyncio.sleep(self._cluster.timeouts.heartbeat)

    async def _resume(self, ask: messages.Resume) -> messages.Moved:
        self._running(ask.capsule)
        return await self._takes(self.pace.resume, "resume", 0)

    # ---- both sides: what becomes of it --------------------------------------------------------

    async def keep_asking(self) -> None:
        """Once per heartbeat, for what is held here; like Rulings.keep_claiming."""
        while True:
            await asyncio.sleep(self._cluster.timeouts.heartbeat)
            for migration in {*self.leaving, *self.coming} - self._busy:
                with contextlib.suppress(LiveshiftError):
                    await self._rule(migration)

    async def _settle(self, ask: messages.Settle) -> messages.Settled:
        while ask.migration in self._busy:
            await asyncio.sleep(BUSY_LOOK_S)
        state = await self._rule(ask.migration)
        if state == "nothing" and ask.capsule in self.capsules:
            state = "runs"
        return messages.Settled(state)

    async def _rule(self, migration: str) -> str:
        if migration in self._busy:
            return "held"
        for held, side in ((self.leaving, Side.LEAVING), (self.coming, Side.COMING)):
            if (copy := held.get(migration)) is None:
                continue
            with self._working(migration):
                ready = side is Side.LEAVING
                ruling, epoch = await self._claim(migration, side, copy, ready)
                if ruling is Ruling.WAIT:
                    return "held"
                del held[migration]
                if ruling is Ruling.END:
                    return "ended"
                self.capsules[copy.capsule] = epoch
                return "runs"
        return "nothing"

    @contextlib.contextmanager
    def _working(self, migration: str) -> Iterator[None]:
        self._busy.add(migration)
        try:
            yield
        finally:
            self._busy.discard(migration)

    def _image(self, migration: str, becomes: str = "") -> str:
        """Whether an image is ``complete`` at its destination or ``closed`` to what may still
        come, whichever it became first; a word in a link is all that there is of it."""
        link = images(self._cluster) / migration
        if becomes:
            with contextlib.suppress(FileExistsError):
                link.symlink_to(becomes)
        try:
            return str(link.readlink())
        except FileNotFoundError:
            return ""

    def _running(self, capsule: str) -> int:
        if capsule not in self.capsules:
            raise NotFound(f"{capsule} does not run on {self.host}")
        return self.capsules[capsule]

    async def _takes(self, seconds: float, name: str, size: int) -> messages.Moved:
        await asyncio.sleep(seconds)
        frozen = name in ("freeze", "restore")
        return messages.Moved(size, [Phase(name, 0.0, seconds, size, frozen)])
