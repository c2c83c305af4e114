# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this host, by NVML.

NVML calls can hang for good in the kernel when a GPU has fallen off the bus, and then no signal
ends the process that made them. So they are made in a child process with a deadline; a child that
does not answer is killed and left to the kernel, never waited for.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

DEADLINE_S = 20.0
"""NVML initialises every GPU where persistence mode is off: seconds for each on large hosts."""

_stuck: list[subprocess.Popen[str]] = []
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


def inventory(deadline_s: float = DEADLINE_S) -> Inventory:
    """Ask NVML, in a child process, for at most ``deadline_s`` seconds. Raises nothing."""
    child = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = child.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        child.kill()
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
        _stuck[:] = [*(c for c in _stuck if c.poll() is None), child]
        return Inventory(
            None, (), f"NVML did not answer within {deadline_s:g} s: a GPU or its driver hangs"
        )
    if child.returncode != 0:
        said = err.strip().splitlines()
        return Inventory(
            None, (), f"asking NVML ended with {child.returncode}: {said[-1] if said else ''}"
        )
    return _from_json(out)


def _from_json(text: str) -> Inventory:
    told = json.loads(text)
    devices = []
    for fields in told["devices"]:
        capability = fields.pop("compute_capability")
        devices.append(Gpu(**fields, compute_capability=tuple(capability) if capability else None))
    return Inventory(told["driver"], tuple(devices), told["why_none"])


def ask() -> Inventory:
    """Ask NVML in this process; may hang, so only :func:`inventory`'s child calls it."""
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
    )


def _told(nvml: Any, question: Any, handle: Any) -> Any:
    """The answer, or None where this GPU has no such feature (MIG on a desktop card)."""
    try:
        return question(handle)
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
            return None
        raise


if __name__ == "__main__":
    print(json.dumps(asdict(ask())))
