# SPDX-License-Identifier: Apache-2.0
"""What of a capsule's GPUs stands in the way of a move: found at the source, in words, with what
to do about it; and what takes the fast path."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from gpu_scenes import GIB, MIB, Driver, gpu, gpu_host, page, survey, task

from liveshift.criu_glue.survey.found import GpuTask
from liveshift.cuda_snapshot.checkpoint import CudaState as Cuda
from liveshift.interposer.inspection import ProcessObstacle, ProcessState
from liveshift.interposer.page import PageError
from liveshift.runtime.agent.gpu.survey import survey_devices
from liveshift.runtime.messages import GpuHost, GpuProcess, GpuSurvey

HOST = gpu_host()
A = HOST.gpus[0].uuid
ONE = task()


def seen(
    found: GpuTask = ONE,
    of: ProcessState | None = None,
    host: GpuHost = HOST,
    state: Cuda | None = Cuda.RUNNING,
    used: dict[str, int] | None = None,
) -> GpuSurvey | None:
    states = {found.host_pid: state} if state is not None else {}
    driver = Driver(states, {found.host_pid: {A: 2 * GIB} if used is None else used})
    pages = {of.pid: of} if of is not None else {}
    return survey_devices(survey(found), pages, driver, host, 64 * GIB)


def finding(*args: Any, **kwargs: Any) -> tuple[str, str]:
    """The only thing that stands in the way."""
    found = seen(*args, **kwargs)
    assert found is not None
    [(what, remedy)] = found.problems
    return what, remedy


def test_no_task_with_a_gpu_is_nothing() -> None:
    assert survey_devices(survey(), {}, Driver({}, {}), HOST, GIB) is None
    loaded = replace(ONE, device_files=False)  # torch on a CPU
    assert seen(loaded, state=None) is None
    assert survey_devices(survey(loaded), {}, None, HOST, GIB) is None


def test_a_process_whose_memory_can_be_streamed() -> None:
    found = seen(of=page(arena=GIB, other=MIB))
    assert found == GpuSurvey(
        HOST, [GpuProcess(1002, 3, "python", {A: 2 * GIB}, GIB, "")], [], [], 64 * GIB
    )
    assert (found.used, found.total) == ({A: 2 * GIB}, 2 * GIB)
    assert found.by_driver("") == GIB  # contexts, and what the arena does not have
    assert found.by_driver("its driver does not bear it") == 2 * GIB


@pytest.mark.parametrize(
    ("of", "host", "words"),
    [
        (page(arena=GIB), msgspec.structs.replace(HOST, fast_path="the probe hung"), "probe hung"),
        (None, HOST, "the interposer has seen nothing of it"),
        (page(other=GIB), HOST, "none of its memory is from the interposer's arena"),
    ],
)
def test_why_the_driver_copies_it(of: ProcessState | None, host: GpuHost, words: str) -> None:
    found = seen(of=of, host=host)
    assert found is not None
    assert found.problems == []
    assert words in found.processes[0].plain
    assert found.by_driver("") == 2 * GIB


def test_what_its_page_tells_is_passed_on() -> None:
    managed = ProcessObstacle("1 piece (4096 bytes) of managed memory", "allocate with cudaMalloc")
    assert finding(of=page(1002, GIB, 0, managed)) == (
        "process 1002 (python): 1 piece (4096 bytes) of managed memory",
        "allocate with cudaMalloc",
    )


def test_a_page_that_cannot_be_read_is_in_the_way() -> None:
    """As that of an interposer of another version, after an upgrade: there is no boundary then."""
    driver = Driver({ONE.host_pid: Cuda.RUNNING}, {ONE.host_pid: {A: 2 * GIB}})
    for hint, remedy in (
        ("it keeps it until it ends", "it keeps it"),
        (None, "start the job again"),
    ):
        errors = {ONE.pid: PageError("it has page layout 3", hint=hint), 77: PageError("another's")}
        found = survey_devices(survey(ONE), {}, driver, HOST, 64 * GIB, errors)
        assert found is not None
        [(what, said)] = found.problems
        assert what == "process 1002 (python): it has page layout 3"
        assert remedy in said


@pytest.mark.parametrize(
    ("found", "words", "remedy"),
    [
        (replace(ONE, tracer=77), "is traced by process 77 (a debugger?)", "detach it"),
        (
            replace(ONE, injected=("libToolsInjection64.so",)),
            "has a CUDA tool in it: libToolsInjection64.so",
            "end the profiler",
        ),
        (
            replace(ONE, mps="/run/mps"),
            "through MPS (its daemon's pipes are in /run/mps)",
            "stop the MPS daemon",
        ),
    ],
)
def test_company_that_a_checkpoint_does_not_bear(found: GpuTask, words: str, remedy: str) -> None:
    what, hint = finding(found, of=page(arena=GIB))
    assert what.startswith("process 1002 (python) ")
    assert words in what
    assert remedy in hint


@pytest.mark.parametrize(
    ("fields", "words", "remedy"),
    [
        ({"mig": True}, "GPU 0 (GPU-a0000000) is partitioned by MIG", "nvidia-smi -mig 0"),
        ({"mps": True}, "GPU 0 (GPU-a0000000) is shared by MPS clients", "stop the MPS daemon"),
    ],
)
def test_gpus_that_no_driver_can_leave(fields: dict[str, bool], words: str, remedy: str) -> None:
    gpus = [gpu("a", 0, **fields), gpu("a", 1)]
    host = msgspec.structs.replace(HOST, gpus=gpus)
    what, hint = finding(of=page(arena=GIB), host=host)
    assert what == words
    assert remedy in hint
    elsewhere = seen(of=page(arena=GIB), host=host, used={gpus[1].uuid: GIB})
    assert elsewhere is not None
    assert elsewhere.problems == []


def test_a_driver_that_takes_no_checkpoint() -> None:
    old = msgspec.structs.replace(HOST, driver="565.57", cuda=(12, 7))
    what, hint = finding(of=page(arena=GIB), host=old)
    assert what == "the driver 565.57 (CUDA 12.7) cannot take a checkpoint"
    assert "CUDA 12.8 (570)" in hint


def test_a_host_whose_gpus_are_not_told() -> None:
    hanging = msgspec.structs.replace(HOST, gpus=[], why_none="NVML did not answer within 20 s")
    what, _ = finding(of=page(arena=GIB), host=hanging, used={})
    assert what == "NVML names no GPU at the source: NVML did not answer within 20 s"


def test_states_that_are_somebody_elses() -> None:
    what, hint = finding(of=page(arena=GIB), state=Cuda.LOCKED)
    assert what == "process 1002 (python) is LOCKED: another tool checkpoints it"
    assert "other tool" in hint
    what, hint = finding(of=page(arena=GIB), state=Cuda.FAILED)
    assert "has lost its GPU state" in what
    assert "ended" in hint


def test_forked_children_are_told_how_to_be_avoided() -> None:
    what, hint = finding(state=None)
    assert "process 1002 (python) holds NVIDIA's device files and is no CUDA process" in what
    assert "DataLoader" in what
    assert 'multiprocessing_context="spawn"' in hint
    assert "before the first CUDA call" in hint
    assert "590" in hint


def test_one_that_watches_by_nvml() -> None:
    what, hint = finding(replace(ONE, libcuda=False, name="gpu_stats"), state=None)
    assert "process 1002 (gpu_stats)" in what
    assert "NVML" in what
    assert "outside of the job" in hint


def test_a_helper_that_is_missing() -> None:
    host = GpuHost("", (0, 0), False, False, "no driver: libcuda.so.1 is not there", [])
    pages = {1002: page(arena=GIB)}
    for one, of in ((ONE, {}), (replace(ONE, device_files=False), pages)):
        found = survey_devices(survey(one), of, None, host, GIB)
        assert found is not None
        [(what, hint)] = found.problems
        assert "process 1002 (python) holds a GPU" in what
        assert "libcuda.so.1 is not there" in what
        assert "liveshift doctor" in hint


def test_memory_that_nvml_does_not_tell_by_process_is_counted_once() -> None:
    host = msgspec.structs.replace(HOST, gpus=[gpu("a", 0, free_bytes=40 * GIB), gpu("a", 1)])
    tasks = [task(1002), task(1003), task(1004)]
    driver = Driver({t.host_pid: Cuda.RUNNING for t in tasks}, {})
    pages = {pid: page(pid, arena=10 * GIB) for pid in (1002, 1003)} | {1004: page(1004)}
    found = survey_devices(survey(*tasks), pages, driver, host, GIB)
    assert found is not None
    assert found.used == {host.gpus[0].uuid: 100 * GIB, host.gpus[1].uuid: GIB}
    assert found.by_driver("") == 81 * GIB
    assert (
        "GPU memory",
        "NVML does not report it by process at the source: all in use counts",
    ) in found.remarks


def test_persistence_mode_off_is_worth_knowing() -> None:
    host = msgspec.structs.replace(HOST, gpus=[gpu("a", 0, persistence=False)])
    found = seen(of=page(arena=GIB), host=host)
    assert found is not None
    assert found.problems == []
    assert found.remarks == [("persistence mode", "off at the source on GPU 0 (GPU-a0000000)")]
