# SPDX-License-Identifier: Apache-2.0
"""How a GPU helper begins and ends, and who may talk to it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from cuda_process import doubles
from doubles.gpu import build
from gpu_helper import MIB, TWO, A, B, StartHelper, StartProcess, busy, helper, pid_of, process
from waits import until

from liveshift.cuda_snapshot import driver
from liveshift.cuda_snapshot.checkpoint import CudaState, survey
from liveshift.cuda_snapshot.helper import client
from liveshift.cuda_snapshot.helper import connection as to_helper
from liveshift.cuda_snapshot.helper.calls import LOG, SOCKET, Welcome, done
from liveshift.cuda_snapshot.helper.channel import Channel, connect, listen
from liveshift.cuda_snapshot.helper.client import GpuHelper
from liveshift.errors import LiveshiftError, NotPermitted, Unreachable

__all__ = ["doubles", "helper", "process"]


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_agents_that_come_at_once_get_one_helper(
    doubles: build.Doubles, helper: StartHelper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIMCUDA_DEVICES", TWO)
    with ThreadPoolExecutor(4) as threads:
        started = list(threads.map(lambda _: GpuHelper.start(tmp_path, doubles.folder), range(4)))
    assert len({pid_of(gpu) for gpu in (*started, helper())}) == 1
    for gpu in started:
        gpu.close()
    with pytest.raises(Unreachable, match="has been closed"):
        started[0].host()


def test_it_survives_its_agent_and_keeps_what_it_knows(
    doubles: build.Doubles, helper: StartHelper, process: StartProcess, tmp_path: Path
) -> None:
    target = process()
    target.do(f"alloc({MIB})")
    program = (
        "import sys; from pathlib import Path;"
        "from liveshift.cuda_snapshot.helper.client import GpuHelper;"
        "gpu = GpuHelper.start(Path(sys.argv[1]), Path(sys.argv[2]));"
        "gpu.lock(int(sys.argv[3]), 5); gpu.checkpoint(int(sys.argv[3]))"
    )
    arguments = [str(tmp_path), str(doubles.folder), str(target.pid)]
    environment = {**os.environ, "SIMCUDA_DEVICES": TWO, "LD_PRELOAD": ""}
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, env=environment)
    gpu = helper()
    pid = pid_of(gpu)
    assert os.getsid(pid) == pid
    assert b"LD_PRELOAD" not in Path(f"/proc/{pid}/environ").read_bytes()
    gpu.restore(target.pid)
    gpu.unlock(target.pid)
    assert gpu.state(target.pid) is CudaState.RUNNING


def test_it_leaves_when_nobody_is_there(helper: StartHelper, tmp_path: Path) -> None:
    gpu = helper(idle_s=0.2)
    pid = pid_of(gpu)
    path = tmp_path / SOCKET
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(AssertionError):
        until(lambda: gone(pid), 0.5)  # a client is there
    gpu.close()
    until(lambda: gone(pid))
    assert not path.exists()
    again = helper()
    assert pid_of(again) != pid


def test_one_that_was_killed_is_replaced(helper: StartHelper, process: StartProcess) -> None:
    gpu, target = helper(), process()
    pid = pid_of(gpu)
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid))
    assert gpu.state(target.pid) is CudaState.RUNNING
    assert pid_of(gpu) != pid


def test_sigterm_waits_for_the_end_of_an_operation(
    helper: StartHelper, process: StartProcess, tmp_path: Path
) -> None:
    gpu, target, over = helper(), process(), tmp_path / "over"
    pid = pid_of(gpu)
    assert target.do(f"until_there({str(over)!r})") == 0
    with ThreadPoolExecutor() as threads:
        locking = threads.submit(gpu.lock, target.pid, 60)
        until(lambda: busy(gpu, target))
        os.kill(pid, signal.SIGTERM)
        assert gpu.state(target.pid) is CudaState.RUNNING
        over.touch()
        assert locking.result(20) is None
    until(lambda: gone(pid))
    assert gpu.state(target.pid) is CudaState.LOCKED, "said by the next one"
    gpu.unlock(target.pid)


def test_whose_helper_dies_in_an_operation_is_told(
    helper: StartHelper, process: StartProcess, tmp_path: Path
) -> None:
    gpu, target, over = helper(), process(), tmp_path / "over"
    assert target.do(f"until_there({str(over)!r})") == 0
    with ThreadPoolExecutor() as threads:
        locking = threads.submit(gpu.lock, target.pid, 60)
        until(lambda: busy(gpu, target))
        os.kill(pid_of(gpu), signal.SIGKILL)
        with pytest.raises(Unreachable, match="does not answer"):
            locking.result(20)
    over.touch()
    with suppress(LiveshiftError):  # it died before it had asked the driver, or the driver is at it
        gpu.lock(target.pid, 60)
    until(lambda: gpu.state(target.pid) is CudaState.LOCKED)


def test_a_stopped_process_does_not_hold_its_caller_for_ever(
    helper: StartHelper, process: StartProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "DRAIN_S", 0.2)
    gpu, target = helper(), process()
    until(lambda: "being probed" not in gpu.host().fast_path)  # which would have its turn first
    target.signal(signal.SIGSTOP)
    with pytest.raises(LiveshiftError, match=r"not done within 0.3 s; the driver has not finished"):
        gpu.lock(target.pid, 0.1, turn_s=0)
    assert busy(gpu, target)
    target.signal(signal.SIGCONT)
    # The driver ends the lock now, and the helper undoes it: nobody waits for it, or would unlock.
    until(lambda: not busy(gpu, target))
    assert gpu.state(target.pid) is CudaState.RUNNING
    gpu.lock(target.pid, 10)
    assert gpu.state(target.pid) is CudaState.LOCKED


# ---- none --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"SIMCUDA_DEVICES": ""}, r"NO_DEVICE \(100\): the driver sees no GPU"),
        ({"SIMCUDA_DRIVER": "560"}, r"\(CUDA 12.6\) has no cuCheckpoint.*install driver 580"),
    ],
)
def test_why_there_is_no_helper_is_said(
    helper: StartHelper, environment: dict[str, str], words: str
) -> None:
    with pytest.raises(LiveshiftError, match=f"the GPU helper can't start: .*{words}"):
        helper(**environment)


def test_no_driver_is_said(tmp_path: Path) -> None:
    """Where this machine has one, a file that is no library is found before it."""
    libraries = None
    if survey().why_none is None:
        libraries = tmp_path / "broken"
        libraries.mkdir()
        (libraries / driver.LIBRARY).write_text("no library")
    with pytest.raises(LiveshiftError, match=r"no CUDA driver: .*libcuda.so.1"):
        GpuHelper.start(tmp_path, libraries)


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match=r"no GPU helper can be started in .*/none"):
        GpuHelper.start(tmp_path / "none")


def test_folders_may_be_relative(
    doubles: build.Doubles, helper: StartHelper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIMCUDA_DEVICES", TWO)
    monkeypatch.chdir(tmp_path)
    libraries = Path(os.path.relpath(doubles.folder, tmp_path))
    with GpuHelper.start(Path("."), libraries) as gpu:
        assert pid_of(gpu) == pid_of(helper())
        assert [each.uuid for each in gpu.host().gpus] == [A, B]


def test_one_that_ends_at_once_is_said(
    doubles: build.Doubles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    with pytest.raises(LiveshiftError, match="ended before it could say why"):
        GpuHelper.start(tmp_path, doubles.folder)
    assert (tmp_path / LOG).read_text()


@pytest.mark.root
def test_it_is_for_root_only(doubles: build.Doubles, helper: StartHelper, tmp_path: Path) -> None:
    helper()
    tmp_path.chmod(0o755)
    (tmp_path / SOCKET).chmod(0o666)  # even so
    folder = os.open(tmp_path, os.O_PATH)
    program = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX);"
        "s.connect(f'/proc/self/fd/{sys.argv[1]}/gpu.sock'); s.settimeout(20); print(s.recv(1))"
    )
    drop = ["setpriv", "--reuid=65534", "--clear-groups"]
    try:
        said = subprocess.run(
            [*drop, sys.executable, "-S", "-c", program, str(folder)],
            capture_output=True,
            text=True,
            pass_fds=[folder],
        )
    finally:
        os.close(folder)
    assert said.stdout == "b''\n", said.stderr


def test_without_the_right_to_its_socket_one_is_told(
    helper: StartHelper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(directory: Path, name: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(to_helper, "connect", refused)
    with pytest.raises(NotPermitted, match="is for root only"):
        GpuHelper.start(tmp_path)


def test_what_it_does_not_understand_is_answered(helper: StartHelper, tmp_path: Path) -> None:
    gpu = helper()
    for raw in (b"\xc1", b"\x81\xa1t\xa4What", b"\x82\xa1t\xa5Hello\xa1x\x01"):
        with gpu.connection() as connection:
            connection.channel.send(raw)
            answer = connection.channel.receive()
        assert b"does not understand" in answer
    stranger = Channel(connect(tmp_path, SOCKET))
    stranger.socket.settimeout(20)
    stranger.socket.sendall(b"\xff\xff\xff\xff")
    with pytest.raises((EOFError, ConnectionError)):
        stranger.receive()
    stranger.close()
    assert gpu.host().gpus


def test_another_protocol_is_told_what_to_do(
    helper: StartHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper()
    monkeypatch.setattr(to_helper, "PROTOCOL", 99)
    with pytest.raises(Unreachable, match="speaks protocol 4, this is 99") as caught:
        helper()
    assert "SIGTERM" in str(caught.value.hint)


def test_a_helper_of_an_earlier_version_is_named(tmp_path: Path) -> None:
    """An earlier version of liveshift has started it, and it has survived its agent."""

    def answer_once(listener: socket.socket) -> object:
        with listener:
            connection, _ = listener.accept()
        channel = Channel(connection)
        request = msgspec.msgpack.decode(channel.receive())
        channel.send(msgspec.msgpack.encode(done(Welcome(1, 4711))))
        channel.close()
        return request

    listener = listen(tmp_path, SOCKET)
    listener.settimeout(20)
    with ThreadPoolExecutor(1) as threads:
        old = threads.submit(answer_once, listener)
        with pytest.raises(Unreachable, match="helper 4711 speaks protocol 1, this is 4") as caught:
            GpuHelper.start(tmp_path)
        assert old.result(20) == {"t": "Hello"}, "all that helpers of every version understand"
    assert "kill 4711 (SIGTERM)" in str(caught.value.hint)
