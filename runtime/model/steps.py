# SPDX-License-Identifier: Apache-2.0
"""The states of a migration (steps), and which step may follow which. They are defined only here.

The happy path reads top to bottom. Before COMMITTED every failure leads through ROLLING_BACK, and
only the source may run the capsule. From COMMITTED on only the destination may. If the restore
fails there, ownership goes back (RETURNING) under a further epoch. If the command ends by itself
before COMMITTED, the migration ends too (JOB_ENDED). After a restart of the orchestrator a
migration goes on with ROLLING_BACK, RESTORING or FINISHING. ROLLING_BACK leads to COMMITTED if the
image is complete and the source has gone meanwhile.

A rewind of its job may end a migration in each step (REWOUND). migration/beside_rewinds.py says
which ones it lets come to their end.

A swap of GPUs inside a host has fewer steps: it sends nothing, and the owner of the capsule stays
the same (:data:`ALLOWED_IN_SWAP`).
"""

from __future__ import annotations

import enum


class MigrationStep(enum.Enum):
    """A migration is in exactly one of these steps. The value is the text in MigrationRow.state and
    in the journal. A migration whose step is in ENDS is over."""

    PREPARING = "preparing"  # survey, preflight, an empty sandbox; the job trains
    PRECOPYING = "pre-copying"  # memory and files go to the destination; the job trains
    QUIESCING = "quiescing"  # all ranks come to a boundary, and wait there
    FREEZING = "freezing"  # network locked, dump into the wire; the job is frozen
    COMMITTED = "committed"  # the journal names the destination
    RESTORING = "restoring"  # CRIU restores the tree at the destination
    RESUMING = "resuming"  # the tree runs; the orchestrator waits for its first collective
    FINISHING = "finishing"  # the source removes the frozen copy
    DONE = "done"
    ROLLING_BACK = "rolling back"  # not committed: the source goes on
    RETURNING = "returning"  # committed, not restored: ownership goes back to the source
    FAILED = "failed"  # the source has the capsule, as if nothing had happened
    JOB_ENDED = "job ended"  # the command ended by itself at the source, before the commit
    LOST = "lost"  # no host has the capsule any more; the job has ended
    REWOUND = "rewound"  # its job was taken back to a snapshot meanwhile


ALLOWED: dict[MigrationStep, frozenset[MigrationStep]] = {
    MigrationStep.PREPARING: frozenset(
        {MigrationStep.PRECOPYING, MigrationStep.ROLLING_BACK, MigrationStep.REWOUND}
    ),
    MigrationStep.PRECOPYING: frozenset(
        {MigrationStep.QUIESCING, MigrationStep.ROLLING_BACK, MigrationStep.REWOUND}
    ),
    MigrationStep.QUIESCING: frozenset(
        {MigrationStep.FREEZING, MigrationStep.ROLLING_BACK, MigrationStep.REWOUND}
    ),
    MigrationStep.FREEZING: frozenset(
        {MigrationStep.COMMITTED, MigrationStep.ROLLING_BACK, MigrationStep.REWOUND}
    ),
    MigrationStep.COMMITTED: frozenset({MigrationStep.RESTORING, MigrationStep.REWOUND}),
    MigrationStep.RESTORING: frozenset(
        {
            MigrationStep.RESUMING,
            MigrationStep.RETURNING,
            MigrationStep.LOST,
            MigrationStep.REWOUND,
        }
    ),
    MigrationStep.RESUMING: frozenset({MigrationStep.FINISHING, MigrationStep.REWOUND}),
    MigrationStep.FINISHING: frozenset({MigrationStep.DONE, MigrationStep.REWOUND}),
    MigrationStep.ROLLING_BACK: frozenset(
        {
            MigrationStep.COMMITTED,
            MigrationStep.FAILED,
            MigrationStep.JOB_ENDED,
            MigrationStep.LOST,
            MigrationStep.REWOUND,
        }
    ),
    MigrationStep.RETURNING: frozenset(
        {
            MigrationStep.FAILED,
            MigrationStep.RESTORING,
            MigrationStep.LOST,
            MigrationStep.REWOUND,
        }
    ),
    MigrationStep.DONE: frozenset(),
    MigrationStep.FAILED: frozenset(),
    MigrationStep.JOB_ENDED: frozenset(),
    MigrationStep.LOST: frozenset(),
    MigrationStep.REWOUND: frozenset(),
}

ALLOWED_IN_SWAP: dict[MigrationStep, frozenset[MigrationStep]] = {
    MigrationStep.PREPARING: frozenset(
        {MigrationStep.QUIESCING, MigrationStep.ROLLING_BACK, MigrationStep.REWOUND}
    ),
    MigrationStep.QUIESCING: frozenset(
        {MigrationStep.FREEZING, MigrationStep.ROLLING_BACK, MigrationStep.REWOUND}
    ),
    MigrationStep.FREEZING: frozenset(
        {
            MigrationStep.RESUMING,
            MigrationStep.ROLLING_BACK,
            MigrationStep.LOST,
            MigrationStep.REWOUND,
        }
    ),
    MigrationStep.RESUMING: frozenset({MigrationStep.DONE, MigrationStep.REWOUND}),
    MigrationStep.ROLLING_BACK: frozenset(
        {MigrationStep.FAILED, MigrationStep.JOB_ENDED, MigrationStep.REWOUND}
    ),
    MigrationStep.DONE: frozenset(),
    MigrationStep.FAILED: frozenset(),
    MigrationStep.JOB_ENDED: frozenset(),
    MigrationStep.LOST: frozenset(),
    MigrationStep.REWOUND: frozenset(),
}
"""The allowed steps of a swap. In FREEZING the host moves the device state to the other GPU. Until
the host reports the result, the orchestrator knows nothing else."""

ENDS = frozenset(step for step, after in ALLOWED.items() if not after)
