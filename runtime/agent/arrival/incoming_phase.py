# SPDX-License-Identifier: Apache-2.0
"""The phases of a migration at its destination, and which phase may follow which.

The happy path reads top to bottom. From COMPLETE on the source holds its tree until a ruling. The
tree runs only after GRANTED. A restarted agent finds a migration in COMPLETE or in GRANTED; without
a complete image it removes what has come.
"""

from __future__ import annotations

import enum


class IncomingPhase(enum.Enum):
    """An IncomingMigration is in exactly one of these phases. The agent keeps the phase in memory
    only; after a restart, IncomingMigration.recover finds it out from the image and the notes that
    are left."""

    RECEIVING = "receiving"  # an empty sandbox exists, and the image comes
    COMPLETE = "complete"  # the whole image is here
    RESTORING = "restoring"  # CRIU restores the tree; then the agent asks whether it may run
    GRANTED = "granted"  # the tree may run; the network is being opened
    RUNNING = "running"  # the capsule runs here
    FAILED = "failed"  # the last attempt to restore left no task; another one may follow
    DISCARDED = "discarded"  # sandbox and image are removed


ALLOWED: dict[IncomingPhase, frozenset[IncomingPhase]] = {
    # FAILED: a restore was ordered, and the image is not complete.
    IncomingPhase.RECEIVING: frozenset(
        {IncomingPhase.COMPLETE, IncomingPhase.FAILED, IncomingPhase.DISCARDED}
    ),
    IncomingPhase.COMPLETE: frozenset(
        {IncomingPhase.RESTORING, IncomingPhase.FAILED, IncomingPhase.DISCARDED}
    ),
    IncomingPhase.RESTORING: frozenset({IncomingPhase.GRANTED, IncomingPhase.FAILED}),
    IncomingPhase.GRANTED: frozenset({IncomingPhase.RUNNING, IncomingPhase.FAILED}),
    IncomingPhase.RUNNING: frozenset(),
    IncomingPhase.FAILED: frozenset({IncomingPhase.RESTORING, IncomingPhase.DISCARDED}),
    IncomingPhase.DISCARDED: frozenset(),
}
"""A phase may also follow itself: what failed in it is tried again."""
