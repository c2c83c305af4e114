# SPDX-License-Identifier: Apache-2.0
"""The helper's answers to requests about processes and about the host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from ...errors import StepFailed
from ..checkpoint import CudaState
from ..devices import NvmlGpu
from ..fast_path.probe import FastPath
from .calls import (
    Checkpointed,
    CheckpointProcess,
    GetHost,
    HelperRequest,
    HostGpus,
    Lock,
    Operation,
    RestoreProcess,
    RestoreThread,
    State,
    Unlock,
    Used,
)
from .operations import Operations
from .server import Caller, Handler


class Control:
    """The handlers of these requests."""

    def __init__(self, operations: Operations, fast_path: FastPath) -> None:
        self._operations, self._fast_path = operations, fast_path

    def handlers(self) -> Mapping[type[HelperRequest], Handler]:
        return {
            GetHost: self._host,
            State: self._state,
            RestoreThread: lambda _, request: self._operations.restore_thread(request.pid),
            Used: lambda _, request: self._operations.nvml.inventory().used(request.pid),
            Lock: self._lock,
            CheckpointProcess: self._checkpoint,
            RestoreProcess: self._restore,
            Unlock: self._unlock,
        }

    def _host(self, caller: Caller, request: GetHost) -> HostGpus:
        # The trial may begin or end while NVML answers, so we look at its processes twice.
        us = {os.getpid(), *self._fast_path.pids}
        found = self._operations.nvml.inventory()
        us |= self._fast_path.pids
        driver = self._operations.driver
        return HostGpus(
            cuda=driver.cuda,
            driver=found.driver or "",
            gpus=tuple(_without(gpu, us) for gpu in found.devices),
            why_none=found.why_none,
            can_remap=driver.can_remap,
            mps=any(gpu.mps for gpu in found.devices),
            fast_path=self._fast_path.why,
            sessions=self._fast_path.sessions,
        )

    def _state(self, caller: Caller, request: State) -> CudaState | None:
        return self._operations.state(request.pid)

    def _lock(self, caller: Caller, request: Lock) -> None:
        with self._turn(caller, request, "lock"):
            self._operations.lock(request.pid, request.timeout_s)

    def _checkpoint(self, caller: Caller, request: CheckpointProcess) -> Checkpointed:
        with self._turn(caller, request, "checkpoint"):
            return self._operations.checkpoint(request.pid)

    def _restore(self, caller: Caller, request: RestoreProcess) -> None:
        with self._turn(caller, request, "restore"):
            self._operations.restore(request.pid, request.gpus, request.needed)

    def _unlock(self, caller: Caller, request: Unlock) -> None:
        with self._turn(caller, request, "unlock"):
            self._operations.unlock(request.pid)

    @contextlib.contextmanager
    def _turn(self, caller: Caller, request: Operation, what: str) -> Iterator[None]:
        """Take a turn for an operation, unless its client has gone meanwhile: then raise
        StepFailed."""
        with self._operations.turn(f"gpu {what}", request.turn_s):
            if caller.channel.peer_gone():
                raise StepFailed(f"gpu {what}", f"process {request.pid}: its client has gone")
            yield


def _without(gpu: NvmlGpu, pids: Collection[int]) -> NvmlGpu:
    """The GPU without the processes of the helper and its trial. The helper's context for copying
    is no use of the GPU that the asking agent should count."""
    if not gpu.processes or gpu.processes.keys().isdisjoint(pids):
        return gpu
    others = {pid: held for pid, held in gpu.processes.items() if pid not in pids}
    return replace(gpu, processes=others)
