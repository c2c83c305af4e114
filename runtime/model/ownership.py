# SPDX-License-Identifier: Apache-2.0
"""Ownership: the rules that say who may run a capsule, without traffic, clocks or storage.

One host owns a capsule under one epoch (:class:`Owner`). That row of the journal is the only truth.
Ownership passes by one durable write (*commit*). The new owner may run the capsule only after a
second one (*grant*); its agent asks for it when the tree is ready to run. So no host runs the
capsule between commit and grant, and ownership may pass on again, even if the host that had it is
gone.

An agent may hold a copy that does not run: frozen at the source, or coming in at the destination.
It never decides by itself. It asks (``Claim``) again and again, and :func:`rule` gives the answer.
Orders are only hints to ask now, so lost, duplicated or late ones are harmless.

The source may let its tree go on by itself until it has *promised* (``OutgoingMigration.freeze``).
It promises before the image is complete: a complete image means that the source waits for a ruling.

test_ownership_model.py checks these functions with lost, duplicated and reordered messages
and with dying daemons: never two running copies, never zero reachable images.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .steps import ENDS, MigrationStep


@dataclass(frozen=True)
class Owner:
    """The owner of a capsule. ``granted``: the owner may run it, so a copy may run there."""

    host: str
    epoch: int
    granted: bool


class Side(enum.Enum):
    """Which side of a migration an agent holds."""

    LEAVING = "leaving"  # the frozen tree, at the source
    COMING = "coming"  # a sandbox, and the part of the image that has come


class Ruling(enum.Enum):
    WAIT = "wait"  # keep the copy as it is and ask again
    RUN = "run"  # you own it under the owner's epoch: let it run
    END = "end"  # it runs elsewhere, or will never run here: remove it


BEFORE_COMMIT = frozenset(
    {
        MigrationStep.PREPARING,
        MigrationStep.PRECOPYING,
        MigrationStep.QUIESCING,
        MigrationStep.FREEZING,
    }
)
"""In these steps of a migration the source's copy waits for the decision."""

BEFORE_RUNNING = frozenset(
    {MigrationStep.COMMITTED, MigrationStep.RESTORING, MigrationStep.RETURNING}
)
"""In these steps of a migration the capsule may still return to the source's copy."""


ANNOUNCED = BEFORE_COMMIT | {MigrationStep.RESTORING}
"""In these steps of a migration a prepared destination may still get the capsule: the planned one,
or another spare after that one failed."""


AFTER_RUNNING = frozenset(
    {MigrationStep.RESUMING, MigrationStep.FINISHING, MigrationStep.DONE, MigrationStep.LOST}
)
"""From these steps on the source's copy is obsolete, whichever host has the capsule now."""


def rule(side: Side, host: str, epoch: int, owner: Owner, step: MigrationStep | None) -> Ruling:
    """The ruling on a copy that ``host`` holds for a migration.

    ``epoch``: the copy was frozen under it (LEAVING), or must run under it (COMING). ``step``: the
    step or the end of that migration; None when it is unknown. The caller must grant RUN durably
    before it answers, and may answer RUN only to a copy that is ready to run at once.
    """
    mine = owner.host == host
    if side is Side.LEAVING:
        if step in AFTER_RUNNING:
            return Ruling.END
        if mine:
            return Ruling.WAIT if step in BEFORE_COMMIT else Ruling.RUN
        return Ruling.WAIT if step in BEFORE_RUNNING else Ruling.END
    if mine and owner.epoch == epoch:
        return Ruling.RUN
    if step is None or step in ENDS:
        return Ruling.END
    if mine or step in (MigrationStep.RETURNING, MigrationStep.ROLLING_BACK):
        # This host owns it under another epoch: the order for that one is on its way. Other
        # hosts keep theirs too: if the source is gone, this image is the last one.
        return Ruling.WAIT
    return Ruling.WAIT if step in ANNOUNCED and epoch == owner.epoch + 1 else Ruling.END


def is_stray(host: str, epoch: int, owner: Owner, moving: bool) -> bool:
    """Whether a copy that runs on ``host`` under ``epoch`` must not run.

    ``moving``: a migration under way holds the copy. Then it is frozen, and its agent asks for a
    ruling.
    """
    return owner.host != host and epoch < owner.epoch and not moving


def may_pass(owner: Owner, still: bool) -> bool:
    """Whether ownership may pass on (under ``owner.epoch + 1``).

    ``still``: the owner is known to hold the capsule without running it, and will not run it
    before it asks again. Either the source has promised, or the destination has reported that its
    restore failed. Ownership may pass to the same host again; earlier rulings and attempts are then
    void.
    """
    return still or not owner.granted
