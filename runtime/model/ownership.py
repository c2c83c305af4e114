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

A *rewind* takes all capsules of a job back to a snapshot, also from owners that run them. It does
not wait for a promise, since the host may be dead. Instead a job counts its rewinds, each copy
knows under which count it was made, and a copy of an earlier count must end (docs/design/
ownership.md, "Rewinds").

test_ownership_model.py and test_rewind_model.py check these functions with lost, duplicated and
reordered messages and with dying daemons: never two running copies, never zero reachable images.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass

from .steps import ENDS, MigrationStep

REWIND_EPOCHS = 2
"""A rewind adds this to each capsule's epoch. A migration may have announced the next epoch to its
destination, so the rewound capsule gets the one after that."""


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
    """The orchestrator answers each claim with one of these. The agent then does that with the copy
    that the claim names. The value is the text in messages.Ruled."""

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


MAY_SAVE = BEFORE_RUNNING | {MigrationStep.FREEZING}
"""In these steps of a migration the capsule may go on though one of the two hosts is lost: from the
destination's complete image, or from the source's copy. So a rewind that only that loss needs
waits. While a migration is rolled back, the destination's image may be complete, too."""


ANNOUNCED = BEFORE_COMMIT | {MigrationStep.RESTORING}
"""In these steps of a migration a prepared destination may still get the capsule: the planned one,
or another spare after that one failed."""


AFTER_RUNNING = frozenset(
    {MigrationStep.RESUMING, MigrationStep.FINISHING, MigrationStep.DONE, MigrationStep.LOST}
)
"""From these steps on the source's copy is obsolete, whichever host has the capsule now."""


def rule(
    side: Side,
    host: str,
    epoch: int,
    owner: Owner,
    step: MigrationStep | None,
    *,
    copy_rewinds: int = 0,
    job_rewinds: int = 0,
) -> Ruling:
    """The ruling on a copy that ``host`` holds for a migration, or for a rewind (COMING).

    ``epoch``: the copy was frozen under it (LEAVING), or must run under it (COMING). ``step``: the
    step or the end of that migration; None when it is unknown, and for a rewind.
    ``copy_rewinds``: the job had been rewound so often when the copy was made; ``job_rewinds``: it
    has been now. The caller must grant RUN durably before it answers, and may answer RUN only to a
    copy that is ready to run at once.
    """
    if copy_rewinds < job_rewinds:
        return Ruling.END
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


def rule_held(number: int, newest: int, taking: int) -> Ruling:
    """The ruling on a host's image of snapshot ``number``: WAIT to keep it, or END.

    ``newest``: the job's newest complete snapshot; ``taking``: the one that is being taken. Each is
    0 if there is none. So an image is kept until the journal has a newer complete snapshot.
    """
    return Ruling.WAIT if number in (newest, taking) else Ruling.END


def is_stray(
    host: str,
    epoch: int,
    owner: Owner,
    moving: bool,
    *,
    copy_rewinds: int = 0,
    job_rewinds: int = 0,
) -> bool:
    """Whether a copy that runs on ``host`` under ``epoch`` must not run.

    ``moving``: a migration under way holds the copy. Then it is frozen, and its agent asks for a
    ruling. ``copy_rewinds``, ``job_rewinds``: as in :func:`rule`.
    """
    if copy_rewinds < job_rewinds:
        return True
    return owner.host != host and epoch < owner.epoch and not moving


def may_pass(owner: Owner, still: bool) -> bool:
    """Whether ownership may pass on (under ``owner.epoch + 1``).

    ``still``: the owner is known to hold the capsule without running it, and will not run it
    before it asks again. Either the source has promised, or the destination has reported that its
    restore failed. Ownership may pass to the same host again; earlier rulings and attempts are then
    void.
    """
    return still or not owner.granted


def last_whole(owners: Collection[Owner], before: Collection[str]) -> frozenset[str]:
    """The hosts on which the job last ran as a whole, for a rewind that replaces ``owners``.

    ``before``: the same set for the job's last rewind, empty once :func:`may_restore` was true for
    it. A job some of whose capsules were not granted cannot have trained under these owners.
    """
    if all(owner.granted for owner in owners):
        return frozenset(owner.host for owner in owners)
    return frozenset(before)


def may_restore(before: Collection[str], ended: Collection[str]) -> bool:
    """Whether a rewind may restore capsules: the job's earlier copies cannot train any more.

    ``before``: as :func:`last_whole` returned it. ``ended``: hosts that have answered that no
    earlier copy of the job is left there. A job whose hosts are all cut off may train on, and the
    overlay fences no file. Once one of its capsules has certainly ended, the others can only end
    the collective in which they are. That a host is heard when the rewind begins does not suffice:
    it may be cut off before it has ended its copy.
    """
    return not before or any(host in ended for host in before)
