# SPDX-License-Identifier: Apache-2.0
"""Messages by which the orchestrator brings a job's ranks to a collective boundary.

Each goes to every host that has capsules of the job; an agent answers for all of its ranks.
"""

from __future__ import annotations

import msgspec

from .base import Answer, Message


class Member(msgspec.Struct, frozen=True):
    """A rank's part in a communicator, by the id that all of its members agree on.

    ``rank``: within the communicator, of ``size``; ``world_rank``: of the job, -1 if unknown.
    ``ordinal``: the how many-th communicator of that process.
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

    ``hold`` in seconds: a gate that was not opened after that time is opened by its agent.
    ``limit``: seconds that draining, teardown and rebuild may each take.
    """

    job: str
    attempt: int
    hold: float
    limit: float


class Armed(Answer, frozen=True):
    """What had begun on this host when the gate was closed.

    ``numbers``: the last number taken of each clock. ``ranks``: processes that have a gate.
    ``obstacles``: why no boundary can be found, in words. ``pairs``: (communicator, sender,
    receiver) of clocks that belong to a pair of ranks of which one is here.
    """

    numbers: dict[int, int]
    members: list[Member]
    ranks: int
    obstacles: list[str]
    pairs: dict[int, tuple[int, int, int]] = msgspec.field(default_factory=dict)


class Aim(Message, frozen=True):
    """Let operations up to these numbers pass; answers Aimed once all of the host's ranks are
    there, one had to go further, a newer Aim has come, or after ``wait`` seconds.

    ``targets`` may leave out clocks whose target is as it was. ``pairs``, as in Armed, are of
    clocks that a rank here may not have made yet, though its peer has.
    """

    job: str
    attempt: int
    version: int
    targets: dict[int, int]
    wait: float
    pairs: dict[int, tuple[int, int, int]] = msgspec.field(default_factory=dict)


class Aimed(Answer, frozen=True):
    """``reached``: every rank here has come to its targets of ``version``, and no further.
    ``raised``: numbers beyond the targets that had to be taken, and clocks that are new here;
    ``pairs`` of these, as in Armed."""

    version: int
    reached: bool
    raised: dict[int, int]
    obstacles: list[str]
    pairs: dict[int, tuple[int, int, int]] = msgspec.field(default_factory=dict)


class Shut(Message, frozen=True):
    """All ranks of the job are there: let nothing pass, wait until the streams that carried
    communication are idle; answers Aimed, not reached if one has gone further meanwhile."""

    job: str
    attempt: int


class WhoOwes(Message, frozen=True):
    """Which ranks here have not come to their targets, and where they are; answers Owing."""

    job: str
    attempt: int


class Owing(Answer, frozen=True):
    """In words, one line for each rank and clock."""

    lines: list[str]


class TearDown(Message, frozen=True):
    """Take NCCL communicators down beneath the application; answers TornDown."""

    job: str
    attempt: int


class TornDown(Answer, frozen=True):
    """``communicators``: those that are down here, (id, ordinal). ``seconds``: the slowest."""

    communicators: list[tuple[int, int]]
    seconds: float


class FreshIds(Message, frozen=True):
    """Have the first ranks of communicators that are down make unique ids; answers Fresh."""

    job: str
    attempt: int


class Fresh(Answer, frozen=True):
    """``ids``: by communicator, from hosts that have its rank 0. ``communicators``: one entry for
    each member that is down here. ``sizes``: how many members each has in all."""

    ids: dict[int, bytes]
    communicators: list[tuple[int, int]]
    sizes: dict[int, int]


class Rebuild(Message, frozen=True):
    """Make communicators again: by id, when in the one order of the whole job, and the unique id;
    answers TornDown with those that are down still."""

    job: str
    attempt: int
    ids: dict[int, tuple[int, bytes]]


class OpenGate(Message, frozen=True):
    """Let the job's operations pass again on this host, whatever attempt closed the gate; answers
    TornDown with the communicators that are down: their gate stays closed."""

    job: str
