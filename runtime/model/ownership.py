# SPDX-License-Identifier: Apache-2.0
"""Who may run a capsule: the rules of the protocol, without traffic, clocks or storage.

A capsule is owned by one host under one epoch (:class:`Owner`); that row of the journal is all the
truth there is. Ownership passes by one durable write (*commit*), and the new owner may run the
capsule only after a second one (*grant*), for which its agent has to ask when the tree is ready to
run. So between commit and grant nobody runs it, and ownership may pass on again, whatever became
of the host that had it.

An agent that holds a copy which does not run (frozen at the source, on its way in at the
destination) never decides by itself: it asks (``Claim``), again and again, and :func:`rule` is
the answer. Every order is but a word to ask now; lost, doubled or late, it changes nothing.

The source may let its tree go on by itself until it has *promised* (``Departure.freeze``), which
is before the image is complete: a complete image means that the source waits for a ruling.

tests/test_ownership_model.py explores these very functions with lost, doubled and reordered
messages and dying daemons: never two running copies, never zero reachable images.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .steps import ENDS, Step


@dataclass(frozen=True)
class Owner:
    """Who owns a capsule. ``granted``: the owner was told to run it, so a copy may run there."""

    host: str
    epoch: int
    granted: bool


class Side(enum.Enum):
    """What an agent holds of a migration."""

    LEAVING = "leaving"  # the tree, frozen where it ran
    COMING = "coming"  # a room, and what has come of the image


class Ruling(enum.Enum):
    WAIT = "wait"  # keep it as it is and ask again
    RUN = "run"  # it is yours under the owner's epoch: let it run
    END = "end"  # it runs elsewhere, or will never run here: take it away


BEFORE_COMMIT = frozenset({Step.PREPARING, Step.PRECOPYING, Step.QUIESCING, Step.FREEZING})
"""While a migration is here, its source's copy waits for the decision."""

BEFORE_RUNNING = frozenset({Step.COMMITTED, Step.RESTORING, Step.RETURNING})
"""While a migration is here, the source's copy is what the capsule may return to."""


ANNOUNCED = BEFORE_COMMIT | {Step.RESTORING}
"""While a migration is here, a host that was to get the capsule next may get it: its destination,
and another spare when that one failed."""


AFTER_RUNNING = frozenset({Step.RESUMING, Step.FINISHING, Step.DONE, Step.LOST})
"""Once a migration has been here, the source's copy is of the past, whoever has the capsule now."""


def rule(side: Side, host: str, epoch: int, owner: Owner, step: Step | None) -> Ruling:
    """What becomes of a copy that ``host`` holds for a migration.

    ``epoch`` is the one it was frozen under (LEAVING) or is to run under (COMING); ``step`` is
    where that migration is or how it ended, None when nothing is known of it. RUN has to be
    granted before it is said, and is said only to a copy that is ready to run at once.
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
    if mine or step in (Step.RETURNING, Step.ROLLING_BACK):
        # Mine under another epoch: the order for that one is on its way. The others: should the
        # source be gone, this image is the last one.
        return Ruling.WAIT
    return Ruling.WAIT if step in ANNOUNCED and epoch == owner.epoch + 1 else Ruling.END


def is_stray(host: str, epoch: int, owner: Owner, moving: bool) -> bool:
    """Whether a copy that runs on ``host`` under ``epoch`` must not. A copy that a migration under
    way holds is frozen, and ruled on when its agent asks."""
    return owner.host != host and epoch < owner.epoch and not moving


def may_pass(owner: Owner, still: bool) -> bool:
    """Whether ownership may pass on (under ``owner.epoch + 1``).

    ``still``: the owner is known to hold the capsule without running it, and not to run it before
    it has asked anew: the source has promised, or the destination said that its restore failed.
    It may pass to its own host again: then whatever was ruled or tried before is over.
    """
    return still or not owner.granted
