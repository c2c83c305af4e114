# SPDX-License-Identifier: Apache-2.0
"""What an agent knows of GPUs before a move: it surveys capsules on this host, and chooses GPUs for
capsules that come. No other reservation gets those GPUs meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from ....criu_glue.survey.found import Survey
from ....interposer.page import PageError
from ...messages import GpuSurvey, Reserve
from ..host import host_facts, rank_pages
from ..host.running_capsule import RunningCapsule
from . import preflight as gpu_preflight
from . import survey as gpu_survey
from .preflight import GpuPlan
from .watch import GpuWatch


class GpuReservations:
    """``host``: the name of this host. ``taken``: returns the GPUs that moves and swaps under way
    hold, including those ``chosen`` here, as uuid → the reason in words."""

    def __init__(self, host: str, watch: GpuWatch, taken: Callable[[], dict[str, str]]) -> None:
        self._host = host
        self._watch = watch
        self._taken = taken
        self._turn = asyncio.Lock()
        self.chosen: dict[str, str] = {}
        """GPUs of reservations that are being made at the moment."""

    def survey(self, resident: RunningCapsule, found: Survey) -> GpuSurvey | None:
        """What a surveyed capsule uses of GPUs; None if it uses none. Blocks."""
        if not found.gpu_tasks:
            return None
        unreadable: dict[int, PageError] = {}

        def note(path: Path, error: PageError) -> None:
            unreadable[int(path.name)] = error

        pages = {state.pid: state for state in rank_pages.states(resident, note)}
        memory = host_facts.memory_offered(None)
        helper, host = self._watch.helper(), self._watch.host({})
        return gpu_survey.survey_devices(found, pages, helper, host, memory, unreadable)

    @contextlib.asynccontextmanager
    async def making(self, request: Reserve) -> AsyncIterator[GpuPlan]:
        """Plan for a capsule that will come. No other capsule gets its GPUs until the end of this
        context; from then on the incoming migration holds them."""
        if request.gpu is None:
            yield GpuPlan()
            return
        async with self._turn:
            plan = await asyncio.to_thread(self._plan, request, request.gpu)
            words = f"is promised to {request.spec.name} ({request.migration})"
            used = request.gpu.used
            mine = [] if request.dry_run else [new for old, new in plan.pairs if old in used]
            self.chosen |= dict.fromkeys(mine, words)
        try:
            yield plan
        finally:
            for uuid in mine:
                self.chosen.pop(uuid, None)

    def _plan(self, request: Reserve, gpu: GpuSurvey) -> GpuPlan:
        here = self._watch.host(self._taken())
        usable = None if self._watch.helper() is None else here
        wanted = dict(request.gpus_wanted)
        return gpu_preflight.plan(gpu, usable, self._watch.why_none, wanted, self._host)
