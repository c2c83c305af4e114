# SPDX-License-Identifier: Apache-2.0
"""When a capsule's memory cannot go ahead, and CRIU's image must carry all of it."""

from __future__ import annotations

from .... import units
from ....criu_glue.memory.source.tracker import MemoryTracker
from ....criu_glue.survey.footprint import footprint
from ...config.cluster import PrecopySettings as Settings
from ..host.running_capsule import RunningCapsule

SHARED_MOST = 256 << 20
"""Pre-copy is refused if processes share more than this many bytes copy on write, and also more
than a quarter of their private bytes: each restored process would have its own copy."""


def full_dump_because(host: str, resident: RunningCapsule, settings: Settings) -> str:
    """Why ``host`` cannot send a capsule's memory while it trains, in words; "" if it can."""
    if not settings.enabled:
        return "precopy.enabled is false in the cluster file"
    if why := MemoryTracker.probe():
        return f"{host}: {why}"
    size = footprint(resident.sandbox)
    shared = size.copied - size.private
    if shared > SHARED_MOST and shared > size.private / 4:
        return (
            f"its processes share {units.size(shared)} copy on write, of which each would have its"
            " own copy otherwise"
        )
    return ""
