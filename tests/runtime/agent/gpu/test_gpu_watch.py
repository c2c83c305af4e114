# SPDX-License-Identifier: Apache-2.0
"""An agent's view of its GPUs, from a real helper on the simulated driver and NVML; and that the
driver takes the map that is made of two such views."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cuda_process import CudaProcess, doubles
from doubles.gpu import build
from gpu_helper import end_helper
from gpu_scenes import survey, task

from liveshift.cuda_snapshot.checkpoint import uuid_bytes, uuid_text
from liveshift.cuda_snapshot.helper.client import GpuHelper
from liveshift.errors import LiveshiftError
from liveshift.runtime.agent.gpu import survey as gpu_survey
from liveshift.runtime.agent.gpu import watch as gpu_watch
from liveshift.runtime.agent.gpu.preflight import plan
from liveshift.runtime.agent.gpu.watch import GpuWatch
from liveshift.runtime.messages import GpuSeat

__all__ = ["doubles"]

MIB = 1 << 20
MODEL = "liveshift simulated GPU H200"
# No other test has these GPUs: the double looks for their users among all processes of the machine.
A, B, C, D, E = (uuid_text(bytes.fromhex(digit * 28 + "6a7c")) for digit in "abcde")
HERE = f"{A}:H200:1GiB,{B}:H200:1GiB"
THERE = f"{C}:H200:1GiB,{D}:H200:64MiB,{E}:H200:2GiB"
Watch = Callable[[str], GpuWatch]


@pytest.fixture
def watch(
    doubles: build.Doubles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Watch]:
    """The view of a host that has these GPUs."""
    helpers: list[GpuHelper] = []

    def one(devices: str) -> GpuWatch:
        monkeypatch.setenv("SIMCUDA_DEVICES", devices)
        directory = tmp_path / str(len(helpers))
        directory.mkdir()
        made = GpuWatch(directory, doubles.folder)
        helper = made.helper()
        assert helper is not None, made.why_none
        helpers.append(helper)
        return made

    yield one
    for helper in helpers:
        with contextlib.suppress(LiveshiftError):
            end_helper(helper)
        helper.close()


@pytest.fixture
def process(doubles: build.Doubles) -> Iterator[CudaProcess]:
    """One that has 3 MiB on the second GPU of HERE."""
    one = CudaProcess(doubles, HERE, CUDA_VISIBLE_DEVICES="1")
    assert one.do("init()") == 0
    address = one.do(f"alloc({3 * MIB})")
    one.do(f"put({address}, b'content')")
    yield one
    one.end()


def test_a_host_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_watch, "SIGNS", (tmp_path / "nvidiactl",))
    watch = GpuWatch(tmp_path, tmp_path)  # a folder without libraries
    assert not watch.present()
    assert watch.helper() is None
    assert watch.host({}).fast_path == "no NVIDIA driver is installed"
    assert (watch.seats(()), watch.used_by([1]), watch.environment()) == ([], {}, {})
    assert watch.errors(60) == []


def test_a_driver_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")
    watch = GpuWatch(tmp_path, tmp_path)
    assert watch.present()
    assert watch.helper() is None
    assert "libcuda.so.1" in watch.why_none
    assert watch.host({}).gpus == []


def test_seats_and_who_sits_there(watch: Watch, process: CudaProcess) -> None:
    here = watch(HERE)
    host = here.host({A: "is promised to gpt/2 (m9)"})
    assert [gpu.uuid for gpu in host.gpus] == [A, B]
    assert (host.can_remap, host.mps) == (True, False)
    assert host.taken == {
        A: "is promised to gpt/2 (m9)",
        B: f"is used by process {process.pid}",
    }
    assert here.seats([]) == [GpuSeat(A, MODEL, True), GpuSeat(B, MODEL, False)]
    assert not any(seat.free for seat in here.seats([A]))
    used = here.used_by([1, process.pid])
    assert list(used) == [B]
    assert used[B] >= 3 * MIB
    assert here.used_by([1]) == {}


def test_the_driver_takes_the_map_of_a_plan(watch: Watch, process: CudaProcess) -> None:
    here, there = watch(HERE), watch(THERE)
    helper = here.helper()
    assert helper is not None
    of = task(host_pid=process.pid, device_files=False)
    found = gpu_survey.survey_devices(survey(of), {}, helper, here.host({}), 1 << 40)
    assert found is not None
    assert found.problems == []
    assert found.used == {B: 3 * MIB}
    made = plan(found, there.host({}), "", {}, "h1")
    assert made.findings == []
    assert dict(made.pairs) == {A: C, B: E}, "where most is free; the unused one anywhere"
    helper.lock(process.pid, 5)
    helper.checkpoint(process.pid)
    other = there.helper()
    assert other is not None
    other.restore(process.pid, made.pairs, needed={E: 3 * MIB})
    other.unlock(process.pid)
    assert process.do("uuids()") == [uuid_bytes(E).hex()]
    assert there.host({}).taken == {E: f"is used by process {process.pid}"}


def test_a_gpu_that_others_use_is_left_alone(watch: Watch, process: CudaProcess) -> None:
    here, alike = watch(HERE), watch(f"{C}:H200:1GiB,{B}:H200:1GiB")
    helper = here.helper()
    assert helper is not None
    of = task(host_pid=process.pid, device_files=False)
    found = gpu_survey.survey_devices(survey(of), {}, helper, here.host({}), 1 << 40)
    assert found is not None
    assert dict(plan(found, alike.host({}), "", {}, "h1").pairs) == {A: C, B: B}, "its own"
    elsewhere = watch(f"{D}:H200:4MiB,{E}:H100:1GiB")
    [(what, _)] = plan(found, elsewhere.host({}), "", {}, "h1").findings
    assert f"({MODEL}, 3.15 MB used)" in what
    assert "has less memory (4.19 MB, 272 MB needed)" in what
    assert "is another model (liveshift simulated GPU H100, not" in what
