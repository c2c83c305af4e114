# SPDX-License-Identifier: Apache-2.0
"""Messages by which the orchestrator brings a job's ranks to a boundary.

Each goes to every host that has capsules of the job; an agent answers for all of its ranks.
"""

from __future__ import annotations

import msgspec

from .base import Answer, Message


class Member(msgspec.Struct, frozen=True):
    """A rank's part in a communicator. ``communicator``: the id on which its members agree.

    ``rank``: within the communicator, of ``size``. ``world_rank``: within the job, -1 if unknown.
    ``ordinal``: the number of this communicator among those of the process.
    """

    communicator: int
    library: str
    name: str
    size: int
    rank: int
    world_rank: int
    ordinal: int


class Arm(Message, frozen=True):
    """Close the gate: from now on new operations wait for targets; answers Armed.

    ``hold``: if the gate is not opened within so many seconds, its agent opens it. ``limit``:
    seconds that draining, teardown and rebuild may each take.
    """

    job: str
    attempt: int
    hold: float
    limit: float


class Armed(Answer, frozen=True):
    """What had begun on this host when the gate was closed.

    ``numbers``: the last number taken on each clock. ``ranks``: the number of processes with a
    gate. ``obstacles``: why there can be no boundary, in words. ``pairs``: (communicator, sender,
    receiver) of clocks that belong to a pair of ranks, one of which is here.
    """

    numbers: dict[int, int]
    members: list[Member]
    ranks: int
    obstacles: list[str]
    pairs: dict[int, tuple[int, int, int]] = msgspec.field(default_factory=dict)


class SetTargets(Message, frozen=True):
    """Let operations up to these numbers pass; answers TargetsSet. The answer comes once all ranks
    of the host are there, a rank had to go further, a newer SetTargets has come, or ``wait``
    seconds are over. ``targets``: may leave out clocks with an unchanged target.
    ``pairs``: as in Armed, for clocks that a rank here may not have made yet, though its peer has.
    """

    job: str
    attempt: int
    version: int
    targets: dict[int, int]
    wait: float
    pairs: dict[int, tuple[int, int, int]] = msgspec.field(default_factory=dict)


class TargetsSet(Answer, frozen=True):
    """``reached``: every rank here has come to its targets of ``version``, and no further.
    ``raised``: the numbers beyond their targets that ranks had to take, and clocks that are new
    here. ``pairs``: those of ``raised``, as in Armed."""

    version: int
    reached: bool
    raised: dict[int, int]
    obstacles: list[str]
    pairs: dict[int, tuple[int, int, int]] = msgspec.field(default_factory=dict)


class Shut(Message, frozen=True):
    """All ranks of the job are at their targets: let nothing pass, and wait until the streams that
    carried communication are idle. Answers TargetsSet, not reached if a rank has gone further."""

    job: str
    attempt: int


class ListBehind(Message, frozen=True):
    """Ask which ranks here are behind their targets, and where they are; answers Behind."""

    job: str
    attempt: int


class Behind(Answer, frozen=True):
    """``lines``: in words, one for each rank and clock."""

    lines: list[str]


class TearDown(Message, frozen=True):
    """Take NCCL communicators down below the application; answers TornDown."""

    job: str
    attempt: int


class TornDown(Answer, frozen=True):
    """``communicators``: (id, ordinal) of those down here. ``seconds``: of the slowest one."""

    communicators: list[tuple[int, int]]
    seconds: float


class FreshIds(Message, frozen=True):
    """Let rank 0 of each communicator that is down make a unique id; answers Fresh."""

    job: str
    attempt: int


class Fresh(Answer, frozen=True):
    """``ids``: by communicator, from hosts that have its rank 0. ``communicators``: one entry for
    each member that is down here. ``sizes``: the number of members of each communicator."""

    ids: dict[int, bytes]
    communicators: list[tuple[int, int]]
    sizes: dict[int, int]


class Rebuild(Message, frozen=True):
    """Make communicators again. For each: its id, its place in the one order of the whole job, and
    its unique id. Answers TornDown with those that are still down."""

    job: str
    attempt: int
    ids: dict[int, tuple[int, bytes]]


class OpenGate(Message, frozen=True):
    """Let the job's operations pass again on this host, whichever attempt closed the gate. Answers
    TornDown with the communicators that are down: their gate stays closed."""

    job: str
