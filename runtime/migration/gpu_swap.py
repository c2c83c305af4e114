# SPDX-License-Identifier: Apache-2.0
"""Moves a capsule to another GPU of its host; :meth:`GpuSwap.run` has the steps in order.

A swap needs no sandbox, no CRIU and no commit: the capsule keeps its host and its epoch. Only the
host's agent can know on which GPU the capsule runs. So if the agent's answer is an error or does
not come, the orchestrator asks the agent again until it knows the outcome. No other host can run
the capsule meanwhile.
"""

from __future__ import annotations

import asyncio

from ...errors import LiveshiftError, Unreachable
from .. import messages
from ..daemon.faultpoints import reached
from ..messages import MigrationRow
from ..model.steps import ALLOWED_IN_SWAP, MigrationStep
from ..model.timeline import Timeline
from .context import MigrationContext, as_ours
from .migration import Migration
from .order import Order


class GpuSwap(Migration):
    """A migration inside one host, which is both ``source`` and ``destination``. The order names
    it as the destination."""

    kind = "swap"
    allowed = ALLOWED_IN_SWAP
    cancellable = frozenset({MigrationStep.PREPARING, MigrationStep.QUIESCING})

    def __init__(self, context: MigrationContext, number: int, order: Order) -> None:
        host = order.capsule.host
        super().__init__(context, number, order)
        self._way = host, f"{host} {_gpu_text(order.gpu.gpu if order.gpu else '')}"

    @classmethod
    def from_row(cls, context: MigrationContext, order: Order, row: MigrationRow) -> GpuSwap:
        """Return a swap that an earlier orchestrator has left under way, for :meth:`recover`."""
        swap = cls(context, int(row.name[1:]), order)
        swap._way = row.source, row.destination
        swap.step, swap.times = MigrationStep(row.state), Timeline.of(row)
        swap.holds_gates = swap.step is not MigrationStep.PREPARING  # it may hold them
        return swap

    @property
    def must_end(self) -> bool:
        return self.step is MigrationStep.FREEZING

    @property
    def way(self) -> tuple[str, str]:
        return self._way

    async def run(self) -> None:
        try:
            await self._unless_cancelled(self._until_over())
        except Exception as error:
            await self._after(as_ours(error))
            return
        await self._resume_and_end()

    async def _until_over(self) -> None:
        plan = await self._prepare()
        await reached("orchestrator.prepared")
        await self._quiesce()
        await self._bring_over(plan)

    async def recover(self) -> None:
        if self.step is MigrationStep.RESUMING:
            await self._resume_and_end()
        else:
            await self._after(Unreachable("the orchestrator was restarted"))

    # ---- the phases, in order -----------------------------------------------------------------

    async def _prepare(self) -> messages.SwapPlan:
        """Ask the host which GPUs the swap uses and whether it can be done. The job trains on."""
        with self.times.phase("prepare") as detail:
            gpu = self.order.gpu
            assert gpu is not None
            request = messages.LookAtGpus(self.capsule.name, gpu.gpu, gpu.leave)
            limit = self._limits.prepare
            plan = await self._request(self.source, request, limit, messages.SwapPlan)
            self._way = way_of(self.source, plan)
            several = "es" if len(plan.pids) > 1 else ""
            detail.append(f"{len(plan.pids)} CUDA process{several}")
        return plan

    async def _bring_over(self, plan: messages.SwapPlan) -> None:
        """Freeze the capsule and move its device state from one GPU to the other."""
        began = self.times.freeze()
        self._advance(MigrationStep.FREEZING)
        limit = self._freeze_budget.for_swap(began)
        swap = messages.SwapGpu(
            self.name, self.capsule.name, plan.pairs, plan.pids, limit, self.order.verify
        )
        moved = await self._request(self.source, swap, self._limits.answer(limit), messages.Moved)
        self.times.add(moved.phases, began)
        self._note_device_path(moved.phases)

    async def _resume_and_end(self) -> None:
        await self._resume()
        await self._end(MigrationStep.DONE)

    # ---- when something fails ------------------------------------------------------------------

    async def _after(self, error: LiveshiftError) -> None:
        """Find out from the host whether the capsule runs on the old GPU, on the new one, or is
        lost; end the swap accordingly."""
        self.error = error
        if self.step is MigrationStep.FREEZING:
            outcome = await self._outcome()
            if outcome.why and (outcome.state == "lost" or isinstance(error, Unreachable)):
                self.error = LiveshiftError(outcome.why, hint=error.hint)
            if outcome.state == "swapped":
                self._context.note(self, f"it is on {self._way[1]} all the same: {error}")
                self.error = None
                await self._resume_and_end()
                return
            if outcome.state == "lost" or (outcome.state == "gone" and self.capsule.code is None):
                await self._end(MigrationStep.LOST)
                return
        self._advance(MigrationStep.ROLLING_BACK)
        await self._reopen()
        self.times.thaw()
        await self._end_undone()

    async def _outcome(self) -> messages.SwapSettled:
        """Ask the host for the outcome of the swap until it knows it; there is no time limit, but
        a rewind of the job may end this."""
        settle, noted = messages.SettleSwap(self.name, self.capsule.name), ""
        while True:
            try:
                answer = await self._request(
                    self.source, settle, self._limits.prepare, messages.SwapSettled
                )
                if answer.state != "held":
                    self.waits = ""
                    return answer
                problem = f"{self.source} does not know yet on which GPU it is: {answer.why}"
            except Exception as error:
                problem = f"waiting for {self.source}: {as_ours(error)}"
            if self.capsule.code is not None:
                return messages.SwapSettled("gone", "")
            if problem != noted:
                noted = problem
                self._context.note(self, problem)
            self.waits = self.source
            await asyncio.sleep(self._limits.heartbeat)


def way_of(host: str, plan: messages.SwapPlan) -> tuple[str, str]:
    """Return the two GPUs of a plan (old, new) in words for people."""
    return f"{host} {plan.leave}", f"{host} {plan.to}"


def _gpu_text(gpu: str) -> str:
    """Name the GPU as the person did; the host's plan replaces this with the full name."""
    return gpu if gpu.startswith("GPU") else f"GPU {gpu}"
