# SPDX-License-Identifier: Apache-2.0
"""What the helper does for each request."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ... import units
from ...errors import LiveshiftError, StepFailed
from ..cuda import Cuda
from ..devices import NvmlGpu
from ..fast_path.probe import FastPath
from . import calls, handover
from .contexts import Contexts
from .device_memory import DeviceMemory
from .held_processes import HeldProcesses
from .operations import Operations
from .process_session import ProcessSession
from .ring import Busy, CopyRings, sizes
from .server import Caller
from .transfers import Transfers


class Service:
    """Answers requests. Any thread may use it."""

    def __init__(self, operations: Operations, fast_path: FastPath, cuda: Cuda) -> None:
        """Raises LiveshiftError if the driver can't be used."""
        contexts = Contexts(cuda)
        self._operations, self._fast_path = operations, fast_path
        self._held = HeldProcesses(operations)
        self._memory = DeviceMemory(contexts)
        self._rings = CopyRings(contexts, *sizes())
        self._transfers = Transfers(contexts, self._memory, self._rings)

    def why_stay(self) -> str:
        """Why the helper must not end, in words: it holds threads that would run on, or it may have
        the only copy of a rank's state. "" if it may end."""
        if why := self._held.why_stay():
            return why
        held = {key: size for key, size in self._memory.held().items() if size}
        if not held:
            return ""
        return f"it holds {units.size(sum(held.values()))} of device memory for {', '.join(held)}"

    def answer(self, caller: Caller, request: calls.ServiceRequest) -> Any:
        """Do what a request says; returns the answer, of the type that the request's docstring
        names."""
        match request:
            case calls.GetHost():
                return self._host()
            case calls.State(pid):
                return self._operations.state(pid)
            case calls.Used(pid):
                return self._operations.nvml.inventory().used(pid)
            case calls.Operation():
                return self._operate(caller, request)
            case calls.HoldThreads(pid, kill_on_exit, timeout_s, outside_s):
                gone = caller.channel.peer_gone
                return self._held.hold(pid, kill_on_exit, timeout_s, outside_s, gone)
            case calls.SpareFromExit(pid):
                return self._held.spare_from_exit(pid)
            case calls.Release(pid):
                return self._held.release(pid)
            case calls.Holds(pid):
                return self._held.holds(pid)
            case calls.Warm(key, gpus):
                return self._warm(key, gpus)
            case calls.Create(key, blocks):
                return self._memory.create(key, blocks)
            case calls.Drop(key):
                return self._drop(key)
            case calls.GetHeldMemory():
                return self._memory.held()
            case calls.CopyOut(key):
                return self._transfers.drain(caller.channel, key)
            case calls.CopyIn(key):
                return self._transfers.fill(caller.channel, key)
            case calls.BeginSession():
                return self._begin_session(caller, request)
            case _:
                return self._in_session(caller, request)

    def _host(self) -> calls.HostGpus:
        # The trial may begin or end while NVML answers, so we look at its processes twice.
        us = {os.getpid(), *self._fast_path.pids}
        found = self._operations.nvml.inventory()
        us |= self._fast_path.pids
        driver = self._operations.driver
        return calls.HostGpus(
            cuda=driver.cuda,
            driver=found.driver or "",
            gpus=tuple(_without(gpu, us) for gpu in found.devices),
            why_none=found.why_none,
            can_remap=driver.can_remap,
            fast_path=self._fast_path.why,
            sessions=self._fast_path.sessions,
        )

    def _operate(self, caller: Caller, request: calls.Operations) -> Any:
        """Do an operation in its turn, unless its client has gone meanwhile: then raise
        StepFailed."""
        step, pid = f"gpu {request.what}", request.pid
        with self._operations.turn(step, request.turn_s):
            if caller.channel.peer_gone():
                raise StepFailed(step, f"process {pid}: its client has gone")
            match request:
                case calls.Lock():
                    self._operations.lock(pid, request.timeout_s)
                    if caller.channel.peer_gone():  # so no client will unlock the process
                        self._operations.unlock(pid)
                        raise StepFailed(step, f"process {pid}: its client has gone")
                    return None
                case calls.CheckpointProcess():
                    return self._operations.checkpoint(pid)
                case calls.RestoreProcess():
                    return self._operations.restore(pid, request.gpus, request.needed)
                case calls.Unlock():
                    return self._operations.unlock(pid)

    # ---- device memory

    def _warm(self, key: str, gpus: list[str]) -> None:
        self._memory.warm(key, gpus)
        if gpus:
            with suppress(Busy), self._rings.one(gpus[0], patience_s=0):
                pass  # the ring is pinned now, and stays so while the contexts stay

    def _drop(self, key: str) -> None:
        self._memory.drop(key)
        self._unpin_idle()

    def _unpin_idle(self) -> None:
        self._rings.unpin_idle(self._memory.gpus())

    def _begin_session(self, caller: Caller, request: calls.BeginSession) -> None:
        """Begin a session that ends with the connection."""
        session = ProcessSession(request.pid, Path(request.directory), request.inner_pid)
        caller.until_closed.callback(self._unpin_idle)
        caller.session = caller.until_closed.enter_context(closing(session))

    def _in_session(self, caller: Caller, request: calls.InSession) -> Any:
        session, memory = caller.session, self._memory
        if session is None:
            raise LiveshiftError("this connection to the GPU helper has no device session")
        match request:
            case calls.Wait(timeout_s):
                return session.wait(timeout_s)
            case calls.Blocks():
                return [block for block, _ in session.blocks()]
            case calls.Checksums(samples):
                session.sync()
                here = [block for block, with_it in session.blocks() if with_it]
                return {block.address: session.checksum(block, samples) for block in here}
            case calls.GiveUp(key):
                return handover.give_up(session, memory, key)
            case calls.TakeBack(key, keep, gpus):
                return handover.take_back(session, memory, key, keep, dict(gpus))
            case calls.Own():
                return handover.own(session)


def _without(gpu: NvmlGpu, pids: Collection[int]) -> NvmlGpu:
    """The GPU without the processes of the helper and its trial. The helper's context for copying
    is no use of the GPU that the asking agent should count."""
    if not gpu.processes or gpu.processes.keys().isdisjoint(pids):
        return gpu
    others = {pid: held for pid, held in gpu.processes.items() if pid not in pids}
    return replace(gpu, processes=others)
