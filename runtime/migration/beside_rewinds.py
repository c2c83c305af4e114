# SPDX-License-Identifier: Apache-2.0
"""Says which migrations of a job a rewind lets come to their end. Its write ends all others: they
could save nothing, and until the rewind is written the job does not train."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from .migration import Migration


def going_on(moves: Iterable[Migration], lost: Collection[str]) -> list[Migration]:
    """The migrations, of those of a job, that its rewind lets come to their end.

    ``lost``: the capsules for which the job must go back; none if a person wants the rewind. If
    these migrations may save all of them, nothing needs to be undone in the end. Else whatever a
    migration saves is undone all the same.
    """
    moves = not_waiting(moves)
    saving = [each for each in moves if each.may_save and each.capsule.name in lost]
    if {each.capsule.name for each in saving} != set(lost):
        saving = []
    return [each for each in moves if each.must_end or each in saving]


def not_waiting(moves: Iterable[Migration]) -> list[Migration]:
    """Those of the migrations that do not just wait. One that waits saves nothing meanwhile."""
    return [each for each in moves if not each.waits]
