# SPDX-License-Identifier: Apache-2.0
"""What a destination has of a capsule's memory before any of it comes: that of its siblings.

Ranks of one job have much in common: a data-parallel replica's parameters, most of an interpreter.
Only capsules of the same job are looked at: a hash tells whoever hears it something of the page.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from ..criu_glue.memory.donors import Donors
from ..criu_glue.room import Room
from ..criu_glue.tree import tasks
from ..errors import StepFailed
from .messages import OFFER_LIMIT, CapsuleSpec
from .resident import Resident

SECONDS = 3.0
"""That a look may take: somebody waits for the reservation, though the job trains meanwhile."""

MEMORY_LIMIT = OFFER_LIMIT // 8 * 4096
"""Bytes of memory that an offer can speak of; a hash has 8 bytes."""


def siblings(spec: CapsuleSpec, residents: Iterable[Resident]) -> list[Room]:
    """Where the others of its job run, among those that are here."""
    return [
        resident.room
        for resident in residents
        if resident.spec.job == spec.job
        and resident.spec.name != spec.name
        and resident.code is None
    ]


def look(rooms: Sequence[Room], seconds: float = SECONDS) -> Donors | None:
    """What is in memory now in these rooms; None where there is nothing. Blocks for so long at
    most."""
    if not rooms:
        return None
    until = time.monotonic() + seconds
    try:
        donors = Donors(MEMORY_LIMIT)
    except StepFailed:  # no memory for it: then all of it comes
        return None
    found = 0
    for task in (task for room in rooms for task in tasks(room)):
        found += donors.add_process(task.pid, lambda: time.monotonic() > until)
    if found:
        return donors
    donors.close()
    return None
