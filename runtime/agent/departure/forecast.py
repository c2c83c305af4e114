# SPDX-License-Identifier: Apache-2.0
"""The source looks at a capsule before it sends memory: whether that can go ahead, how large it is,
and how much it writes."""

from __future__ import annotations

import logging
import time

from .... import units
from ....criu_glue.capsule.tree import tasks
from ....criu_glue.memory.source.tracker import MemoryTracker
from ....criu_glue.survey.footprint import footprint
from ....criu_glue.survey.found import Footprint
from ....errors import LiveshiftError
from ...config.cluster import PrecopySettings
from ...cost.model import LOOK_S
from ...messages import Writing
from ...model.snapshots import KEPT_FREE
from ..host import host_facts
from ..host.running_capsule import RunningCapsule

log = logging.getLogger("liveshift.forecast")

LOOKS = 3
"""The number of short looks at how much a capsule writes. Each is about as long as the time between
the last round and the boundary, whose writes are left for the freeze."""

LONG_LOOK_S = 1.0

SHARED_MOST = 256 << 20
"""Pre-copy is refused if processes share more than this many bytes copy on write, and also more
than a quarter of their private bytes: each restored process would have its own copy."""


def forecast_memory(
    host: str, resident: RunningCapsule, settings: PrecopySettings, watch: bool, room: int = 0
) -> tuple[Footprint, Writing | None, str]:
    """Return (its size, what it writes if ``watch``, why only a full dump is possible).

    The last is empty if pre-copy can copy its memory while it trains. ``room``: so many bytes may
    be copied for each process that are shared now.
    """
    size = footprint(resident.sandbox)
    why = _not_followed(host, settings) or _shares_too_much(size, room)
    writing = measure_writing(resident) if watch and not why else None
    return size, writing, why


def room_for_copies(gives_way: int = 0) -> int:
    """Bytes of memory that a rewind may take here besides what the capsule has now. A migration has
    a full dump as the better way; a snapshot has no other one. ``gives_way``: bytes that images
    take which a rewind would drop for it; without them the first copy that this host keeps would be
    the reason for which the capsule has no further snapshot."""
    return host_facts.memory_to_spare(KEPT_FREE) + gives_way


def full_dump_because(host: str, resident: RunningCapsule, settings: PrecopySettings) -> str:
    """Why CRIU's image must carry all memory of a capsule on ``host``, in words; "" if the memory
    can go ahead while the capsule trains."""
    return _not_followed(host, settings) or _shares_too_much(footprint(resident.sandbox), 0)


def _not_followed(host: str, settings: PrecopySettings) -> str:
    if not settings.enabled:
        return "precopy.enabled is false in the cluster file"
    if why := MemoryTracker.probe():
        return f"{host}: {why}"
    return ""


def _shares_too_much(size: Footprint, room: int) -> str:
    shared = size.copied - size.private
    if shared > max(SHARED_MOST, room) and shared > size.private / 4:
        return (
            f"its processes share {units.size(shared)} copy on write, of which each would have its"
            " own copy otherwise"
        )
    return ""


def measure_writing(
    resident: RunningCapsule, looks: int = LOOKS, long_s: float = LONG_LOOK_S
) -> Writing | None:
    """What its processes write within the next seconds, from ``looks`` short looks and a long one;
    None if the tracker cannot see that."""
    tracker = MemoryTracker(lambda: [task.pid for task in tasks(resident.sandbox)])

    def written(seconds: float) -> tuple[int, float]:
        began = time.monotonic()
        time.sleep(seconds)
        return tracker.count_written(), time.monotonic() - began

    try:
        tracker.count_written()
        short = [written(LOOK_S) for _ in range(looks)]
        size, seconds = written(long_s)
        return Writing(max(found / took for found, took in short), size, seconds)
    except LiveshiftError as error:
        log.warning("%s: what it writes cannot be seen: %s", resident.spec.name, error)
        return None
    finally:
        tracker.close()
