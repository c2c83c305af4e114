# SPDX-License-Identifier: Apache-2.0
"""The states of a migration, and which may follow which. Written once, here.

The happy path reads top to bottom. Before COMMITTED every failure leads through ROLLING_BACK,
and only the source may run the capsule; from COMMITTED on only the destination may, and a
restore that fails there passes the ownership back (RETURNING) under a further epoch. A command
that ends by itself before COMMITTED ends its migration too (JOB_ENDED). After a
restart of the orchestrator a migration goes on with ROLLING_BACK, RESTORING or FINISHING. A
complete image leads from ROLLING_BACK to COMMITTED when its source has gone meanwhile.

A swap of GPUs inside a host has fewer of them: nothing is shipped, and nobody else comes to own
the capsule (:data:`ALLOWED_IN_SWAP`).
"""

from __future__ import annotations

import enum


class Step(enum.Enum):
    PREPARING = "preparing"  # survey, preflight, an empty room; the job trains
    PRECOPYING = "pre-copying"  # what is not being written goes over; the job trains
    QUIESCING = "quiescing"  # all ranks come to a collective boundary, and wait there
    FREEZING = "freezing"  # network locked, dump into the wire; the job stands
    COMMITTED = "committed"  # the journal names the destination
    RESTORING = "restoring"  # CRIU brings the tree up at the destination
    RESUMING = "resuming"  # the tree runs; its first collective is awaited
    FINISHING = "finishing"  # the frozen copy at the source ends
    DONE = "done"
    ROLLING_BACK = "rolling back"  # not committed: the source goes on
    RETURNING = "returning"  # committed, not restored: ownership goes back to the source
    FAILED = "failed"  # the capsule is its source's, as if nothing had happened
    JOB_ENDED = "job ended"  # by itself, at the source, before it could be moved
    LOST = "lost"  # no side has it any more; the job has ended


ALLOWED: dict[Step, frozenset[Step]] = {
    Step.PREPARING: frozenset({Step.PRECOPYING, Step.ROLLING_BACK}),
    Step.PRECOPYING: frozenset({Step.QUIESCING, Step.ROLLING_BACK}),
    Step.QUIESCING: frozenset({Step.FREEZING, Step.ROLLING_BACK}),
    Step.FREEZING: frozenset({Step.COMMITTED, Step.ROLLING_BACK}),
    Step.COMMITTED: frozenset({Step.RESTORING}),
    Step.RESTORING: frozenset({Step.RESUMING, Step.RETURNING, Step.LOST}),
    Step.RESUMING: frozenset({Step.FINISHING}),
    Step.FINISHING: frozenset({Step.DONE}),
    Step.ROLLING_BACK: frozenset({Step.COMMITTED, Step.FAILED, Step.JOB_ENDED, Step.LOST}),
    Step.RETURNING: frozenset({Step.FAILED, Step.RESTORING, Step.LOST}),
    Step.DONE: frozenset(),
    Step.FAILED: frozenset(),
    Step.JOB_ENDED: frozenset(),
    Step.LOST: frozenset(),
}

ALLOWED_IN_SWAP: dict[Step, frozenset[Step]] = {
    Step.PREPARING: frozenset({Step.QUIESCING, Step.ROLLING_BACK}),
    Step.QUIESCING: frozenset({Step.FREEZING, Step.ROLLING_BACK}),
    Step.FREEZING: frozenset({Step.RESUMING, Step.ROLLING_BACK, Step.LOST}),
    Step.RESUMING: frozenset({Step.DONE}),
    Step.ROLLING_BACK: frozenset({Step.FAILED, Step.JOB_ENDED}),
    Step.DONE: frozenset(),
    Step.FAILED: frozenset(),
    Step.JOB_ENDED: frozenset(),
    Step.LOST: frozenset(),
}
"""FREEZING is where the host brings the device state over; until it has told what became of that,
nothing else is known."""

ENDS = frozenset(step for step, after in ALLOWED.items() if not after)
