# SPDX-License-Identifier: Apache-2.0
"""Random programs that don't deadlock, and the least cut at which they may be stopped.

Operations are drawn one after the other, in one global order; every lane (what one thread does, or
several by turns) runs its own in that order, so that the first operation that isn't done can always
be done by all its members. What a lane waits for locally comes earlier in that order too.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

Key = tuple[int, int, int]
"""Communicator, sender and receiver (ranks of the job); -1 and -1 for its collectives."""


@dataclass(frozen=True, slots=True)
class Communicator:
    id: int
    members: tuple[int, ...]
    blocking: bool
    slot: int  # number of the lane that uses it, in every member
    late: bool = False  # its members make it together when they first need it


@dataclass(slots=True)
class Part:
    """One lane's part in an operation: one admission at the gate."""

    keys: tuple[Key, ...]
    event: int
    executor: int  # which of the lane's threads does it
    after: tuple[Lane, int] | None = None  # part of another lane that has to be back before
    makes: int | None = None  # a late communicator: not an operation, and nothing holds it up
    waits: bool = False  # waits for it until its peers have begun: it blocks, or is synchronised
    peers: list[tuple[Lane, int]] = field(default_factory=list)  # parts that it shares a key with

    @property
    def ready(self) -> bool:
        return self.after is None or self.after[1] in self.after[0].back

    def begun_everywhere(self) -> bool:
        return all(index in lane.begun for lane, index in self.peers)


@dataclass(slots=True, eq=False)
class Lane:
    rank: int
    slot: int
    threads: int
    pool: bool  # its threads take parts in any order
    parts: list[Part] = field(default_factory=list)
    begun: set[int] = field(default_factory=set)  # indices
    back: set[int] = field(default_factory=set)
    taken: int = 0  # pool: parts that a thread has taken

    def __hash__(self) -> int:
        return hash((self.rank, self.slot))


@dataclass(slots=True)
class Program:
    style: str
    ranks: int
    communicators: list[Communicator]
    lanes: list[Lane]

    @property
    def late(self) -> bool:
        return any(made.late for made in self.communicators)

    def warm(self) -> bool:
        """Every rank has used all of its communicators, so that it is known which thread does."""
        used = {
            (lane.rank, key[0])
            for lane in self.lanes
            for index in lane.begun
            for key in lane.parts[index].keys
        }
        return all(
            (r, c) in used for c, made in enumerate(self.communicators) for r in made.members
        )


STYLES = ("plain", "blocking", "mixed", "handoff", "crossed", "pool")


def program(rng: random.Random, style: str, *, length: int = 0, late: float = 0) -> Program:
    """A random one. ``plain``: nothing blocks; ``blocking``: all does; ``handoff``: several threads
    of a rank take turns; ``crossed``: threads of a rank wait for each other; ``pool``: several
    threads serve a communicator. ``late``: the share of communicators that are made late."""
    ranks = rng.randint(2, 8)
    pooled = style == "pool"
    slots = 1 if style == "handoff" else rng.choice((1, 1, 2, 3, 4))
    if style == "crossed":
        slots = max(2, slots)
    communicators = []
    for slot in range(slots):
        for number in range(1 if pooled else rng.randint(1, 4)):
            size = ranks if number == 0 else rng.randint(2, ranks)
            blocking = {"plain": False, "blocking": True, "pool": True}.get(
                style, rng.random() < 0.4
            )
            members = tuple(sorted(rng.sample(range(ranks), size)))
            communicators.append(
                Communicator(rng.getrandbits(63) + 1, members, blocking, slot, rng.random() < late)
            )
    takers = {"handoff": (2, 3), "pool": (1, 2, 3)}.get(style, (1,))
    lanes = {
        (rank, slot): Lane(rank, slot, rng.choice(takers), pooled)
        for rank in range(ranks)
        for slot in range(slots)
    }
    made = Program(style, ranks, communicators, list(lanes.values()))
    shifts = {lane: 0 for lane in lanes.values()}
    lacking = {which for which, communicator in enumerate(communicators) if communicator.late}
    for event in range(length or rng.randint(10, 70)):
        which = rng.randrange(len(communicators))
        communicator = communicators[which]
        keys = _keys(rng, which, communicator)
        beside = rng.randrange(len(communicators))
        other = communicators[beside]
        # A group may span communicators; of those that block there are no groups.
        if len(keys) > 1 and other.slot == communicator.slot and not other.blocking:
            keys += _keys(rng, beside, other)
        for new in sorted(lacking & {key[0] for key in keys}):
            lacking.discard(new)
            _make(new, event, [lanes[r, communicator.slot] for r in communicators[new].members])
        taking: list[tuple[Lane, int]] = []
        for rank in range(ranks):
            mine = tuple(
                key
                for key in keys
                if rank in (key[1:] if key[1] >= 0 else communicators[key[0]].members)
            )
            if not mine:
                continue
            lane = lanes[rank, communicator.slot]
            if rng.random() < 0.2:
                shifts[lane] = rng.randrange(lane.threads)
            part = Part(mine, event, shifts[lane])
            part.waits = communicator.blocking or rng.random() < 0.1
            waited = lanes[rank, rng.randrange(slots)]
            if style in ("crossed", "pool") and rng.random() < 0.15 and waited is not lane:
                back = [i for i, p in enumerate(waited.parts) if p.event < event]
                part.after = (waited, back[-1]) if back else None
            taking.append((lane, len(lane.parts)))
            lane.parts.append(part)
        for lane, index in taking:
            part = lane.parts[index]
            part.peers = [
                (m, i) for m, i in taking if not set(part.keys).isdisjoint(m.parts[i].keys)
            ]
    return made


def _make(which: int, event: int, lanes: list[Lane]) -> None:
    peers = [(lane, len(lane.parts)) for lane in lanes]
    for lane in lanes:
        lane.parts.append(Part((), event, 0, makes=which, peers=peers))


def _keys(rng: random.Random, which: int, on: Communicator) -> list[Key]:
    kind = rng.random()
    if len(on.members) < 2 or kind < 0.5:
        return [(which, -1, -1)]
    pairs = list(itertools.permutations(on.members, 2))
    if kind < 0.75 or on.blocking:
        return [(which, *rng.choice(pairs))]
    if kind < 0.8:
        return [(which, -1, -1)] * 2  # two collectives in one group
    group = [(which, *rng.choice(pairs)) for _ in range(rng.randint(2, 6))]
    if kind < 0.85:
        group.append((which, -1, -1))
    return group


def least_cut(made: Program, begun: dict[Key, int]) -> dict[Lane, int]:
    """How far each lane has to come: all that had begun, and what that needs, is done by all.

    ``begun``: the highest number that was begun of each key. The closure over the order within a
    lane and over the identity of an operation on all its members; nothing of the gate is used.
    """
    needed = dict(begun)
    numbers: dict[Lane, list[list[tuple[Key, int]]]] = {}
    for lane in made.lanes:
        seen: dict[Key, int] = {}
        rows = []
        for part in lane.parts:
            row = []
            for key in part.keys:
                seen[key] = seen.get(key, 0) + 1
                row.append((key, seen[key]))
            rows.append(row)
        numbers[lane] = rows
    position = dict.fromkeys(made.lanes, 0)
    growing = True
    while growing:
        growing = False
        for lane, rows in numbers.items():
            wanted = position[lane]
            for at in range(wanted, len(rows)):
                if any(number <= needed.get(key, 0) for key, number in rows[at]):
                    wanted = at + 1
            for row in rows[position[lane] : wanted]:
                for key, number in row:
                    if number > needed.get(key, 0):
                        needed[key] = number
            growing = growing or wanted > position[lane]
            position[lane] = wanted
    return position
