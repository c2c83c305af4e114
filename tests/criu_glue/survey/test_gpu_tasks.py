# SPDX-License-Identifier: Apache-2.0
"""What /proc shows of a task's GPU: device files, the driver's library, debuggers, tools, MPS."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from liveshift.criu_glue.survey.found import GpuTask
from liveshift.criu_glue.survey.gpu_tasks import look

HOLD = """
import mmap, os, sys
kept = []
for how, path in zip(sys.argv[1::2], sys.argv[2::2]):
    fd = os.open(path, os.O_RDWR)
    if how == "open":
        kept.append(fd)
        continue
    kept.append(mmap.mmap(fd, 4096))
    os.close(fd)
print("holding", flush=True)
sys.stdin.read()
"""
Hold = Callable[..., GpuTask | None]


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Hold]:
    """Starts a process that maps or opens files, as ``map PATH open PATH``, and looks at it;
    ``dev``: files of the same names as in that folder are its /dev."""
    started: list[subprocess.Popen[str]] = []

    def one(*what: str, dev: Path | None = None, before: str = "", **variables: str) -> object:
        inside = [sys.executable, "-S", "-c", before + HOLD, *what]
        if dev is not None:
            mount = 'mount --bind "$0" /dev && exec "$@"'
            inside = ["unshare", "-m", "sh", "-c", mount, str(dev), *inside]
        process = subprocess.Popen(
            inside,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": os.environ["PATH"], **variables},
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        return look(process.pid, 1001, "python")

    yield one  # type: ignore[misc]
    for process in started:
        process.kill()
        process.communicate()


def file(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(4096))
    return str(path)


def test_a_task_without_a_gpu_is_none(hold: Hold, tmp_path: Path) -> None:
    assert hold("map", file(tmp_path / "libcudart.so.13"), CUDA_INJECTION64_PATH="/x.so") is None


def test_the_drivers_library(hold: Hold, tmp_path: Path) -> None:
    found = hold("map", file(tmp_path / "libcuda.so.580.159"))
    assert found is not None
    assert (found.pid, found.name) == (1001, "python")
    assert (found.libcuda, found.device_files) == (True, False)
    assert (found.tracer, found.injected, found.mps) == (0, (), "")
    assert os.path.samefile(f"/proc/{found.host_pid}/exe", sys.executable)


@pytest.mark.root
@pytest.mark.parametrize("how", ["open", "map"])
def test_device_files(hold: Hold, tmp_path: Path, how: str) -> None:
    file(tmp_path / "dev/nvidia0")
    found = hold(how, "/dev/nvidia0", dev=tmp_path / "dev")
    assert found is not None
    assert (found.libcuda, found.device_files) == (False, True)


def test_tools_are_named_and_libcupti_is_none(hold: Hold, tmp_path: Path) -> None:
    libcuda, cupti = file(tmp_path / "libcuda.so.1"), file(tmp_path / "libcupti.so.13")
    quiet = hold("map", libcuda, "map", cupti, CUDA_INJECTION64_PATH="")
    assert quiet is not None
    assert quiet.injected == ()
    nsight = file(tmp_path / "nsys/libToolsInjection64.so")
    found = hold("map", libcuda, "map", nsight, CUDA_INJECTION64_PATH="/opt/x.so")
    assert found is not None
    assert found.injected == ("libToolsInjection64.so", "CUDA_INJECTION64_PATH=/opt/x.so")


def test_an_mps_daemon_counts_only_where_its_pipe_is(hold: Hold, tmp_path: Path) -> None:
    libcuda = file(tmp_path / "libcuda.so.1")
    pipes = tmp_path / "mps"
    pipes.mkdir()
    without = hold("map", libcuda, CUDA_MPS_PIPE_DIRECTORY=str(pipes))
    assert without is not None
    assert without.mps == ""
    os.mkfifo(pipes / "control")
    found = hold("map", libcuda, CUDA_MPS_PIPE_DIRECTORY=str(pipes))
    assert found is not None
    assert found.mps == str(pipes)


def test_a_debugger_is_seen(hold: Hold, tmp_path: Path) -> None:
    """PTRACE_TRACEME: our own process is its tracer from then on."""
    traced = "import ctypes; assert ctypes.CDLL(None).ptrace(0, 0, 0, 0) == 0\n"
    found = hold("map", file(tmp_path / "libcuda.so.1"), before=traced)
    assert found is not None
    assert found.tracer == os.getpid()


def test_one_that_has_ended_is_said_to_be_gone() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(FileNotFoundError):
        look(ended.pid, 1001, "true")
