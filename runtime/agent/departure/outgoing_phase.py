# SPDX-License-Identifier: Apache-2.0
"""The phases of a migration and of a snapshot at their source, and which phase may follow which.

The happy path reads top to bottom. Until PROMISED the source may let the tree go on by itself.
From PROMISED on only a ruling (model/ownership.py) decides: THAWING or FINISHING. A restarted agent
finds a migration in FREEZING or in PROMISED (outgoing_note.py).

A snapshot promises nothing: from each of its phases the source may let the tree go on by itself.
"""

from __future__ import annotations

import enum


class OutgoingPhase(enum.Enum):
    """An OutgoingMigration is in exactly one of these phases. The agent keeps the phase in memory
    only; after a restart, OutgoingMigration.recover finds it out from the files of
    outgoing_note.py."""

    PREPARING = "preparing"  # nothing was sent yet; the job trains
    PRECOPYING = "pre-copying"  # files and memory go ahead; the job trains until the freeze
    FREEZING = "freezing"  # device state saved, network locked, CRIU dumps into the wire
    PROMISED = "promised"  # the tree is held frozen until a ruling
    FINISHING = "finishing"  # the capsule has moved: the held copy is being removed
    MOVED = "moved"
    THAWING = "thawing"  # the tree is being let go on here
    RETURNED = "returned"  # the capsule goes on here, or its command has ended


ALLOWED: dict[OutgoingPhase, frozenset[OutgoingPhase]] = {
    OutgoingPhase.PREPARING: frozenset({OutgoingPhase.PRECOPYING, OutgoingPhase.THAWING}),
    OutgoingPhase.PRECOPYING: frozenset({OutgoingPhase.FREEZING, OutgoingPhase.THAWING}),
    OutgoingPhase.FREEZING: frozenset({OutgoingPhase.PROMISED, OutgoingPhase.THAWING}),
    OutgoingPhase.PROMISED: frozenset({OutgoingPhase.FINISHING, OutgoingPhase.THAWING}),
    OutgoingPhase.FINISHING: frozenset({OutgoingPhase.MOVED}),
    OutgoingPhase.MOVED: frozenset(),
    # After a promise a thaw may fail, and then the job may end: the copy is removed.
    OutgoingPhase.THAWING: frozenset({OutgoingPhase.RETURNED, OutgoingPhase.FINISHING}),
    # A ruling repeats the thaw with which a failed freeze has ended.
    OutgoingPhase.RETURNED: frozenset({OutgoingPhase.THAWING}),
}
"""A phase may also follow itself: what failed in it is tried again."""


class SnapshotPhase(enum.Enum):
    """Each phase follows the one before it; OVER may follow any."""

    PREPARING = "not begun"  # nothing was sent yet; the job trains
    AHEAD = "sent ahead"  # files and memory went ahead; the job trains until its boundary
    LOCKED = "locked"  # the network is locked; the tasks run until the dump
    DUMPED = "dumped"  # the tree is held frozen, its image is complete at the holder
    OVER = "over"  # the capsule goes on here, or is just being let go on
