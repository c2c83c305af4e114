# SPDX-License-Identifier: Apache-2.0
"""Finds the tasks that use a GPU or its driver, by /proc.

It looks for NVIDIA's device files, the CUDA driver library, and for tools in the task: a debugger,
a profiler's library, an MPS daemon's pipe. Only the driver knows whether such a task is a CUDA
process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ... import proc_text
from ..capsule.tree import descriptors
from .found import GpuTask

DEVICES = "/dev/nvidia"
LIBCUDA = "libcuda.so"
INJECTION = ("CUDA_INJECTION64_PATH", "CUDA_INJECTION32_PATH")
"""Variables that name a library, which the CUDA driver then loads into the process. CUPTI and
Nsight use them."""

TOOLS = (
    "libToolsInjection",  # Nsight Systems
    "libcuda-injection",  # Nsight Compute
    "libInterceptorInjection",
    "libsanitizer-collection",  # compute-sanitizer
)
MPS_PIPES = "CUDA_MPS_PIPE_DIRECTORY"


def look(host_pid: int, pid: int, name: str) -> GpuTask | None:
    """Look at one task; returns None if it uses neither a GPU nor the CUDA driver library.

    Raises FileNotFoundError or ProcessLookupError if the task has ended.
    """
    paths = set(_mapped(host_pid))
    names = {path.rpartition("/")[2] for path in paths}
    devices = any(path.startswith(DEVICES) for path in paths) or any(
        target.startswith(DEVICES) for _, target in descriptors(host_pid)
    )
    libcuda = any(each.startswith(LIBCUDA) for each in names)
    if not devices and not libcuda:
        return None
    variables = _environ(host_pid)
    tools = sorted(each for each in names if each.startswith(TOOLS))
    tools += [f"{key}={variables[key]}" for key in INJECTION if variables.get(key)]
    return GpuTask(
        pid,
        host_pid,
        name,
        devices,
        libcuda,
        _tracer(host_pid),
        tuple(tools),
        _mps(host_pid, variables.get(MPS_PIPES, "")),
    )


def _mapped(host_pid: int) -> Iterator[str]:
    for line in proc_text.lines(f"/proc/{host_pid}/maps"):
        at = line.find("/")
        if at > 0:
            yield line[at:].removesuffix(" (deleted)")


def _environ(host_pid: int) -> dict[str, str]:
    """The environment with which the task was started, without its own later changes."""
    raw = Path(f"/proc/{host_pid}/environ").read_bytes()
    pairs = (item.partition(b"=") for item in raw.split(b"\0"))
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def _tracer(host_pid: int) -> int:
    for line in proc_text.lines(f"/proc/{host_pid}/status"):
        if line.startswith("TracerPid:"):
            return int(line.split()[1])
    return 0


def _mps(host_pid: int, directory: str) -> str:
    """Return ``directory`` if it contains the control pipe of an MPS daemon, else ""."""
    if not directory.startswith("/"):
        return ""
    control = f"/proc/{host_pid}/root{directory}/control"
    return directory if os.path.lexists(control) else ""
