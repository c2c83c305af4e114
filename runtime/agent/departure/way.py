# SPDX-License-Identifier: Apache-2.0
"""The source chooses in which way a capsule's memory goes; cost/model.py has the rule."""

from __future__ import annotations

import time

import msgspec

from ...config.choices import Way
from ...messages import Chosen, Situation, StartPrecopy
from ..host.running_capsule import RunningCapsule
from .forecast import measure_writing
from .precopy import PrecopyRounds

SHORT_LOOK_S = 0.6
"""Seconds of the long look at what a capsule writes, if the choice of a way waits for it."""


def choose_way(
    rounds: PrecopyRounds, request: StartPrecopy, resident: RunningCapsule, asked: float
) -> None:
    """Choose the way for a request that came at ``asked`` (monotonic seconds). Look at what the
    capsule writes only if that can matter."""

    def choose(situation: Situation) -> Chosen:
        left = max(0.01, request.within - (time.monotonic() - asked)) if request.within else 0.0
        return rounds.choose_way(situation, request.max_pause, left, Way(request.way))

    if (plan := request.plan) is None or not choose(plan).undecided:
        return
    written = measure_writing(resident, 1, SHORT_LOOK_S)
    if written is not None:
        choose(msgspec.structs.replace(plan, written=written))
