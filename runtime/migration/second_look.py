# SPDX-License-Identifier: Apache-2.0
"""Open files on shared paths come and go: one that the destination lacks may have been deleted
since the source saw it. So before it stands in the way, the source looks again."""

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
    """The destination's answer, and what it was asked with. Where it refuses, and some open file
    has gone meanwhile, it is asked once more without that. Raises Refused."""
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
    """``first`` without the open files of shared paths that are not open any more, or are others
    of the same name by now."""
    there = {(file.path, file.inode) for file in second.needed}
    kept = [file for file in first.needed if not file.inode or (file.path, file.inode) in there]
    return replace(first, needed=tuple(kept))


def without(survey: Survey) -> Survey:
    """Without any of them, for a tree that has been stopped since: its image says which it has."""
    return replace(survey, needed=tuple(file for file in survey.needed if not file.inode))
