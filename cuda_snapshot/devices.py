# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this host, by NVML.

NVML calls can hang for good in the kernel when a GPU has fallen off the bus, and then no signal
ends the process that made them. So they are made in a child process with a deadline; a child that
does not answer is killed and left to the kernel, never waited for.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..waiting import readable
from .environment import environment

DEADLINE_S = 20.0
"""NVML initialises every GPU where persistence mode is off: seconds for each on large hosts."""

DYING_S = 0.2
"""For a killed child that does not hang."""

_stuck: list[subprocess.Popen[bytes]] = []
"""Killed children that may still hang in the kernel; kept so that nobody waits for them."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML describes it; None where this GPU or driver doesn't tell."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    free_bytes: int
    pci_bus_id: str
    compute_capability: tuple[int, int] | None
    mig: bool | None
    """Partitioned by MIG, which the driver's checkpoint doesn't support."""
    persistence: bool | None
    """Persistence mode; without it every restore pays for initialising the GPU."""
    processes: dict[int, int | None] | None = None
    """The processes with a context on it, by pid as NVML tells it (in a container that may be
    another number, or none), and the bytes that each holds."""
    mps: bool | None = None
    """Shared by MPS clients, which the driver's checkpoint doesn't support."""


@dataclass(frozen=True)
class Inventory:
    """What NVML said. ``why_none`` is set exactly when ``devices`` is empty."""

    driver: str | None
    """The driver's version, such as "580.159.03"."""
    devices: tuple[Gpu, ...]
    why_none: str | None

    def used(self, pid: int) -> dict[str, int]:
        """Device memory of a process in bytes, by GPU UUID; {} where NVML does not know it."""
        return {
            gpu.uuid: held
            for gpu in self.devices
            if gpu.processes is not None and (held := gpu.processes.get(pid)) is not None
        }


class Nvml:
    """A child process that asks NVML again and again, initialised once; made anew when it hangs
    or ends. ``libraries`` is a folder where the driver's libraries are looked for first."""

    def __init__(self, libraries: Path | None = None) -> None:
        self._libraries = libraries
        self._turn = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def inventory(self, deadline_s: float = DEADLINE_S) -> Inventory:
        """For at most ``deadline_s`` seconds, and those of another thread that asks too. Raises
        nothing."""
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
    """The answer, or why there is none."""
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    until = time.monotonic() + deadline_s
    line = b""
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(b"\n")
    while not line.endswith(b"\n"):
        left = max(0.0, until - time.monotonic())
        if not readable(left, child.stdout):
            return f"NVML did not answer within {deadline_s:g} s: a GPU or its driver hangs"
        part = os.read(child.stdout.fileno(), 65536)
        if not part:
            child.wait()  # it has closed its output: it is ending, outside of NVML
            said = child.stderr.read().decode(errors="replace").strip().splitlines()
            return f"asking NVML ended with {child.returncode}: {said[-1] if said else ''}"
        line += part
    return msgspec.json.decode(line, type=Inventory)


def ask() -> Inventory:
    """Ask NVML in this process; may hang, so only the child calls it."""
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


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    capability = _told(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    mig = _told(nvml, nvml.nvmlDeviceGetMigMode, handle)
    persistence = _told(nvml, nvml.nvmlDeviceGetPersistenceMode, handle)
    processes = _told(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    mps = _told(nvml, nvml.nvmlDeviceGetMPSComputeRunningProcesses, handle)
    return Gpu(
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
    """The answer, or None where this GPU has no such feature (MIG on a desktop card) or this user
    may not see it."""
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
