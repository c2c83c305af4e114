# SPDX-License-Identifier: Apache-2.0
"""Messages about the expected pause of a move. Seconds, bytes."""

from __future__ import annotations

import msgspec


class Writing(msgspec.Struct, frozen=True):
    """What a capsule was seen to write.

    ``rate``: bytes per second in the busiest of some short looks. ``set``: bytes written in
    one look of ``seconds``; bytes that are written again count once.
    """

    rate: float
    set: int
    seconds: float


class Cores(msgspec.Struct, frozen=True):
    """How many cores a host's agent may use, and how many of them were idle lately.

    ``per_byte``: CPU seconds that the agent needs to move a byte of memory. ``boot``: the kernel's
    boot id. Two hosts with the same boot id (as in a lab) share their cores.
    """

    usable: float
    idle: float
    per_byte: float = 1e-9
    boot: str = ""


class Situation(msgspec.Struct, frozen=True):
    """The input of the choice of a way (cost/model.py); seconds, bytes, bytes per second.

    ``written``: what the capsule writes, None without a look at it. ``link``: the rate at which
    memory goes during the pause. A byte takes ``extra_s`` longer than that until it is in its
    place, and ``first_fill_s`` more if no memory went ahead. ``reach``: the rate of a round without
    a limit. ``idle``: the rate for which idle cores suffice. ``per_byte``: seconds that the job
    loses for each byte that is read while no core is idle; ``idle_byte``: the same on idle cores.
    ``fixed_s``: the part of the pause that does not depend on memory. ``besides_s``: the time of
    the move outside copying and pause. ``slow_down``: precopy.slow_down. ``cores``: the cores of
    the host that has fewer; half of them if both hosts share them.
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
    first_fill_s: float = 0.0
    idle_byte: float = 0.0
    cores: float = 1.0


class Estimate(msgspec.Struct, frozen=True):
    """The cost of a move if memory goes by one way.

    ``lost_s``: the training time that the job loses. It is the sum of ``pause_s``, for which the
    job is paused, and ``slower_s``, which it loses because the copy slows it down. ``empty_s``:
    seconds from the request until the host is empty. ``speed``: bytes per second at most while the
    job trains. ``uncovered``: the share of the copying for which no core is idle. ``left``: bytes
    that go during the pause.
    """

    way: str
    speed: float
    lost_s: float
    pause_s: float
    empty_s: float
    slower_s: float
    uncovered: float = 1.0
    left: int = 0


class Chosen(msgspec.Struct, frozen=True):
    """The way that was chosen; ``because`` gives the reason in words.

    ``weighed``: the estimates of all ways. ``given``: their input. ``undecided``: the choice may
    change once it is known how much the capsule writes. ``needs_s``: if no way is sure to
    keep the deadline, the time that the quickest one may take.
    """

    estimate: Estimate
    because: str
    weighed: list[Estimate]
    given: Situation
    undecided: bool = False
    needs_s: float | None = None


class Part(msgspec.Struct, frozen=True):
    """One part of an expected pause. ``detail``: what it was computed from, in words.

    ``seconds``: None if nothing shows how long it takes. ``bytes``: the bytes that go meanwhile;
    None if they do not matter. ``untaught``: the seconds by the defaults alone. Later predictions
    are corrected by how far off it was in earlier moves.
    """

    name: str
    seconds: float | None
    bytes: int | None = None
    detail: str = ""
    untaught: float = 0.0


class Prediction(msgspec.Struct, frozen=True):
    """How long a move will pause the job. ``seconds``: the sum of the known parts.

    ``way``: "pre-copy" or "full dump". ``why``: the reason of a full dump, else empty. ``learnt``:
    the number of earlier moves of this cluster that it uses. ``memory``: anonymous memory that the
    capsule has. ``left_out``: what the sum does not count, in words, else empty.

    ``how``: the way that memory takes (stop, round or rounds); ``because`` says why it was chosen.
    Both are empty for a full dump. ``lost_s``: the training time that the move costs. ``slower_s``:
    the part of it that is not pause. ``empty_s``: seconds from the request until the host is empty.
    ``uncovered``: as in Estimate. ``limited``: whether the rounds are slower than they could be.
    ``weighed`` and ``given``: as in Chosen. ``needs_s``: if the deadline may not be kept, the time
    that the quickest way may take; else None. ``filling``: the factor by which earlier moves
    correct how fast fresh memory is filled.
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
    filling: float = 1.0
