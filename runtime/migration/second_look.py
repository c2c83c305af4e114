# SPDX-License-Identifier: Apache-2.0
"""Looks a second time before a missing open file stops a migration.

If the destination lacks an open file on a shared path, the job may have deleted the file since the
source's survey. So the source surveys again before the migration is refused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec

from ...criu_glue.survey.found import Survey
from ...errors import Refused
from ..messages import Inspected, Reserved


async def reserve(
    inspected: Inspected,
    request: Callable[[Inspected], Awaitable[Reserved]],
    inspect: Callable[[], Awaitable[Inspected]],
) -> tuple[Inspected, Reserved]:
    """Reserve at the destination; return the survey that it accepted and its answer. If it refuses
    and an open file is gone meanwhile, try once more without that file. Raises Refused."""
    try:
        return inspected, await request(inspected)
    except Refused:
        if not any(file.inode for file in inspected.survey.needed):
            raise
        left = lasting(inspected.survey, (await inspect()).survey)
        if left.needed == inspected.survey.needed:
            raise
    inspected = msgspec.structs.replace(inspected, survey=left)
    return inspected, await request(inspected)


def lasting(first: Survey, second: Survey) -> Survey:
    """Return ``first`` without the open files on shared paths that ``second`` does not have any
    more, or has with another inode."""
    there = {(file.path, file.inode) for file in second.needed}
    kept = [file for file in first.needed if not file.inode or (file.path, file.inode) in there]
    return replace(first, needed=tuple(kept))


def without(survey: Survey) -> Survey:
    """Return the survey without open files on shared paths; the image of a frozen tree has them."""
    return replace(survey, needed=tuple(file for file in survey.needed if not file.inode))
