# SPDX-License-Identifier: Apache-2.0
"""Which ends of a command are the work of a fault, and which are the job's own. Pure functions.

A process that a signal of FAULTS has ended did not decide that: its memory was gone or broken, or
the kernel ended it for want of memory. All other ends are the job's own affair, unless the job asks
for more (``--rewind-on any``). But the replay of the same steps may die of the same fault in the
program. So :func:`own_fault` lets no job go round in circles.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from ..journal.snapshot_tables import RewindRow
from ..messages import CapsuleEnded

FAULTS = frozenset(
    {
        *(signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE),
        *(signal.SIGABRT, signal.SIGSYS, signal.SIGTRAP),
    }
)
"""SIGABRT: torch's watchdogs end a process so when its device or a peer fails. SIGKILL: the kernel
when memory is short, or a person with kill -9. Those by which people and programs ask a process to
end (SIGTERM, SIGINT, SIGHUP, SIGQUIT) are not here."""

ASKS_TO_END = FAULTS | {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
"""A person who sends a job one of these through liveshift wants an end, whatever code it has."""

HOUR_S = 3600.0
"""The time in which ``max_rewinds`` counts."""


def killed_by(end: CapsuleEnded) -> signal.Signals | None:
    """The signal of FAULTS that has ended a command, or a rank below it; else None.

    Shells and liveshift report a death by a signal as 128 + its number. torchrun ends with 1: then
    the agent has seen how the rank ended (agent/host/rank_deaths.py).
    """
    for number in (end.signal, end.code - 128):
        if number in FAULTS:
            return signal.Signals(number)
    return None


def words(end: CapsuleEnded) -> str:
    """How a command has ended."""
    killed = killed_by(end)
    if killed is None:
        return f"{end.capsule} ended with code {end.code}"
    what = end.capsule if end.code == 128 + killed else f"a rank of {end.capsule}"
    return f"{what} was ended by {killed.name}"


def own_fault(
    end: CapsuleEnded,
    newest: int,
    earlier: Sequence[RewindRow],
    most: int,
    age: Callable[[RewindRow], float],
    *,
    going_back: bool = False,
) -> str:
    """Why a job whose command has ended is not taken back (again), as text; "" if it is.

    ``newest``: the number of the snapshot that it would go back to. ``earlier``: its rewinds so
    far, oldest first. ``most``: how many of them deaths of its processes may have caused in an
    hour; lost hosts and persons do not count. ``age``: how many seconds ago a rewind was written.
    ``going_back``: the job is being taken back, so a rank that is back may have failed for want of
    the others.
    """
    deaths = [row for row in earlier if row.died]
    before = deaths[-1].died if deaths else {}
    # Collectives are counted in memory, so a rewind takes the count back as well. Ranks that take
    # part in the same collectives have the same count, and any of them may be the first to end.
    same = [name for name, count in before.items() if count and count == end.collectives]
    if end.capsule in same or (same and not going_back):
        twice = f"twice in a row after collective {end.collectives}"
        if end.capsule not in same:
            twice = f"after collective {end.collectives}, after which {same[0]} had failed before"
        return f"{words(end)} {twice}: the job does that by itself, and is not taken back again"
    mine = before.get(end.capsule)
    if mine is not None and not (mine and end.collectives) and deaths[-1].generation == newest:
        return (
            f"{words(end)} twice in a row within one interval, before a snapshot later than"
            f" s{newest}: the job does that by itself, and is not taken back again"
        )
    recent = sum(age(row) < HOUR_S for row in deaths)
    if recent >= most:
        return (
            f"{words(end)}, and in the last hour the job was taken back {recent} times after such"
            f" an end: max_rewinds is {most}"
        )
    return ""
