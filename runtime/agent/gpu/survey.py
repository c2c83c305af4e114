# SPDX-License-Identifier: Apache-2.0
"""The survey of GPUs at the source, while the capsule runs: its CUDA processes, what they hold, and
what the driver's checkpoint would refuse, or would fail on and lose the process, in words.

Sources: cuda.h on cuCheckpointProcess*, the README of NVIDIA/cuda-checkpoint and its issues 15
(CUPTI), 28 and 43 (forked children), 42 (MIG), 44 and 56 (IPC).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Protocol

import msgspec

from ....criu_glue.survey.found import GpuTask, Survey
from ....cuda_snapshot import threads
from ....cuda_snapshot.assignment import named
from ....cuda_snapshot.devices import NvmlGpu
from ....interposer.inspection import KINDS, ProcessState
from ....interposer.layout import MemoryKind
from ....interposer.page import PageError
from ...messages import GpuHost, GpuProcess, GpuSurvey
from ...model.preflight_findings import PreflightFinding

NO_ARENA = "none of its memory is from the interposer's arena"
"""Why no memory of a process is streamed on a host that could stream it."""

CHECKPOINTS = (12, 8)
"""The CUDA version of the first driver (570) whose API takes a checkpoint."""

NEWER = "install a driver of CUDA 12.8 (570) or later; moving to another GPU needs 13.0 (580)"


GO_ON = "let it go on (SIGCONT), and try again"

UNREADABLE = "no collective boundary can be found with it: start the job again"


class Drivers(Protocol):
    """The part of the host's GPU helper that the survey asks."""

    def state(self, pid: int) -> IntEnum | None: ...

    def used(self, pid: int) -> dict[str, int]: ...


def survey_devices(
    found: Survey,
    pages: Mapping[int, ProcessState],
    helper: Drivers | None,
    host: GpuHost,
    memory: int,
    unreadable: Mapping[int, PageError] | None = None,
) -> GpuSurvey | None:
    """Survey the GPU use of the tasks of ``found``; None if none of them uses a GPU.

    ``pages``: what the interposer knows, by pid inside. ``helper``: None if there is none, and
    ``host.fast_path`` says why. ``unreadable``: why the page of a process is not among ``pages``.
    Raises the helper's errors.
    """
    if helper is None:
        holders = [task for task in found.gpu_tasks if _holds(task, pages)]
        missing = [_without_helper(task, host.fast_path) for task in holders]
        return GpuSurvey(host, [], missing, [], memory) if missing else None
    problems: list[PreflightFinding] = []
    processes: list[GpuProcess] = []
    for task in found.gpu_tasks:
        if threads.stopped(task.host_pid):
            problems.append((f"{who(task)} is stopped (SIGSTOP): the driver waits for it", GO_ON))
            continue
        state = helper.state(task.host_pid)
        if state is None:
            problems += _of_no_process(task)
            continue
        page = pages.get(task.pid)
        processes.append(_process(task, page, host, helper.used(task.host_pid)))
        problems += _of_state(task, state.name)
        problems += _of_page(task, page)
        if unreadable and (error := unreadable.get(task.pid)) is not None:
            problems.append((f"{who(task)}: {error.message}", error.hint or UNREADABLE))
        problems += _of_company(task)
    processes, reported = _with_unreported(processes, pages, host)
    if processes:
        problems = [*_of_host(host), *_of_gpus(processes, host), *problems]
    if not processes and not problems:
        return None
    return GpuSurvey(host, processes, problems, list(_remarks(processes, host, reported)), memory)


def who(task: GpuTask) -> str:
    return f"process {task.pid} ({task.name})"


def _holds(task: GpuTask, pages: Mapping[int, ProcessState]) -> bool:
    page = pages.get(task.pid)
    return task.device_files or (page is not None and page.driver > 0)


def _without_helper(task: GpuTask, why: str) -> PreflightFinding:
    return (
        f"{who(task)} holds a GPU, and this host has no GPU helper: {why}",
        "`liveshift doctor --config FILE` there looks for the driver and its libraries",
    )


def _process(
    task: GpuTask, page: ProcessState | None, host: GpuHost, used: Mapping[str, int]
) -> GpuProcess:
    movable = 0 if page is None else _arena(page)
    plain = host.fast_path
    if not plain and page is None:
        plain = (
            "the interposer has seen nothing of it (a CUDA runtime that is linked statically, or"
            " LD_PRELOAD was lost on the way)"
        )
    elif not plain and not movable:
        plain = NO_ARENA
    return GpuProcess(task.pid, page.rank if page else None, task.name, dict(used), movable, plain)


def _arena(page: ProcessState) -> int:
    return sum(held.bytes for held in page.memory if held.kind == KINDS[MemoryKind.ARENA])


def _with_unreported(
    processes: list[GpuProcess], pages: Mapping[int, ProcessState], host: GpuHost
) -> tuple[list[GpuProcess], bool]:
    """Add the memory that NVML does not report by process, as in a container. Then all memory in
    use on this host may be the capsule's; it is entered once, for the first process without data.

    Also returns whether NVML has reported the memory of all processes.
    """
    for place, process in enumerate(processes):
        page = pages.get(process.pid)
        nothing = page is not None and not any(use.bytes for use in page.devices)
        if not process.used and not nothing:
            most = {gpu.uuid: gpu.memory_bytes - gpu.free_bytes for gpu in host.gpus}
            whole = msgspec.structs.replace(process, used=most)
            return [*processes[:place], whole, *processes[place + 1 :]], False
    return processes, True


def _of_no_process(task: GpuTask) -> Iterator[PreflightFinding]:
    """Findings about a task that the driver does not know as a CUDA process."""
    if not task.device_files:
        return  # it has loaded the library and made no use of it
    if task.libcuda:
        yield (
            f"{who(task)} holds NVIDIA's device files and is no CUDA process: a child that was"
            " forked after its parent had begun with CUDA, such as a worker of a DataLoader",
            'start DataLoader workers with multiprocessing_context="spawn", or before the first'
            " CUDA call; no driver before 590 can take such children along",
        )
    else:
        yield (
            f"{who(task)} holds NVIDIA's device files and is no CUDA process: it watches GPUs by"
            " NVML, perhaps",
            "end it, or run it outside of the job",
        )


def _of_state(task: GpuTask, state: str) -> Iterator[PreflightFinding]:
    if state == "FAILED":
        yield f"{who(task)} has lost its GPU state: CUDA says FAILED", "it has to be ended"
    elif state != "RUNNING":
        yield (
            f"{who(task)} is {state}: another tool checkpoints it",
            "let the other tool end its work (cuda-checkpoint, CRIU's CUDA plugin)",
        )


def _of_page(task: GpuTask, page: ProcessState | None) -> Iterator[PreflightFinding]:
    for obstacle in page.obstacles if page else ():
        yield f"{who(task)}: {obstacle.what}", obstacle.hint


def _of_company(task: GpuTask) -> Iterator[PreflightFinding]:
    if task.tracer:
        yield (
            f"{who(task)} is traced by process {task.tracer} (a debugger?)",
            "detach it: the driver's checkpoint does not work beside one",
        )
    if task.injected:
        yield (
            f"{who(task)} has a CUDA tool in it: {', '.join(task.injected)}",
            "end the profiler (Nsight, CUPTI): the driver's checkpoint does not work beside one",
        )
    if task.mps:
        yield _mps(f"{who(task)} uses CUDA through MPS (its daemon's pipes are in {task.mps})")


def _mps(what: str) -> PreflightFinding:
    return what, "stop the MPS daemon and start the job again: no driver can move its clients"


def _of_host(host: GpuHost) -> Iterator[PreflightFinding]:
    if host.cuda < CHECKPOINTS:
        yield (
            f"the driver {host.driver} (CUDA {dotted(host.cuda)}) cannot take a checkpoint",
            NEWER,
        )
    if not host.gpus:
        yield f"NVML names no GPU at the source: {host.why_none}", "`nvidia-smi` there says more"


def _of_gpus(processes: list[GpuProcess], host: GpuHost) -> Iterator[PreflightFinding]:
    for gpu in _used(processes, host):
        if gpu.mig:
            yield (
                f"{named(gpu)} is partitioned by MIG",
                "turn it off (nvidia-smi -mig 0) and start the job again: no driver can move it",
            )
        if gpu.mps:
            yield _mps(f"{named(gpu)} is shared by MPS clients")


def _remarks(
    processes: list[GpuProcess], host: GpuHost, reported: bool
) -> Iterator[tuple[str, str]]:
    off = [named(gpu) for gpu in _used(processes, host) if gpu.persistence is False]
    if off:
        yield "persistence mode", f"off at the source on {', '.join(off)}"
    if not reported:
        yield "GPU memory", "NVML does not report it by process at the source: all in use counts"


def _used(processes: list[GpuProcess], host: GpuHost) -> list[NvmlGpu]:
    uuids = {uuid for process in processes for uuid in process.used}
    return [gpu for gpu in host.gpus if gpu.uuid in uuids]


def dotted(cuda: tuple[int, int]) -> str:
    return ".".join(map(str, cuda))
