# SPDX-License-Identifier: Apache-2.0
"""A host's part in GPU swaps: it answers the orchestrator's requests about them.

The capsule keeps its host and its owner. A note of the swap says what became of it (host_swap.py);
the orchestrator asks for that when an answer was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from ...errors import LiveshiftError, NotFound, Refused, Unreachable
from .. import messages
from .gpu import choice as gpu_choice
from .gpu import host_swap
from .gpu.devices import DeviceTree
from .gpu.host_swap import HostSwap, Stage, SwapNote
from .host.capsule_table import CapsuleTable
from .host.finished_operations import finished_by_pid
from .host.running_capsule import RunningCapsule
from .migration_registry import MigrationRegistry

log = logging.getLogger("liveshift.swap")


class GpuSwapHandlers:
    """Answers LookAtGpus, SwapGpu and SettleSwap."""

    def __init__(self, capsule_table: CapsuleTable, registry: MigrationRegistry) -> None:
        self._capsule_table = capsule_table
        self._registry = registry

    async def recover_swaps(self) -> None:
        """Finish the swaps that an earlier agent left unfinished."""
        for resident in list(self._capsule_table.capsules.values()):
            note = await asyncio.to_thread(host_swap.read, resident)
            if note is not None and not note.over and resident.sandbox.alive():
                log.warning("%s: in the middle of %s", resident.spec.name, note.migration)
                try:
                    await self._finish(resident, note)
                except LiveshiftError as error:  # the orchestrator's next request tries it again
                    log.error("%s: %s", note.migration, error)

    def unfinished(self) -> set[str]:
        """The swaps that are not over yet."""
        notes = [
            host_swap.read(resident) for resident in list(self._capsule_table.capsules.values())
        ]
        return {note.migration for note in notes if note is not None and not note.over}

    async def plan_swap(self, request: messages.LookAtGpus) -> messages.SwapPlan:
        resident = self._registry.free(request.capsule)
        survey = await self._registry.survey_gpus(resident)
        taken = self._registry.gpus_taken()
        return gpu_choice.choose(request.capsule, survey, request.to, request.leave, taken)

    async def swap_gpus(self, request: messages.SwapGpu) -> messages.Moved:
        if not request.pids:
            raise Refused(f"the request to swap GPUs names no process of {request.capsule}")
        if self._registry.is_busy(request.migration):
            raise Refused(f"{request.migration} is already under way on this host")
        with self._registry.working(request.migration), self._keeping(request):
            resident = self._registry.free(request.capsule)
            if (known := host_swap.read(resident)) and known.migration == request.migration:
                raise Refused(f"{request.migration} is over: {known.why or known.stage}")
            note = SwapNote(request.migration, Stage.SAVING, request.pairs, request.pids)
            here = self._swap(resident, note, full=request.verify)
            resident.finished = await asyncio.to_thread(finished_by_pid, resident.sandbox)
            return await self._capsule_table.blocking(
                request.capsule, lambda: here.run(request.deadline)
            )

    async def settle_swap(self, request: messages.SettleSwap) -> messages.SwapSettled:
        await self._registry.until_idle(request.migration)
        with self._registry.working(request.migration):
            return await self._outcome(request)

    async def _outcome(self, request: messages.SettleSwap) -> messages.SwapSettled:
        try:
            resident = self._capsule_table.resident(request.capsule)
        except NotFound:
            return messages.SwapSettled("gone", "")
        note = await asyncio.to_thread(host_swap.read, resident)
        if note is None or note.migration != request.migration:
            # Note that it is over, so that a late request for this swap finds that.
            note = SwapNote(request.migration, Stage.STAYS, why="it had not begun")
            await asyncio.to_thread(host_swap.write, resident, note)
        if note.stage is Stage.LOST:
            return messages.SwapSettled("lost", note.why)
        if not resident.sandbox.alive():
            return messages.SwapSettled("gone", "")
        if not note.over:
            try:
                note = await self._finish(resident, note)
            except LiveshiftError as error:
                return messages.SwapSettled("held", str(error))
        return messages.SwapSettled(note.stage.value if note.over else "held", note.why)

    async def _finish(self, resident: RunningCapsule, note: SwapNote) -> SwapNote:
        here = self._swap(resident, note)
        await self._capsule_table.blocking(resident.spec.name, here.finish)
        return here.note

    def _swap(self, resident: RunningCapsule, note: SwapNote, *, full: bool = False) -> HostSwap:
        def tree(pid: int) -> DeviceTree:
            found = self._registry.devices.tree(note.migration, resident, full=full, only=(pid,))
            if found is None:
                raise Unreachable(
                    f"{self._capsule_table.host} has no GPU helper",
                    hint="`liveshift doctor --config FILE` there",
                )
            return found

        return HostSwap(resident, note, tree)

    @contextlib.contextmanager
    def _keeping(self, request: messages.SwapGpu) -> Iterator[None]:
        """Keep both GPUs from other capsules meanwhile; raises Refused if one of them has been
        taken since the plan."""
        words = f"is changed for another one by {request.capsule} ({request.migration})"
        ours = {new: words for old, new in request.pairs if old != new}
        taken = self._registry.gpus_taken()
        for uuid in ours.keys() & taken.keys():
            raise Refused(
                f"the GPU {uuid} is not free: it {taken[uuid]}",
                hint="try again when that has ended",
            )
        self._registry.gpus_swapped |= ours
        try:
            yield
        finally:
            for uuid in ours:
                self._registry.gpus_swapped.pop(uuid, None)
