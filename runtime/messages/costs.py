# SPDX-License-Identifier: Apache-2.0
"""Messages about the training time that a move costs. Seconds, bytes."""

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
    """A move was requested: note the capsule's progress and its usual speed; answers None."""

    migration: str
    capsule: str


class EndMeasure(Message, frozen=True):
    """A move is over: report the capsule's progress on this host meanwhile; answers Worked.

    ``clock``: the clock that counts, as the source has chosen; "" in the message to the source
    itself. A host on which the capsule runs watches it for some seconds first. Another host answers
    at once.
    """

    migration: str
    capsule: str
    clock: str = ""


class Worked(Answer, frozen=True):
    """A capsule's clock on one host during a move: "collectives", or "run time" in ms.

    ``begin`` and ``end``: the count at the begin and at the end of the host's part of the move,
    fractions included. The source's ``end`` is None for collectives: their count moves with the
    rank, and goes on from the destination's ``begin``. ``counted``: the whole count at the begin.
    ``rate``: the count per second on this host when nothing holds the job up; 0 if that is not
    known. ``seconds``: from EndMeasure to the moment of ``end``, if the host watched; else 0.
    ``cpu_s``: CPU seconds of the agent and its children since the move began here. ``sent``: bytes.
    ``why_not``: why nothing could be counted, in words.
    """

    clock: str
    begin: float
    end: float | None
    counted: float
    rate: float
    seconds: float
    cpu_s: float
    sent: int = 0
    why_not: str = ""
