# SPDX-License-Identifier: Apache-2.0
"""Before a job goes on from a snapshot: cuts the files that it was writing on shared paths back to
the sizes that they had, so that it does not write the same twice.

It is done once for the whole job, when the earlier copies have ended and before a capsule runs
again. Several capsules may write to one file, and each was dumped at its own moment: what counts is
the least size, as a capsule that was dumped earlier writes again what came after that.
"""

from __future__ import annotations

import asyncio

from ...errors import LiveshiftError, Unreachable
from ...units import some
from .. import messages
from ..messages.answers import expected
from ..model.jobs import Capsule, Job
from ..model.snapshots import Generation, image_name
from .rewind_context import RewindContext

MOST_NAMED = 5


async def cut_back(context: RewindContext, job: Job, generation: Generation) -> str:
    """Return a text for the history: which files were cut, and which could not be; "" if none had
    changed. It raises no LiveshiftError: a file that stays too long harms less than a job that does
    not go on."""
    if any(capsule.granted for capsule in job.capsules.values()):
        return ""  # some of it runs again, and may have written
    try:
        found = await asyncio.gather(
            *(_written(context, generation, capsule) for capsule in job.capsules.values())
        )
        sizes: dict[bytes, int] = {}
        for files in found:
            for path, size in files.items():
                sizes[path] = min(size, sizes.get(path, size))
        if not sizes:
            return ""
        host = next(iter(job.capsules.values())).host
        run = job.request
        limit = context.cluster.timeouts.prepare
        # Half of it: a host that has got it late must have ended before the job goes on.
        order = messages.CutBack(
            job.name, job.uid, run.gid, list(run.groups), sizes, deadline=limit / 2
        )
        answer = await context.request(host, order, limit)
        done = expected(messages.CutBackDone, host, order, answer)
    except LiveshiftError as error:
        return f"its files on shared paths are not cut back: {error}"
    texts = []
    if done.cut:
        texts.append(f"cut back to what they were: {some(done.cut, MOST_NAMED)}")
    if done.left:
        texts.append(f"left as they are, though they have changed: {some(done.left, MOST_NAMED)}")
    return "files on shared paths are " + "; ".join(texts) if texts else ""


async def _written(
    context: RewindContext, generation: Generation, capsule: Capsule
) -> dict[bytes, int]:
    look = messages.GetHeld(image_name(generation.number, capsule.index), capsule.name)
    for holder in generation.holders.get(capsule.name, ()):
        if context.is_up(holder):
            answer = await context.request(holder, look, context.cluster.timeouts.prepare)
            return expected(messages.HeldFacts, holder, look, answer).written
    raise Unreachable(f"no host that holds the image of {capsule.name} is up")
