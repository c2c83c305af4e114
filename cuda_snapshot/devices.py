# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this host, by NVML.

When a GPU has fallen off the bus, an NVML call may never return from the kernel. Then no signal
ends the process that made it. So a child process makes the calls, with a deadline. We kill a child
that does not answer and leave it to the kernel; we never wait for it without a limit.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from .environment import environment
from .lines import Lines

DEADLINE_S = 20.0
"""NVML must answer within this many seconds. Without persistence mode it first initialises every
GPU, which takes seconds for each GPU on large hosts."""

DYING_S = 0.2
"""We wait this many seconds for a killed child to end. One that hangs in the kernel does not end in
time."""

_stuck: list[subprocess.Popen[bytes]] = []
"""Killed children that may still hang in the kernel. We keep the objects, so that Python does not
wait for the children when it destroys them."""


@dataclass(frozen=True)
class NvmlGpu:
    """One GPU as NVML describes it. A field is None if this GPU or driver doesn't report it."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    free_bytes: int
    pci_bus_id: str
    compute_capability: tuple[int, int] | None
    mig: bool | None
    """Whether MIG partitions the GPU, which the driver's checkpoint doesn't support."""
    persistence: bool | None
    """Whether persistence mode is on; without it every restore must initialise the GPU."""
    processes: dict[int, int | None] | None = None
    """The processes with a context on the GPU, and the bytes that each holds. The key is the pid
    that NVML reports; in a container it may report another number, or no process."""
    mps: bool | None = None
    """Whether MPS clients share the GPU, which the driver's checkpoint doesn't support."""


@dataclass(frozen=True)
class Inventory:
    """What NVML reported. ``why_none`` is set exactly when ``devices`` is empty."""

    driver: str | None
    """The driver's version, such as "580.159.03"."""
    devices: tuple[NvmlGpu, ...]
    why_none: str | None

    def used(self, pid: int) -> dict[str, int]:
        """Device memory of a process in bytes, by GPU UUID; {} if NVML does not know it."""
        return {
            gpu.uuid: held
            for gpu in self.devices
            if gpu.processes is not None and (held := gpu.processes.get(pid)) is not None
        }


class Nvml:
    """A child process that initialises NVML once and can ask it many times. If the child hangs or
    ends, the next question starts another one. ``libraries`` is the folder where it looks for the
    driver's libraries first."""

    def __init__(self, libraries: Path | None = None) -> None:
        self._libraries = libraries
        self._turn = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def inventory(self, deadline_s: float = DEADLINE_S) -> Inventory:
        """Ask NVML. Takes at most ``deadline_s`` seconds, and first waits for other threads that
        ask. Raises nothing."""
        with self._turn:
            if self._child is None:
                self._child = _start(self._libraries)
            answer = _ask(self._child, deadline_s)
            if isinstance(answer, Inventory):
                return answer
            self._abandon()
            return Inventory(None, (), answer)

    def close(self) -> None:
        """Ends the child."""
        with self._turn:
            self._abandon()

    def _abandon(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(DYING_S)
        _stuck[:] = [c for c in (*_stuck, child) if c.poll() is None]


def inventory(deadline_s: float = DEADLINE_S, libraries: Path | None = None) -> Inventory:
    """Ask NVML once, in a child process, for at most ``deadline_s`` seconds. Raises nothing."""
    nvml = Nvml(libraries)
    try:
        return nvml.inventory(deadline_s)
    finally:
        nvml.close()


def _start(libraries: Path | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(libraries),
        bufsize=0,
    )


def _ask(child: subprocess.Popen[bytes], deadline_s: float) -> Inventory | str:
    """Returns the answer, or the reason why there is none."""
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(b"\n")
    line = Lines(child.stdout.fileno()).next(deadline_s)
    if line is None:
        return f"NVML did not answer within {deadline_s:g} s: a GPU or its driver hangs"
    if not line.endswith("\n"):
        child.wait()  # it has closed its output, so it is ending and not inside NVML
        said = child.stderr.read().decode(errors="replace").strip().splitlines()
        return f"asking NVML ended with {child.returncode}: {said[-1] if said else ''}"
    return msgspec.json.decode(line, type=Inventory)


def ask() -> Inventory:
    """Ask NVML in this process. This may hang, so only the child calls it."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            return Inventory(None, (), "no NVIDIA driver: libnvidia-ml.so.1 is not installed")
        return Inventory(None, (), f"NVML can't be started: {error}")
    driver = None
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        devices = tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError as error:
        return Inventory(driver, (), f"NVML can't describe the GPUs: {error}")
    return Inventory(driver, devices, None if devices else "the driver sees no GPU")


def _gpu(nvml: Any, index: int) -> NvmlGpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    capability = _told(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    mig = _told(nvml, nvml.nvmlDeviceGetMigMode, handle)
    persistence = _told(nvml, nvml.nvmlDeviceGetPersistenceMode, handle)
    processes = _told(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    mps = _told(nvml, nvml.nvmlDeviceGetMPSComputeRunningProcesses, handle)
    return NvmlGpu(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        memory_bytes=memory.total,
        free_bytes=memory.free,
        pci_bus_id=nvml.nvmlDeviceGetPciInfo(handle).busId,
        compute_capability=capability and (capability[0], capability[1]),
        mig=None if mig is None else mig[0] == nvml.NVML_DEVICE_MIG_ENABLE,
        persistence=None if persistence is None else bool(persistence),
        processes=None if processes is None else {p.pid: p.usedGpuMemory for p in processes},
        mps=None if mps is None else bool(mps),
    )


def _told(nvml: Any, question: Any, handle: Any) -> Any:
    """Returns the answer, or None if this GPU has no such feature (MIG on a desktop card) or this
    user may not see it."""
    try:
        return question(handle)
    except nvml.NVMLError as error:
        if error.value in (
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_NO_PERMISSION,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        ):
            return None
        raise


if __name__ == "__main__":
    for _ in sys.stdin.buffer:
        sys.stdout.buffer.write(msgspec.json.encode(ask()) + b"\n")
        sys.stdout.buffer.flush()
