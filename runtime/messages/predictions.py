# SPDX-License-Identifier: Apache-2.0
"""What messages say about the pause that a move is expected to need. Seconds, bytes."""

from __future__ import annotations

import msgspec


class Writing(msgspec.Struct, frozen=True):
    """What a capsule was seen to write. ``rate``: bytes a second in the busiest of some short
    looks; ``set``: bytes written in one of ``seconds``: what is written again counts once."""

    rate: float
    set: int
    seconds: float


class Cores(msgspec.Struct, frozen=True):
    """A host's cores: those that its agent may use, and how many of them nobody has used lately.

    ``per_byte``: CPU seconds that a byte of memory takes the agent to move. ``boot``: the kernel's
    boot id; of two hosts with the same one (a lab) the cores are the same.
    """

    usable: float
    idle: float
    per_byte: float = 1e-9
    boot: str = ""


class Situation(msgspec.Struct, frozen=True):
    """What the choice of a way is made from (cost.py); seconds, bytes, bytes per second.

    ``written`` None: not looked at. ``link``: at which memory goes during the pause, where a byte
    takes ``extra_s`` more, as it has to come into its place too; ``reach``: in a round without a
    limit; ``idle``: in one for which idle cores suffice. ``per_byte``: seconds that the job loses
    for a byte read where no core is idle. ``fixed_s``: of the pause, ``besides_s``: of the move,
    beside memory. ``slow_down``: precopy.slow_down.
    """

    size: int
    written: Writing | None
    link: float
    extra_s: float
    reach: float
    fixed_s: float
    besides_s: float
    per_byte: float
    idle: float
    slow_down: float | None = None


class Estimate(msgspec.Struct, frozen=True):
    """What a move would cost by one way: ``lost_s`` of training, of which the job is paused for
    ``pause_s`` and loses ``slower_s`` by being slower; the host is empty after ``empty_s``.

    ``speed``: bytes per second at most while the job trains; ``uncovered``: the share of the
    copying for which no core is idle.
    """

    way: str
    speed: float
    lost_s: float
    pause_s: float
    empty_s: float
    slower_s: float
    uncovered: float = 1.0


class Chosen(msgspec.Struct, frozen=True):
    """The way that was chosen, in words why, and all that were weighed by what is ``given``.

    ``undecided``: another choice is possible once it is known how much the capsule writes.
    ``needs_s``: the least time to empty the host, where no way keeps the deadline.
    """

    estimate: Estimate
    because: str
    weighed: list[Estimate]
    given: Situation
    undecided: bool = False
    needs_s: float | None = None


class Part(msgspec.Struct, frozen=True):
    """One part of an expected pause; ``detail``: what it was reckoned from, in words.

    ``seconds`` None: nothing tells how long it takes. ``bytes``: what has to go over meanwhile,
    None where that is not what counts. ``untaught``: what it would be by the defaults alone; how
    far off those were in earlier moves is what later ones are corrected by.
    """

    name: str
    seconds: float | None
    bytes: int | None = None
    detail: str = ""
    untaught: float = 0.0


class Prediction(msgspec.Struct, frozen=True):
    """How long a move will pause the job; ``seconds`` is the sum of the parts known.

    ``way``: by which memory goes, "pre-copy" or "full dump"; ``why`` a full one, else empty.
    ``learnt``: from how many earlier moves of this cluster. ``memory``: anonymous memory that the
    capsule has; ``left_out``: what the sum does not count, in words, else empty.

    ``how``: the way that memory takes, stop, round or rounds, and ``because`` why; empty for a full
    dump. ``lost_s``: what the move costs of training, ``slower_s`` of that beside the pause;
    ``empty_s``: from the request until the host is empty. ``uncovered``: as in Estimate;
    ``limited``: whether its rounds are paced. ``weighed``: the ways there were, and ``given`` by
    what; ``needs_s``: the least time to empty the host, where that is later than it must be.
    """

    way: str
    why: str
    seconds: float
    parts: list[Part]
    memory: int
    learnt: int = 0
    left_out: str = ""
    how: str = ""
    because: str = ""
    lost_s: float = 0.0
    slower_s: float = 0.0
    empty_s: float = 0.0
    uncovered: float = 1.0
    limited: bool = False
    weighed: list[Estimate] = msgspec.field(default_factory=list)
    given: Situation | None = None
    needs_s: float | None = None
