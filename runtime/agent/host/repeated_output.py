# SPDX-License-Identifier: Apache-2.0
"""Keeps what a capsule printed on this host before it was taken back to a snapshot.

A rewind cuts the capsule's log back, and the capsule prints the lines again. The log of the copy
that ends stays here, for ``logs --with-repeated``. The host does not know where the snapshot cuts
it, so it keeps all segments that the copy itself has begun. Their names are offsets that no other
copy uses (output.REWIND). So the segments of several copies lie in one directory, which is a log.

A host keeps at most ``MOST`` times ``logs.max`` bytes for each capsule, and MOST_SEGMENTS segments;
the oldest go first. So at least the last ``logs.max`` bytes of the last copy stay. All of it goes
with its job.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Collection
from pathlib import Path

from ....criu_glue.capsule import output
from ....errors import NotFound
from ...messages import ReadRepeated, Repeated
from . import sandbox_owner
from .running_capsule import READ_LIMIT, CapsuleFactory, RunningCapsule

log = logging.getLogger("liveshift.repeated")

MOST = 2
"""A segment has up to ``logs.max`` bytes, and the last one may be nearly empty."""
MOST_SEGMENTS = 16
"""A copy that has printed nothing leaves an empty segment, and a job may be rewound for weeks."""


def keep(factory: CapsuleFactory, resident: RunningCapsule) -> None:
    """Take the log out of the directory of a copy that has ended, before that is removed.

    It is only moved, not copied: a job waits meanwhile. Never raises: what cannot be kept is lost,
    and the rewind goes on.
    """
    if resident.removed or not sandbox_owner.owns(resident.sandbox):
        return
    log_dir, rewinds = resident.sandbox.plan.log, resident.overlay.rewinds
    to = _place(factory, resident.spec.name)
    try:
        begins = output.segments(log_dir)
        # A copy that was restored has an empty segment of this rewind at least. One that was
        # started has begun at 0, also if an earlier job of its name was rewound.
        own = [b for b in begins if b >= rewinds * output.REWIND] or begins
        to.mkdir(mode=0o700, parents=True, exist_ok=True)
        for start in own:
            output.segment(log_dir, start).rename(output.segment(to, start))
        if not own:  # it has printed nothing: that is known now
            output.segment(to, 0).touch(mode=0o600)
        _bound(to, MOST * resident.sandbox.plan.log_max)
    except OSError as error:
        log.warning("what %s printed is not kept: %s", resident.spec.name, error)


def read(factory: CapsuleFactory, request: ReadRepeated) -> Repeated:
    """Read what one copy printed, from ``offset`` on and before ``until``.

    Raises NotFound if nothing of that copy is kept here.
    """
    kept = _place(factory, request.capsule)
    first = output.rewinds_at(request.offset) * output.REWIND
    there = output.segments(kept) if kept.is_dir() else []
    if not any(first <= start < request.until for start in there):
        raise NotFound(f"{factory.host} keeps nothing of what {request.capsule} printed then")
    at, data = output.read(kept, request.offset, READ_LIMIT)
    if not data or at >= request.until:
        return Repeated(b"", request.until)
    return Repeated(data, at + len(data), at - request.offset)


def forget_job(factory: CapsuleFactory, job: str) -> None:
    for kept in _place(factory, "").glob(f"{job}.*"):
        shutil.rmtree(kept, ignore_errors=True)


def forget_unknown(factory: CapsuleFactory, jobs: Collection[str]) -> None:
    """Remove what is kept of all other jobs."""
    for kept in _place(factory, "").glob("*"):
        if kept.name.rpartition(".")[0] not in jobs:
            shutil.rmtree(kept, ignore_errors=True)


def _bound(kept: Path, most: int) -> None:
    begins = output.segments(kept)
    left = output.size(kept)
    for at, start in enumerate(begins[:-1]):
        if left <= most and len(begins) - at <= MOST_SEGMENTS:
            return
        with contextlib.suppress(FileNotFoundError):
            left -= output.segment(kept, start).stat().st_size
            output.segment(kept, start).unlink()


def _place(factory: CapsuleFactory, capsule: str) -> Path:
    return factory.cluster.paths.state / "repeated" / capsule.replace("/", ".")
