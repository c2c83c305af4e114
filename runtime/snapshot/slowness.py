# SPDX-License-Identifier: Apache-2.0
"""Measures how much training a snapshot costs its job besides the pause: copying takes cores.

The agents count the job's progress as they do for a move (cost/lost_time.py). The ranks of a job
advance together, so one capsule is watched. Nothing waits for this: the result comes some seconds
after the snapshot.
"""

from __future__ import annotations

import logging
import time

from ...errors import LiveshiftError
from .. import messages
from ..cost.lost_time import NotMeasured, lost_s
from ..messages import Worked
from ..messages.answers import expected
from ..model.jobs import Capsule
from .context import SnapshotContext

log = logging.getLogger("liveshift.snapshot")

REQUEST_S = 5.0
WATCHED_S = 30.0
"""A host may take this long to answer EndMeasure: it first watches the capsule for some seconds."""
TAKES_S = 15.0
"""A measurement ends within so many seconds after the snapshot, as a rule. If the next one begins
sooner, the measurement would be of both."""


class Slowness:
    """One measurement. ``name``: of the snapshot; the source knows the measurement by it."""

    def __init__(self, context: SnapshotContext, name: str, capsule: Capsule) -> None:
        self._context = context
        self._name = name
        self._capsule = capsule.name
        self._host = capsule.host
        self._begun: float | None = None

    async def begin(self) -> None:
        """Let the source note how far the capsule is; never raises."""
        asked = time.monotonic()
        try:
            start = messages.StartMeasure(self._name, self._capsule)
            await self._context.request(self._host, start, REQUEST_S)
        except LiveshiftError as error:
            log.info("%s: how it slows the job down is not measured: %s", self._name, error)
            return
        self._begun = (asked + time.monotonic()) / 2

    async def end(self, pause_s: float) -> float | None:
        """Return the seconds that the job has lost besides a pause of ``pause_s`` seconds. None:
        that could not be measured. Takes some seconds; never raises."""
        if self._begun is None:
            return None
        end, asked = messages.EndMeasure(self._name, self._capsule), time.monotonic()
        try:
            answer = await self._context.request(self._host, end, WATCHED_S)
            worked = expected(Worked, self._host, end, answer)
            lost = lost_s(asked - self._begun + worked.seconds, worked, worked)
        except (LiveshiftError, NotMeasured) as error:
            log.info("%s: how it slowed the job down is not known: %s", self._name, error)
            return None
        return max(0.0, lost - pause_s)
