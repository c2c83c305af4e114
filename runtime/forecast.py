# SPDX-License-Identifier: Apache-2.0
"""The source's look at a capsule for a prediction: how large it is, how much it writes."""

from __future__ import annotations

import logging
import time

from ..criu_glue.footprint import Footprint, footprint
from ..criu_glue.memory.tracker import MemoryTracker
from ..criu_glue.survey import tasks
from ..errors import LiveshiftError
from .config import Precopy
from .precopy import full_dump_because
from .resident import Resident

log = logging.getLogger("liveshift.forecast")

LOOKS, LOOK_S = 5, 0.2
"""How often, and for how long each time, it is looked at how much a capsule writes. About as long
as between a last round and the boundary: in longer ones what is written again and again counts
once."""


def look(resident: Resident, settings: Precopy, watch: bool) -> tuple[Footprint, float | None, str]:
    """(how large it is, bytes it writes a second if that is known, why it has to be dumped whole).

    The last is empty where its memory can be copied while it trains.
    """
    why = full_dump_because(resident, settings)
    rate = look_at_writing(resident) if watch and not why else None
    return footprint(resident.room), rate, why


def look_at_writing(resident: Resident) -> float | None:
    """Bytes a second that its processes write anew, in the busiest of some looks; None where that
    can't be seen."""
    tracker = MemoryTracker(lambda: [task.pid for task in tasks(resident.room)])
    try:
        tracker.look()
        most = 0.0
        for _ in range(LOOKS):
            began = time.monotonic()
            time.sleep(LOOK_S)
            most = max(most, tracker.look() / (time.monotonic() - began))
        return most
    except LiveshiftError as error:
        log.warning("%s: what it writes cannot be seen: %s", resident.spec.name, error)
        return None
    finally:
        tracker.close()
