# SPDX-License-Identifier: Apache-2.0
"""What an agent knows of GPUs before a move: it surveys capsules on this host, and chooses GPUs for
capsules that come. No other reservation gets those GPUs meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from ....criu_glue.survey.found import Survey
from ....cuda_snapshot.assignment import MARGIN
from ....interposer.page import PageError
from ...messages import GpuSurvey, Reserve
from ...model.snapshots import is_restore_name
from ..host import host_facts, rank_pages
from ..host.running_capsule import RunningCapsule
from . import preflight as gpu_preflight
from . import survey as gpu_survey
from .preflight import GpuPlan
from .watch import GpuWatch

RELEASED_S, LOOK_AGAIN_S = 5.0, 0.1
"""The driver releases the memory of an ended process within so many seconds; how often to look."""

IN_IMAGE = "the image of a snapshot has it"
"""Why no device memory is streamed to a host that restores such an image."""


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
            plan = await self._planned(request, request.gpu)
            words = f"is promised to {request.spec.name} ({request.migration})"
            used = request.gpu.used
            mine = [] if request.dry_run else [new for old, new in plan.pairs if old in used]
            self.chosen |= dict.fromkeys(mine, words)
        try:
            yield plan
        finally:
            for uuid in mine:
                self.chosen.pop(uuid, None)

    async def _planned(self, request: Reserve, gpu: GpuSurvey) -> GpuPlan:
        """The plan. Before a rewind, earlier copies have ended; the driver may release their memory
        a little later, and this waits for it."""
        until = time.monotonic() + (RELEASED_S if is_restore_name(request.migration) else 0.0)
        while True:
            plan, room = await asyncio.to_thread(self._plan, request, gpu)
            if (room and not plan.findings) or time.monotonic() >= until:
                return plan
            await asyncio.sleep(LOOK_AGAIN_S)

    def _plan(self, request: Reserve, gpu: GpuSurvey) -> tuple[GpuPlan, bool]:
        """The plan, and whether each GPU that the capsule would be on again has room for it."""
        here = self._watch.host(self._taken())
        if is_restore_name(request.migration):
            here = msgspec.structs.replace(here, fast_path=IN_IMAGE)
        usable = None if self._watch.helper() is None else here
        wanted = dict(request.gpus_wanted)
        plan = gpu_preflight.plan(gpu, usable, self._watch.why_none, wanted, self._host)
        free = {each.uuid: each.free_bytes for each in here.gpus}
        back = {old: gpu.used[old] for old, new in plan.pairs if old == new and old in gpu.used}
        return plan, all(free[uuid] >= used + MARGIN for uuid, used in back.items())
