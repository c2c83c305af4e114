# SPDX-License-Identifier: Apache-2.0
"""Adds to a prediction what the move costs: the way, the lost training, when the host is empty."""

from __future__ import annotations

import msgspec

from ... import units
from ..config.choices import Way
from ..config.cluster import PrecopySettings as Settings
from ..config.timeouts import Timeouts
from ..messages import Chosen, Inspected, Prediction, Reserved
from . import model as cost
from .prediction import (
    FILLING,
    FIRST_FILL,
    FULL_DUMP,
    REFILL,
    Lessons,
    seconds_ahead,
    with_memory,
    without_memory,
)


def costed(
    found: Prediction,
    inspected: Inspected,
    reserved: Reserved,
    link: float | None,
    lessons: Lessons,
    learnt: cost.Learnt,
    settings: Settings,
    timeouts: Timeouts,
    way: str = "",
    within: float | None = None,
) -> Prediction:
    """The prediction with the way that the orchestrator would choose, and with its cost.

    ``link``: bytes per second that the network carries, None where that is not known. ``way``:
    replaces precopy.way. ``within``: seconds until the host must be empty.
    """
    files_s = seconds_ahead(inspected.survey.along)
    if found.way == FULL_DUMP:
        besides = cost.besides(learnt, files_s)
        return msgspec.structs.replace(found, lost_s=found.seconds, empty_s=besides + found.seconds)
    given = cost.situation(
        found.memory,
        inspected.writing,
        link,
        without_memory(found),
        inspected.cores,
        reserved.cores,
        learnt,
        settings.slow_down,
        max(0.1, lessons.factors.get("memory", 1.0)),
        lessons.factors.get("restore", 1.0) / REFILL,
        lessons.factors.get(FILLING, 1.0) / FIRST_FILL,
        files_s,
    )
    pause = cost.max_pause(settings, timeouts)
    chosen = cost.choose(given, pause, within, Way(way or settings.way))
    return decided(found, chosen)


def decided(found: Prediction, chosen: Chosen) -> Prediction:
    """The prediction with the chosen way. The orchestrator chooses before the move, and the source
    chooses again once it has measured the link."""
    best, given = chosen.estimate, chosen.given
    found = with_memory(
        found, best.left, given.link, f"of {units.size(found.memory)}: way {best.way}"
    )
    return msgspec.structs.replace(
        found,
        how=best.way,
        because=chosen.because,
        slower_s=best.slower_s,
        lost_s=best.slower_s + found.seconds,
        empty_s=best.empty_s - best.pause_s + found.seconds,
        uncovered=best.uncovered,
        limited=best.speed < given.reach,
        weighed=chosen.weighed,
        given=given,
        needs_s=chosen.needs_s,
    )
