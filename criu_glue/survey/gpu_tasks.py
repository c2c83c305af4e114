# SPDX-License-Identifier: Apache-2.0
"""Tasks that have to do with a GPU, as /proc shows them: NVIDIA's device files, the CUDA driver
library, and who else is inside (a debugger, a profiler's library, an MPS daemon's pipe).

Whether such a task is a CUDA process only the driver can tell.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DEVICES = "/dev/nvidia"
LIBCUDA = "libcuda.so"
INJECTION = ("CUDA_INJECTION64_PATH", "CUDA_INJECTION32_PATH")
"""The CUDA driver loads the library that such a variable names into the process (CUPTI's way in,
also Nsight's)."""

TOOLS = (
    "libToolsInjection",  # Nsight Systems
    "libcuda-injection",  # Nsight Compute
    "libInterceptorInjection",
    "libsanitizer-collection",  # compute-sanitizer
)
MPS_PIPES = "CUDA_MPS_PIPE_DIRECTORY"


@dataclass(frozen=True)
class GpuTask:
    """One task; ``pid`` as its capsule sees it, ``host_pid`` as the host where it was seen does."""

    pid: int
    host_pid: int
    name: str
    device_files: bool
    """It has /dev/nvidia* open or mapped."""
    libcuda: bool
    """It has the CUDA driver library mapped; that alone makes no CUDA process of it."""
    tracer: int = 0
    """Who traces it (a debugger), by the host's pid; 0: nobody, or a task out of sight."""
    injected: tuple[str, ...] = ()
    """Libraries and variables of CUDA tools: a profiler is inside. libcupti alone is none; PyTorch
    has it mapped always."""
    mps: str = ""
    """The pipe directory of an MPS daemon that it can reach, by its environment."""


def look(host_pid: int, pid: int, name: str) -> GpuTask | None:
    """What there is to tell of a task; None when it has nothing to do with a GPU.

    Raises FileNotFoundError when it has ended.
    """
    paths = {path for path in _mapped(host_pid) if _counts(path)}
    devices = any(path.startswith(DEVICES) for path in paths) or _has_device_open(host_pid)
    libcuda = any(_is_libcuda(path) for path in paths)
    if not devices and not libcuda:
        return None
    variables = _environ(host_pid)
    tools = sorted({_name(path) for path in paths if _name(path).startswith(TOOLS)})
    tools += [f"{key}={variables[key]}" for key in INJECTION if variables.get(key)]
    return GpuTask(
        pid, host_pid, name, devices, libcuda, _tracer(host_pid), tuple(tools),
        _mps(host_pid, variables.get(MPS_PIPES, "")),
    )  # fmt: skip


def _counts(path: str) -> bool:
    return path.startswith(DEVICES) or _is_libcuda(path) or _name(path).startswith(TOOLS)


def _is_libcuda(path: str) -> bool:
    return _name(path).startswith(LIBCUDA)


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _mapped(host_pid: int) -> Iterator[str]:
    with open(f"/proc/{host_pid}/maps", errors="surrogateescape") as maps:
        for line in maps:
            at = line.find("/")
            if at > 0:
                yield line[at:].rstrip("\n").removesuffix(" (deleted)")


def _has_device_open(host_pid: int) -> bool:
    for name in os.listdir(f"/proc/{host_pid}/fd"):
        try:
            if os.readlink(f"/proc/{host_pid}/fd/{name}").startswith(DEVICES):
                return True
        except FileNotFoundError:
            continue
    return False


def _environ(host_pid: int) -> dict[str, str]:
    """What it was started with; what it has set for itself since is not seen."""
    raw = Path(f"/proc/{host_pid}/environ").read_bytes()
    pairs = (item.partition(b"=") for item in raw.split(b"\0"))
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def _tracer(host_pid: int) -> int:
    for line in Path(f"/proc/{host_pid}/status").read_text().splitlines():
        if line.startswith("TracerPid:"):
            return int(line.split()[1])
    return 0


def _mps(host_pid: int, directory: str) -> str:
    """``directory`` when a daemon has its control pipe there."""
    if not directory.startswith("/"):
        return ""
    control = f"/proc/{host_pid}/root{directory}/control"
    return directory if os.path.lexists(control) else ""
