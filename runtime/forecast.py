# SPDX-License-Identifier: Apache-2.0
"""The source's look at a capsule for a prediction: how large it is, how much it writes."""

from __future__ import annotations

from ..criu_glue.footprint import Footprint, footprint
from .config_memory import Precopy
from .resident import Resident

LOOK_S = 0.25
"""How long a capsule is watched for how much it writes."""


def look(resident: Resident, precopy: Precopy) -> tuple[Footprint, float | None, str]:
    """(how large it is, bytes it writes a second if that is known, why it has to be dumped whole).

    The last is empty where its memory can be copied while it trains.
    """
    why = why_full_dump(resident, precopy)
    return footprint(resident.room), None if why else look_at_writing(resident, LOOK_S), why


def why_full_dump(_resident: Resident, precopy: Precopy) -> str:
    """Why its memory cannot be copied while it trains, in words."""
    if not precopy.enabled:
        return "precopy.enabled is false in the cluster file"
    return "memory is not followed while the job trains"


def look_at_writing(_resident: Resident, _seconds: float) -> float | None:
    """Bytes a second that its processes write anew, watched for so long; None where that can't be
    seen."""
    return None
