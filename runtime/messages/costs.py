# SPDX-License-Identifier: Apache-2.0
"""What messages say about the training time that a move costs. Seconds, bytes."""

from __future__ import annotations

import msgspec

from .base import Answer, Message


class Cost(msgspec.Struct, frozen=True):
    """What a move cost the job, measured some seconds after it was over.

    ``lost_s``: the time from the request to two seconds after the end, less the time that the job
    takes for as many steps before and after the move. For ``paused_s`` of it the job was paused;
    ``slower_s`` is the rest. Where the orchestrator could not measure these three, they are None
    and ``why_not`` gives the reason. ``empty_s``: from the request until the source had nothing of
    the capsule any more; None where the capsule stayed. ``cpu_source_s`` and
    ``cpu_destination_s``: CPU seconds of the two agents and of their children, such as CRIU; None
    where an agent does not say. ``sent_bytes``: by the source; ``memory_bytes``: anonymous memory
    that the capsule had.
    """

    lost_s: float | None
    paused_s: float | None
    slower_s: float | None
    empty_s: float | None
    cpu_source_s: float | None
    cpu_destination_s: float | None
    sent_bytes: int
    memory_bytes: int
    why_not: str = ""


class StartMeasure(Message, frozen=True):
    """A move is asked for: note how far the capsule is, and what it usually makes; answers None."""

    migration: str
    capsule: str


class EndMeasure(Message, frozen=True):
    """A move is over: say what the capsule has made on this host meanwhile; answers Worked.

    ``clock``: what to count, as the source has chosen it; "" for the source's own. A host on which
    the capsule runs watches it for some seconds first; one that let go of it answers at once.
    """

    migration: str
    capsule: str
    clock: str = ""


class Worked(Answer, frozen=True):
    """What a capsule's clock showed on one host in a move: "collectives", or "run time" in ms.

    ``begin`` and ``end``: the count at the begin and at the end of its part of the move, parts of
    a step included; an ``end`` of None is the other host's ``begin``, as collectives move with the
    rank. ``counted``: what was read at the begin. ``rate``: what it makes in a second here when
    nothing holds it up, 0 where that is not known. ``seconds``: from the ask until the moment that
    ``end`` belongs to, where the capsule runs here (``runs``). ``cpu_s``: CPU seconds of the agent
    and its children since the move began here; ``sent``: bytes. ``why_not``: why nothing could be
    counted, in words.
    """

    clock: str
    begin: float
    end: float | None
    counted: float
    rate: float
    seconds: float
    runs: bool
    cpu_s: float
    sent: int = 0
    why_not: str = ""
