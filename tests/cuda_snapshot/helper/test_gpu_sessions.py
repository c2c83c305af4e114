# SPDX-License-Identifier: Apache-2.0
"""Device sessions: memory that a process gives up and gets back, and what goes wrong meanwhile."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cuda_process import doubles
from descriptors import no_descriptor_left
from doubles.gpu import build
from gpu_memory_helper import ARENA, MIB, UA, UB, Helper, drained, fill, helper, helpers

from liveshift.cuda_snapshot.checkpoint import CudaState
from liveshift.cuda_snapshot.helper import process_session
from liveshift.cuda_snapshot.helper.blocks import Block
from liveshift.cuda_snapshot.helper.client import GpuHelper
from liveshift.cuda_snapshot.helper.session_client import DeviceSession
from liveshift.errors import LiveshiftError, StepFailed
from liveshift.interposer import device_session as wire

__all__ = ["doubles", "helper", "helpers"]

HOLDER = Path(build.__file__).with_name("holder.py")
KEY = "1/100"
ROOMY = f"{UA}:H200:2GiB,{UB}:H200:2GiB"
"""A restore wants some to spare."""


class Holder:
    """The process of doubles/gpu/holder.py."""

    def __init__(self, libcuda: Path, folder: Path, held: str, **environment: str) -> None:
        self.folder = folder
        self.inner = int(environment.get("INNER", 0))
        self._process = subprocess.Popen(
            [sys.executable, str(HOLDER), str(libcuda), str(folder), held],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "SIMCUDA_DEVICES": ROOMY, **environment},
        )
        self.pid = self._process.pid
        assert self.answer() == "ready"

    def say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def sum(self) -> str:
        self.say("sum")
        return self.answer()

    def session(self, gpu: GpuHelper) -> DeviceSession:
        session = gpu.session(self.pid, self.folder, self.inner or self.pid)
        self.say("serve")
        session.wait(20)
        return session

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


Hold = Callable[..., Holder]


@pytest.fixture
def hold(doubles: build.Doubles, tmp_path: Path) -> Iterator[Hold]:
    """Starts holders, in a folder whose path is longer than a socket's may be, and ends them."""
    started: list[Holder] = []
    folder = tmp_path / ("pages" * 25)
    folder.mkdir()

    def one(held: str = "2@0,6@0", **environment: str) -> Holder:
        # The holder connects by its working directory: its own path has the same limit.
        started.append(Holder(doubles.libcuda, folder, held, **environment))
        return started[-1]

    yield one
    for holder in started:
        holder.end()


def moved(session: DeviceSession) -> list[Block]:
    return [block for block in session.blocks() if block.kind == ARENA]


# ---- what goes well ----------------------------------------------------------------------------


def test_memory_is_given_up_and_taken_back(helper: Helper, hold: Hold) -> None:
    gpu, process = helper(devices=ROOMY), hold("2@0,6@1,4@0")
    before = process.sum()
    with process.session(gpu) as session:
        sums = session.checksums(0)
        assert len(sums) == 6
        assert session.checksums(8).keys() == sums.keys()
        given = session.give_up(KEY)
        assert [(b.size // MIB, b.gpu) for b in given] == [(2, UA), (6, UB), (4, UA)]
        assert given == moved(session)
        assert gpu.held() == {KEY: 12 * MIB}
        assert len(session.checksums(0)) == 3
    assert process.answer() == "ended"
    assert process.sum() != before
    with process.session(gpu) as session:
        session.take_back(KEY)
        assert session.checksums(0) == sums
    assert process.answer() == "ended"
    assert process.sum() == before
    assert gpu.held() == {}


def test_a_checkpoint_between_takes_only_what_stayed(helper: Helper, hold: Hold) -> None:
    gpu, process = helper(devices=ROOMY), hold("2@0,6@0")
    before = process.sum()
    for _ in range(3):  # what came by descriptor can be given up again
        with process.session(gpu) as session:
            session.give_up(KEY)
        assert process.answer() == "ended"
        gpu.lock(process.pid, 10)
        gpu.checkpoint(process.pid)
        assert gpu.state(process.pid) is CudaState.CHECKPOINTED
        data = drained(gpu, KEY)  # while it is frozen
        assert len(data) == 8 * MIB
        gpu.restore(process.pid)
        gpu.unlock(process.pid)
        with process.session(gpu) as session:
            session.take_back(KEY)
        assert process.answer() == "ended"
        assert process.sum() == before


def test_memory_made_and_filled_elsewhere_is_mapped(helper: Helper, hold: Hold) -> None:
    gpu, process = helper(devices=ROOMY), hold("2@0,6@0")
    before = process.sum()
    with process.session(gpu) as session:
        given = session.give_up(KEY)
        data = drained(gpu, KEY)
        gpu.drop(KEY)
        gpu.create(KEY, given)
        fill(gpu, KEY, data)
        session.take_back(KEY)
    assert process.answer() == "ended"
    assert process.sum() == before


def test_memory_follows_its_process_onto_another_gpu(helper: Helper, hold: Hold) -> None:
    gpu, process = helper(devices=ROOMY), hold("2@0,6@0")
    before = process.sum()
    with process.session(gpu) as session:
        session.give_up(KEY)
    assert process.answer() == "ended"
    gpu.lock(process.pid, 10)
    gpu.checkpoint(process.pid)
    gpu.restore(process.pid, [(UA, UB), (UB, UA)])
    gpu.unlock(process.pid)
    with process.session(gpu) as session:
        assert {block.gpu for block in session.blocks()} == {UB}
        session.take_back(KEY)
    assert process.answer() == "ended"
    assert process.sum() == before


# ---- what goes wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["SYNC:1:999", "EXPORT:1:2", "EXPORT:3:2", "EXPORT:2:bare"])
def test_a_failed_export_changes_nothing(helper: Helper, hold: Hold, fault: str) -> None:
    gpu, process = helper(devices=ROOMY), hold("2@0,6@0,2@1", FAULTS=fault)
    before = process.sum()
    with process.session(gpu) as session:
        why = "no descriptor came" if "bare" in fault else "as the test wishes"
        with pytest.raises(StepFailed, match=f"process {process.pid}.*{why}"):
            session.give_up(KEY)
        assert gpu.held() == {}
        session.give_up(KEY)
        session.take_back(KEY)
    assert process.answer() == "ended"
    assert process.sum() == before


@pytest.mark.parametrize("count", [1, 3])
def test_a_failed_release_is_undone(helper: Helper, hold: Hold, count: int) -> None:
    gpu, process = helper(devices=ROOMY), hold("2@0,6@0,2@1", FAULTS=f"RELEASE:{count}:1")
    before = process.sum()
    with process.session(gpu) as session, pytest.raises(StepFailed, match="release device memory"):
        session.give_up(KEY)
    assert process.answer() == "ended"
    assert process.sum() == before
    assert gpu.held() == {}


def test_what_cannot_be_undone_is_kept_and_said(helper: Helper, hold: Hold) -> None:
    gpu, process = helper(devices=ROOMY), hold("2@0,6@0,2@1", FAULTS="RELEASE:3:1,MAP:2:1")
    before = process.sum()
    with process.session(gpu) as session:
        with pytest.raises(StepFailed, match=rf"8\.39 MB .* holds all of it for {KEY}"):
            session.give_up(KEY)
        assert gpu.held() == {KEY: 10 * MIB}
        session.take_back(KEY)  # the fault was but once
    assert process.answer() == "ended"
    assert process.sum() == before


def test_a_failed_map_can_be_tried_again(helper: Helper, hold: Hold) -> None:
    gpu, process = helper(devices=ROOMY), hold("2@0,6@0,2@1", FAULTS="MAP:2:2")
    before = process.sum()
    with process.session(gpu) as session:
        session.give_up(KEY)
        with pytest.raises(StepFailed, match="map device memory at 0x"):
            session.take_back(KEY)
        assert gpu.held() == {KEY: 10 * MIB}
        session.take_back(KEY)
    assert process.answer() == "ended"
    assert process.sum() == before


@pytest.mark.parametrize("how", ["die", "close"])
def test_a_process_that_leaves_in_the_middle(helper: Helper, hold: Hold, how: str) -> None:
    gpu = helper(devices=ROOMY)
    early = hold("2@0,6@0", FAULTS=f"EXPORT:2:{how}")
    with early.session(gpu) as session, pytest.raises(StepFailed, match="instead of answering EXP"):
        session.give_up(KEY)
    assert gpu.held() == {}
    late = hold("2@0,6@0", FAULTS=f"RELEASE:2:{how}")
    with late.session(gpu) as session:
        with pytest.raises(StepFailed, match=f"holds all of it for {KEY}"):
            session.give_up(KEY)
        with pytest.raises(StepFailed, match="is over"):
            session.blocks()
    assert gpu.held() == {KEY: 8 * MIB}
    assert len(drained(gpu, KEY)) == 8 * MIB


def test_memory_that_was_never_filled_is_not_given(helper: Helper, hold: Hold) -> None:
    gpu, process = helper(devices=ROOMY), hold("2@0,6@0")
    with process.session(gpu) as session:
        given = session.give_up(KEY)
        data = drained(gpu, KEY)
        gpu.drop(KEY)
        gpu.create(KEY, given)
        with pytest.raises(StepFailed, match="never filled"):
            session.take_back(KEY)
        gpu.drop(KEY)
        gpu.create(KEY, given[:1])
        fill(gpu, KEY, data[: 2 * MIB])
        with pytest.raises(StepFailed, match=r"does not hold 1 of 2 blocks .*6\.29 MB"):
            session.take_back(KEY)
        assert len(session.checksums(0)) == 2
    assert process.answer() == "ended"


def test_only_the_process_itself_gets_in(helper: Helper, hold: Hold) -> None:
    gpu, process = helper(devices=ROOMY), hold("2@0", INNER="77")
    with gpu.session(process.pid, process.folder, 77) as session:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here = os.open(process.folder, os.O_PATH)
        with stranger:
            stranger.connect(f"/proc/self/fd/{here}/.device.77")
            os.close(here)
            process.say("serve")
            session.wait(20)
            assert stranger.recv(1) == b""
        assert len(moved(session)) == 1
    assert process.answer() == "ended"
    assert list(process.folder.iterdir()) == []


def test_one_that_says_it_is_another(helper: Helper, hold: Hold) -> None:
    gpu, process = helper(devices=ROOMY), hold("2@0", INNER="77", SAYS="78")
    with gpu.session(process.pid, process.folder, 77) as session:
        process.say("serve")
        with pytest.raises(StepFailed, match="process 78 inside"):
            session.wait(20)


def test_nobody_comes(helper: Helper, tmp_path: Path) -> None:
    gpu = helper(devices=ROOMY)
    with gpu.session(os.getpid(), tmp_path, 5) as session:
        with pytest.raises(StepFailed, match=r"did not connect within 0\.1 s"):
            session.wait(0.1)
        with pytest.raises(StepFailed, match="has not begun"):
            session.blocks()
    with pytest.raises(StepFailed, match="can't open"):
        gpu.session(os.getpid(), tmp_path / "none", 5)


def test_what_lies_in_the_sockets_place_is_replaced_not_followed(
    helper: Helper, tmp_path: Path
) -> None:
    gpu = helper(devices=ROOMY)
    secret = tmp_path / "secret"
    secret.write_text("root's")
    secret.chmod(0o600)
    folder = tmp_path / "pages"
    folder.mkdir()
    (folder / ".device.5").symlink_to(secret)
    with gpu.session(os.getpid(), folder, 5):
        assert (folder / ".device.5").is_socket()
        assert (folder / ".device.5").stat().st_mode & 0o777 == 0o666
    assert secret.stat().st_mode & 0o777 == 0o600
    (folder / ".device.5").unlink(missing_ok=True)
    (folder / ".device.5").mkdir()
    with pytest.raises(StepFailed, match="can't listen"):
        gpu.session(os.getpid(), folder, 5)


def test_the_agent_dies_in_a_session(helper: Helper, hold: Hold) -> None:
    """The connection's end is all that the helper sees of it."""
    gpu, process = helper(devices=ROOMY), hold("2@0,6@0")
    before = process.sum()
    session = process.session(gpu)
    session.give_up(KEY)
    session.close()
    assert process.answer() == "ended"
    assert gpu.held() == {KEY: 8 * MIB}
    with process.session(gpu) as session:
        session.take_back(KEY)
    assert process.answer() == "ended"
    assert process.sum() == before


def test_a_context_is_made_before_it_is_needed_or_refused(helper: Helper) -> None:
    gpu = helper(devices=ROOMY)
    gpu.warm(KEY, [UA])
    with pytest.raises(LiveshiftError, match="no GPU-cc"):
        gpu.warm(KEY, [UA.replace("a", "c")])
    gpu.drop(KEY)
    assert gpu.held() == {}


# ---- answers that are none ---------------------------------------------------------------------


def said(op: int, **fields: int) -> bytes:
    """A reply of that kind."""
    values = dict.fromkeys(("result", "address", "size", "value", "device", "kind"), 0) | fields
    return wire.REPLY.struct.pack(
        op,
        *(values[name] for name in ("result", "address", "size", "value", "device", "kind")),
        bytes(16),
        bytes(96),
    )


HELLO = said(wire.Op.HELLO, value=os.getpid(), kind=wire.PROTOCOL)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, r"no answer to NEXT within 0\.1 s"),
        (said(wire.Op.SYNC), "it answered 6 to NEXT"),
        (said(wire.Op.NEXT)[:-1], "the reply has 151 bytes"),
        (said(wire.Op.NEXT) + b"more", "the reply has 153 bytes"),
        (said(wire.Op.NEXT, result=-errno.EINVAL), "list its device memory: Invalid argument"),
    ],
)
def test_an_answer_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes | None, why: str
) -> None:
    monkeypatch.setattr(process_session, "ANSWER_S", 0.1)
    session = process_session.ProcessSession(os.getpid(), tmp_path, os.getpid())
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with closing(session), peer:
        peer.connect(str(tmp_path / wire.socket_name(os.getpid())))
        peer.send(HELLO)
        session.wait(5)
        if answer is not None:
            peer.send(answer)
        with pytest.raises(StepFailed, match=why):
            session.blocks()
        assert session.over == (answer is None or len(answer) != 152 or "answered" in why)


@pytest.mark.parametrize("call", ["socket.socket", "os.open"])
def test_a_session_that_cannot_be_made_keeps_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with no_descriptor_left(), monkeypatch.context() as patched:
        patched.setattr(call, refuse)
        with pytest.raises(StepFailed, match=r"can't .*: Too many open files"):
            process_session.ProcessSession(os.getpid(), tmp_path, os.getpid())


def test_descriptors_that_nobody_asked_for_are_closed(tmp_path: Path) -> None:
    session = process_session.ProcessSession(os.getpid(), tmp_path, os.getpid())
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours, theirs = os.pipe()
    with closing(session), peer:
        peer.connect(str(tmp_path / wire.socket_name(os.getpid())))
        peer.send(HELLO)
        session.wait(5)
        socket.send_fds(peer, [said(wire.Op.SYNC)], [theirs, theirs])
        os.close(theirs)
        with pytest.raises(StepFailed, match="answered SYNC with 2 descriptors"):
            session.sync()
    assert os.read(ours, 1) == b""  # no writer is left
    os.close(ours)


def test_a_hello_of_another_time(tmp_path: Path) -> None:
    session = process_session.ProcessSession(os.getpid(), tmp_path, os.getpid())
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with closing(session), peer:
        peer.connect(str(tmp_path / wire.socket_name(os.getpid())))
        peer.send(said(wire.Op.HELLO, value=os.getpid(), kind=wire.PROTOCOL + 1))
        with pytest.raises(StepFailed, match=f"speaks protocol {wire.PROTOCOL + 1}"):
            session.wait(5)
