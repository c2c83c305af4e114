# SPDX-License-Identifier: Apache-2.0
"""A simulated job over real gates: coroutines for threads, chosen at random, and virtual time.

Real are gate.c and the pages (simulated_gate.py), HostGate and CollectiveClock; simulated are
threads, communication, the way between hosts, and time, which goes on only when nothing else can.
"""

from __future__ import annotations

import os
import random
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gate_actors import LEASE_MS, Agent, Process, Thread
from gate_programs import Key, Program, least_cut

from liveshift.interposer.orders import OrderedPage, open_ordered
from liveshift.runtime.model.collective_clock import CollectiveClock

POLL_MS = 20  # how often a thread at the gate looks again, as in gate.c
DEADLINE_MS = 600
STUCK_MS = 1200  # nothing has happened for so long: nothing ever will


class Violation(AssertionError):
    """What must never be."""


@dataclass
class Seen:
    """What a run of one program came to."""

    converged: int = 0
    abandoned: int = 0
    overshoot: int = 0
    overshoot_warm: int = 0  # where all communicators had been used before
    raises: int = 0
    waited_ms: int = 0
    steps: int = 0


class SimulatedPage(OrderedPage):
    """A page between whose readings and writings the job's threads go on."""

    interrupt: Any = staticmethod(lambda: None)

    def raw(self, at: int, length: int) -> bytes:
        self.interrupt()
        return super().raw(at, length)

    def _write(self, at: int, code: str, *values: int | bytes) -> None:
        self.interrupt()
        super()._write(at, code, *values)


class World:
    """One program's run, from its first step to its last, with attempts to stop it on the way."""

    def __init__(
        self, lib: Any, made: Program, rng: random.Random, folder: Path, *, hasty: bool = False
    ) -> None:
        self.lib, self.program, self.rng, self.folder = lib, made, rng, folder
        self.hasty = hasty  # time goes on also while something else could
        self.pauses = rng.choice((1, 2, 8))
        self.reading = rng.choice((0.0, 0.1, 0.5))  # threads go on while an agent reads or writes
        self.seen = Seen()
        self.passes = False
        self.processes = [Process(self, rank) for rank in range(made.ranks)]
        for lane in made.lanes:
            lane.begun.clear()
            lane.back.clear()
            lane.taken = 0
        self.threads = [Thread(self, ln, n) for ln in made.lanes for n in range(ln.threads)]
        per_host = rng.randint(1, 4)
        self.agents = [
            Agent(f"h{at}", [p.path for p in self.processes[at : at + per_host]])
            for at in range(0, made.ranks, per_host)
        ]
        self.by_name = {agent.name: agent for agent in self.agents}
        if rng.random() < 0.5 and not made.late:  # else pairs' clocks appear when first used
            for lane in made.lanes:
                for part in lane.parts:
                    for key in part.keys:
                        self.processes[lane.rank].row(key)
        self.attempt = 0
        self.warm = False
        self.coordinator: CollectiveClock | None = None
        self.closing: set[str] | None = None
        self.round = 0
        self.first: dict[Key, int] | None = None
        self.quiesced = False
        self.idle = self.stuck_ms = 0
        self.frozen: list[int] | None = None

    def announce(self, thread: Thread, row: int) -> Generator[bool, None, None]:
        """gate_begin in its two halves; ``passes`` is its answer."""
        self.lib.sim_announce(thread.process.gate, row, 1, thread.tid)
        yield True
        self.passes = self.lib.sim_is_open(thread.process.gate)

    def opened(self, path: Path) -> OrderedPage:
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            page = open_ordered(path, fd)
        finally:
            os.close(fd)
        page.__class__ = SimulatedPage
        page.interrupt = self._interrupt  # type: ignore[attr-defined]
        return page

    def _interrupt(self) -> None:
        while self.rng.random() < self.reading:
            self.rng.choice(self.threads).go()

    # What can happen.

    def step(self) -> None:
        """Something at random; time, when nothing else can happen."""
        rng, draw = self.rng, self.rng.random()
        self.seen.steps += 1
        happened = False
        if draw < 0.7:
            happened = rng.choice(self.threads).go()
        elif draw < 0.84:
            happened = self._deliver(rng.choice(self.agents))
        elif draw < 0.86:
            happened = self._coordinate()
        else:
            happened = rng.choice(self.agents).look()
        if self.hasty and rng.random() < 0.01:
            self._age()
        self.idle = 0 if happened else self.idle + 1
        if happened:
            self.stuck_ms = 0
        if self.idle > 20 and not self._anything():
            self._age()
            self.stuck_ms += POLL_MS
            self.seen.waited_ms += POLL_MS
            waited_for = self.coordinator is not None or not self.finished
            if self.stuck_ms > STUCK_MS and waited_for and not self.quiesced:
                raise Violation("nothing happens any more:\n" + self.story())

    def _anything(self) -> bool:
        """One thing after the other, until one happens."""
        things = [*(t.go for t in self.threads), *(a.look for a in self.agents)]
        things.append(self._coordinate)
        things += [lambda a=a: self._deliver(a) for a in self.agents]  # type: ignore[misc]
        self.rng.shuffle(things)
        return any(thing() for thing in things)

    def _age(self) -> None:
        for thread in self.threads:
            if thread.waiter is not None:
                thread.waiter.stalled_ms += POLL_MS
                thread.waiter.silent_ms += POLL_MS
                thread.waiter.pending_ms = (
                    thread.waiter.pending_ms + POLL_MS if thread.behind_another else 0
                )
        for agent in self.agents:
            if agent.gate is not None and agent.attempt:
                agent.gate.heartbeat()

    def _deliver(self, agent: Agent) -> bool:
        if agent.inbox and (not agent.outbox or self.rng.random() < 0.5):
            agent.receive(self)
            return True
        if agent.outbox:
            self._hear(agent, *agent.outbox.popleft())
            return True
        return False

    # The orchestrator.

    def arm(self) -> None:
        self.attempt += 1
        self.coordinator = CollectiveClock(agent.name for agent in self.agents)
        self.closing, self.first, self.quiesced = None, None, False
        self.warm = self.program.warm()
        self.stuck_ms = 0
        self._tell("arm")

    def open(self) -> None:
        self._tell("open")
        self.coordinator = None
        self.quiesced = False
        self.frozen = None

    def _tell(self, kind: str, *rest: Any) -> None:
        for agent in self.agents:
            agent.inbox.append((kind, self.attempt, *rest))

    def _hear(self, agent: Agent, kind: str, attempt: int, *rest: Any) -> None:
        clock = self.coordinator
        if attempt != self.attempt or clock is None:
            return
        if kind == "report":
            clock.add_report(agent.name, rest[0])
        elif self.closing is not None and rest[0] == self.round:
            if rest[1]:
                self.closing.discard(agent.name)
            else:
                self.closing = None
        if self.first is None and clock.version:
            self.first = self._keys(clock.targets)

    def _coordinate(self) -> bool:
        """What follows from all that was heard; False: nothing."""
        clock = self.coordinator
        if clock is None or self.quiesced:
            return False
        due = clock.due()
        for host in due:
            aim = clock.aim(host)
            self.by_name[host].inbox.append(("aim", self.attempt, aim))
            self.seen.raises += aim.version > 1
        if not clock.converged:
            self.closing = None
        elif self.closing is None:
            self.round += 1
            self.closing = set(self.by_name)
            self._tell("close", self.round)
            return True
        elif not self.closing:
            self.quiesced = True
            return True
        return bool(due)

    def _keys(self, numbers: dict[int, int]) -> dict[Key, int]:
        names = {}
        for process in self.processes:
            page = self.opened(process.path)
            page.interrupt = lambda: None  # type: ignore[attr-defined]
            keys = {row: key for key, row in process.rows.items()}
            names.update({clock.id: keys[clock.row] for clock in page.clocks()})
            page.close()
        return {names[clock]: number for clock, number in numbers.items()}

    # What must be.

    def check_boundary(self) -> None:
        """Nothing is half begun; and where the program is of that kind, it is the least cut."""
        for lane in self.program.lanes:
            for index in lane.begun:
                part = lane.parts[index]
                if part.makes is None and not part.begun_everywhere():
                    what = f"rank {lane.rank}, lane {lane.slot}, part {index}"
                    raise Violation(f"{what} is half begun at the boundary\n{self.story()}")
        for thread in self.threads:
            if thread.where.startswith("inside"):
                blocking = f"{thread.where} at the boundary\n{self.story()}"
                raise Violation(blocking)
        if self.program.style == "pool" or self.program.late or self.first is None:
            return
        least = least_cut(self.program, self.first)
        for lane, position in least.items():
            if len(lane.begun) < position:
                raise Violation(f"{lane.rank}/{lane.slot} short of the least cut\n{self.story()}")
            self.seen.overshoot += len(lane.begun) - position
            if self.warm:
                self.seen.overshoot_warm += len(lane.begun) - position

    @property
    def finished(self) -> bool:
        return all(thread.done for thread in self.threads)

    def story(self) -> str:
        lines = [f"style {self.program.style}, attempt {self.attempt}, quiesced {self.quiesced}"]
        lines += [
            f"rank {t.lane.rank} lane {t.lane.slot} thread {t.number}: {t.where}"
            for t in self.threads
        ]
        clock = self.coordinator
        if clock is not None:
            lines.append(f"version {clock.version}, behind {clock.behind}")
        lines += [f"{a.name}: attempt {a.attempt}, last {a.last}" for a in self.agents]
        return "\n".join(lines)

    def close(self) -> None:
        for agent in self.agents:
            agent.die()
        for process in self.processes:
            self.lib.sim_process_end(process.gate)
            process.path.unlink()


@contextmanager
def world(
    lib: Any, made: Program, rng: random.Random, folder: Path, *, hasty: bool = False
) -> Iterator[World]:
    there = World(lib, made, rng, folder, hasty=hasty)
    try:
        yield there
    finally:
        there.close()


def play(there: World, *, attempts: int, abandon: float = 0.0) -> Seen:
    """Run the program to its end, with attempts at random moments; raises Violation."""
    rng, seen = there.rng, there.seen
    length = sum(len(lane.parts) for lane in there.program.lanes)
    for _ in range(attempts):
        for _ in range(rng.randrange(4 * length + 1)):
            there.step()
        there.arm()
        left = rng.randrange(6 * length + 50) if rng.random() < abandon else None
        while not there.quiesced and left != 0:
            there.step()
            left = left - 1 if left is not None else None
            if there.program.late and there.stuck_ms > DEADLINE_MS:
                break  # a member of a communicator that is being made is held up elsewhere
        if there.quiesced:
            _stand(there)
            seen.converged += 1
        else:
            seen.abandoned += 1
        died = not there.quiesced and rng.random() < 0.3
        if died:
            rng.choice(there.agents).die()
        there.open()
        if died and rng.random() < 0.5:  # long enough for its gates to open by themselves
            while there.stuck_ms < LEASE_MS and not there.finished:
                there.step()
            for _ in range(60):
                there.step()
    while not there.finished:
        there.step()
    for process in there.processes:
        page = there.opened(process.path)
        page.interrupt = lambda: None  # type: ignore[attr-defined]
        told = {clock.row: (clock.announced, clock.returned) for clock in page.clocks()}
        page.close()
        for key, row in process.rows.items():
            count = sum(
                part.keys.count(key)
                for lane in there.program.lanes
                if lane.rank == process.rank
                for part in lane.parts
            )
            if told[row] != (count, count):
                raise Violation(f"{key} of rank {process.rank}: {told[row]}, not {count}")
    return seen


def _stand(there: World) -> None:
    """The boundary holds while threads go on trying."""
    there.check_boundary()
    begun = _operations(there)
    for _ in range(40):
        there.step()
    if _operations(there) != begun:
        raise Violation("something passed the closed gate\n" + there.story())


def _operations(there: World) -> list[int]:
    return [sum(ln.parts[i].makes is None for i in ln.begun) for ln in there.program.lanes]
