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
    look: Inspected,
    ask: Callable[[Inspected], Awaitable[Reserved]],
    inspect: Callable[[], Awaitable[Inspected]],
) -> tuple[Inspected, Reserved]:
    """Ask the destination; return the survey that it accepted and its answer. If it refuses and an
    open file is gone meanwhile, ask once more without that file. Raises Refused."""
    try:
        return look, await ask(look)
    except Refused:
        if not any(file.inode for file in look.survey.needed):
            raise
        left = lasting(look.survey, (await inspect()).survey)
        if left.needed == look.survey.needed:
            raise
    look = msgspec.structs.replace(look, survey=left)
    return look, await ask(look)


def lasting(first: Survey, second: Survey) -> Survey:
    """Return ``first`` without the open files on shared paths that ``second`` does not have any
    more, or has with another inode."""
    there = {(file.path, file.inode) for file in second.needed}
    kept = [file for file in first.needed if not file.inode or (file.path, file.inode) in there]
    return replace(first, needed=tuple(kept))


def without(survey: Survey) -> Survey:
    """Return the survey without open files on shared paths; the image of a frozen tree has them."""
    return replace(survey, needed=tuple(file for file in survey.needed if not file.inode))
