# SPDX-License-Identifier: Apache-2.0
"""Who acts in a simulated world: ranks at their gates, their threads, and their hosts' agents."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gate_programs import Key, Lane, Part
from gloo_boundaries import armed, still
from simulated_gate import GO, PENDING, ffi

from liveshift.interposer.layout import Library
from liveshift.runtime.model.collective_clock import ClockReport
from liveshift.runtime.quiesce.host_gate import HostGate

if TYPE_CHECKING:
    from gate_world import World

LEASE_MS = 400


class Process:
    """A rank: its page and its gate."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.path = world.folder / str(1000 + rank)
        lib = world.lib
        self.gate = lib.sim_process(
            os.fsencode(world.folder / f".{1000 + rank}"), os.fsencode(self.path), 1000 + rank, rank
        )
        if self.gate == ffi.NULL:
            raise OSError(ffi.errno, "sim_process")
        self.rows: dict[Key, int] = {}
        self.communicators: dict[int, Any] = {}
        for which, made in enumerate(world.program.communicators):
            if rank in made.members and not made.late:
                self.make(which)

    def make(self, which: int) -> None:
        """A communicator's row, and one for its collectives."""
        made = self.world.program.communicators[which]
        library = Library.GLOO if made.blocking else Library.NCCL
        self.communicators[which] = self.world.lib.sim_communicator(
            self.gate,
            library,
            made.id,
            len(made.members),
            made.members.index(self.rank),
            f"c{which}".encode(),
        )
        self.row((which, -1, -1))

    def row(self, key: Key) -> int:
        """The clock's row; a pair's is made when it is first needed."""
        if key not in self.rows:
            which, *pair = key
            members = self.world.program.communicators[which].members
            ends = (members.index(end) if end >= 0 else -1 for end in pair)
            self.rows[key] = self.world.lib.sim_clock(self.gate, self.communicators[which], *ends)
        return self.rows[key]


class Thread:
    """A coroutine that does its parts of a lane; ``go`` says whether anything has happened."""

    def __init__(self, world: World, lane: Lane, number: int) -> None:
        self.world, self.lane, self.number = world, lane, number
        self.process = world.processes[lane.rank]
        self.tid = 100 + lane.slot * 8 + number
        self.waiter: Any = None
        self.behind_another = False
        self.done = False
        self.where = "new"
        self._body = self._run()

    def go(self) -> bool:
        if self.done:
            return False
        try:
            return next(self._body)
        except StopIteration:
            self.done, self.where = True, "done"
            return True

    def _run(self) -> Generator[bool, None, None]:
        lane = self.lane
        if lane.pool:
            while lane.taken < len(lane.parts):
                if not lane.parts[lane.taken].ready:
                    yield False  # the queue is empty
                    continue
                lane.taken += 1
                yield from self._part(lane.taken - 1)
            return
        for index, part in enumerate(lane.parts):
            if part.executor % lane.threads == self.number:
                while len(lane.back) < index:
                    self.where = f"waits for its turn, part {index}"
                    yield False
                yield from self._part(index)

    def _part(self, index: int) -> Generator[bool, None, None]:
        lane, world = self.lane, self.world
        part = lane.parts[index]
        for _ in range(world.rng.randrange(world.pauses)):
            yield True
        while not part.ready:
            self.where = f"waits for another lane to do what part {index} needs"
            yield False
        if part.makes is not None:
            yield from self._make(part, index)
            return
        yield from self._begin(part)
        lane.begun.add(index)
        self.where = f"inside part {index}: {part.keys}"
        yield True
        blocks = len(part.keys) == 1 and world.program.communicators[part.keys[0][0]].blocking
        while blocks and not part.begun_everywhere():
            yield False
        for key in part.keys:
            world.lib.sim_end(self.process.gate, self.process.row(key))
        self.where = f"back from part {index}"
        yield True
        while part.waits and not part.begun_everywhere():
            self.where = f"synchronises part {index}"
            yield False
        lane.back.add(index)

    def _make(self, part: Part, index: int) -> Generator[bool, None, None]:
        lib, gate = self.world.lib, self.process.gate
        lib.sim_untracked_begin(gate)
        self.lane.begun.add(index)
        self.where = f"makes communicator {part.makes}"
        while not part.begun_everywhere():
            yield False
        yield True
        assert part.makes is not None
        self.process.make(part.makes)
        yield True
        lib.sim_untracked_end(gate)
        self.lane.back.add(index)

    def _begin(self, part: Part) -> Generator[bool, None, None]:
        world, gate, keys = self.world, self.process.gate, part.keys
        lib = world.lib
        rows = [self.process.row(key) for key in keys]
        yield True
        if len(keys) == 1:
            yield from world.announce(self, rows[0])
            if not world.passes:
                yield from self._at_gate([(rows[0], 1, True)])
        elif lib.sim_group_begin(gate):
            for row in rows:
                yield True
                lib.sim_announce(gate, row, 1, self.tid)
            yield True
            lib.sim_group_end(gate)
        else:
            yield True
            yield from self._at_gate([(row, 1, False) for row in rows])

    def _at_gate(self, wanted: list[tuple[int, int, bool]]) -> Generator[bool, None, None]:
        wants = ffi.new("struct gate_want[]", len(wanted))
        for want, (row, count, announced) in zip(wants, wanted, strict=True):
            want.clock, want.count, want.announced = row, count, announced
        self.waiter = ffi.new("struct gate_waiter *")
        while True:
            verdict = self.world.lib.sim_try(
                self.process.gate, wants, len(wanted), self.tid, self.waiter
            )
            if verdict == GO:
                self.waiter = None
                return
            self.behind_another = verdict == PENDING
            self.where = f"at the gate, verdict {verdict}, wants {wanted}"
            yield False


@dataclass
class Agent:
    """A host's side: a HostGate, and messages to and from the coordinator in order."""

    name: str
    paths: list[Path]
    gate: HostGate | None = None
    attempt: int = 0
    told: bool = False
    last: ClockReport | None = None
    inbox: deque[tuple[Any, ...]] = field(default_factory=deque)
    outbox: deque[tuple[Any, ...]] = field(default_factory=deque)

    def receive(self, world: World) -> None:
        kind, attempt, *rest = self.inbox.popleft()
        if kind == "arm":
            self.attempt, self.told, self.last = attempt, False, None
            if self.gate is None:
                opened = [world.opened(path) for path in self.paths]
            else:
                opened = self.gate.pages
            self.gate = armed(opened, attempt, LEASE_MS)
            return
        if attempt != self.attempt or self.gate is None:
            return
        if kind == "aim":
            self.gate.aim(rest[0].version, rest[0].targets, rest[0].pairs)
        elif kind == "close":
            self.gate.close()
            self.look()
            self.outbox.append(("still", attempt, rest[0], still(self.gate)))
        elif kind == "open":
            for page in self.gate.pages:
                page.open()
            self.attempt = 0

    def look(self) -> bool:
        """Whether there was something to tell."""
        if self.attempt == 0 or self.gate is None:
            return False
        if not self.told:
            begun = self.gate.announced()
            if begun is None:
                return False
            self.told = True
            self.outbox.append(("report", self.attempt, begun))
            return True
        report = self.gate.report()
        if report == self.last:
            return False
        self.last = report
        self.outbox.append(("report", self.attempt, report))
        return True

    def die(self) -> None:
        """The daemon ends with the gates as they are; another one begins with the next attempt."""
        if self.gate is not None:
            self.gate.release()
        self.gate, self.attempt = None, 0
        self.inbox.clear()
        self.outbox.clear()
