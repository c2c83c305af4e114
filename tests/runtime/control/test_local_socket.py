# SPDX-License-Identifier: Apache-2.0
"""The daemons' UNIX socket: who asks is what the kernel says. (The client: test_client.py.)"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import stat
import struct
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from liveshift.errors import Refused
from liveshift.runtime import messages
from liveshift.runtime.control import local_socket
from liveshift.runtime.messages import Message, RunJob
from liveshift.runtime.model.jobs import MOST_CAPSULES

NOBODY = 65534


@pytest.fixture
def path() -> Iterator[Path]:
    """In a directory that every user may enter, which pytest's own are not."""
    directory = Path(tempfile.mkdtemp(prefix="ls-socket-"))
    directory.chmod(0o755)
    yield directory / "below" / "agent.sock"
    shutil.rmtree(directory)


async def whoami(uid: int, ask: Message) -> Message | None:
    if isinstance(ask, messages.Untaint):
        raise Refused("h9 is not tainted", hint="nothing to do")
    return messages.Named(str(uid))


def served(path: Path, talk: Callable[[], object]) -> object:
    """Run ``talk`` in a thread while the socket is served."""

    async def scene() -> object:
        server = await local_socket.serve_on(local_socket.listen(path), path, whoami)
        async with server:
            return await asyncio.wait_for(asyncio.to_thread(talk), 20)

    return asyncio.run(scene())


def exchange(path: Path, *frames: bytes) -> list[bytes]:
    """Send frames on one connection and take as many answers as come before it is closed."""
    answers: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(10)
        line.connect(str(path))
        for frame in frames:
            with suppress(BrokenPipeError):  # it may have been refused at once
                line.sendall(frame)
            head = exactly(line, 4)
            if len(head) < 4:
                break
            answers.append(exactly(line, struct.unpack("<I", head)[0]))
    return answers


def exactly(line: socket.socket, length: int) -> bytes:
    """Fewer bytes when the other end hangs up."""
    data = bytearray()
    while len(data) < length and (part := line.recv(length - len(data))):
        data += part
    return bytes(data)


def framed(ask: Message, number: int = 1) -> bytes:
    raw = messages.encode_request(number, ask)
    return struct.pack("<I", len(raw)) + raw


def test_several_asks_on_one_connection(path: Path) -> None:
    asks = [framed(messages.GetStatus(), n) for n in (1, 2, 3)]
    frames = [messages.decode(a) for a in served(path, lambda: exchange(path, *asks))]  # type: ignore[attr-defined]
    assert [f.id for f in frames] == [1, 2, 3]
    assert {f.answer for f in frames} == {messages.Named(str(os.getuid()))}


@pytest.mark.root
def test_another_user_is_known_by_its_uid(path: Path) -> None:
    def as_nobody() -> str:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:  # the child only writes and leaves
            code = 1
            try:
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                answer = messages.decode(exchange(path, framed(messages.GetStatus()))[0]).answer
                os.write(write, answer.name.encode() if isinstance(answer, messages.Named) else b"")
                code = 0
            finally:
                os._exit(code)
        os.close(write)
        with os.fdopen(read, "rb") as said:
            name = said.read().decode()
        assert os.waitpid(child, 0)[1] == 0
        return name

    assert served(path, as_nobody) == str(NOBODY)


def test_any_user_may_connect_and_a_left_over_socket_is_replaced(path: Path) -> None:
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(path))
    assert served(path, lambda: stat.S_IMODE(path.stat().st_mode)) == 0o666


def test_what_is_wrong_is_answered_and_the_next_ask_is_served(path: Path) -> None:
    answer = messages.encode_answer(7, None)
    frames = (
        struct.pack("<I", 3) + b"\xc1xx",
        struct.pack("<I", len(answer)) + answer,
        framed(messages.Untaint("h9"), 8),
        framed(messages.GetStatus(), 9),
    )
    got = [messages.decode(a) for a in served(path, lambda: exchange(path, *frames))]  # type: ignore[attr-defined]
    assert [f.id for f in got] == [0, 7, 8, 9]
    assert "not understood" in (got[0].error or ("", "", ""))[1]
    assert "takes requests only" in (got[1].error or ("", "", ""))[1]
    assert got[2].error == ("Refused", "h9 is not tainted", "nothing to do")
    assert got[3].answer == messages.Named(str(os.getuid()))


def test_a_frame_beyond_the_limit_is_refused_and_closes_the_connection(path: Path) -> None:
    def talk() -> list[bytes]:
        answers = exchange(path, struct.pack("<I", local_socket.LIMIT + 1))
        assert len(answers) == 1
        assert "the request has" in (messages.decode(answers[0]).error or ("", ""))[1]
        return exchange(path, framed(messages.GetStatus()))

    assert len(served(path, talk)) == 1  # type: ignore[arg-type]


def test_a_caller_that_hangs_up_stops_nobody(path: Path) -> None:
    def talk() -> list[bytes]:
        for n in range(5):
            with socket.socket(socket.AF_UNIX) as line:
                line.connect(str(path))
                line.sendall(framed(messages.GetStatus())[: n * 3])
        return exchange(path, framed(messages.GetStatus()))

    assert len(served(path, talk)) == 1  # type: ignore[arg-type]


# ---- nobody keeps others out ----


def error_of(frames: list[bytes]) -> str:
    return (messages.decode(frames[0]).error or ("", ""))[1]


def as_user(uid: int, talk: Callable[[], None]) -> None:
    """Do something as another user, in a process of its own; it fails when that does."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgid(uid)
            os.setuid(uid)
            talk()
            code = 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.root
def test_one_users_connections_leave_room_for_the_others(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_socket, "MOST_OF_A_USER", 3)
    monkeypatch.setattr(local_socket, "MOST_CONNECTIONS", 5)

    def hold(count: int) -> list[socket.socket]:
        lines = []
        for _ in range(count):
            lines.append(socket.socket(socket.AF_UNIX))
            lines[-1].connect(str(path))
            lines[-1].sendall(framed(messages.GetStatus()))
            assert lines[-1].recv(4, socket.MSG_WAITALL)
        return lines

    def greedy() -> None:
        held = hold(3)
        assert "3 of them from uid 65534, and takes no more" in error_of(exchange(path, b""))
        for line in held:
            line.close()

    def talk() -> None:
        as_user(NOBODY, greedy)
        others = hold(5)  # root's: not counted against root
        as_user(NOBODY, lambda: check("has 5 connections, 0 of them from uid 65534"))
        assert len(exchange(path, framed(messages.GetStatus()))) == 1
        for line in others:
            line.close()

    def check(text: str) -> None:
        """In a while: that others have hung up is not seen at once."""
        until = time.monotonic() + 10
        while text not in (error := error_of(exchange(path, b""))):
            assert time.monotonic() < until, error

    served(path, talk)


def test_neither_two_users_nor_four_large_jobs_take_all_connections() -> None:
    assert 4 * local_socket.MOST_OF_A_USER < local_socket.MOST_CONNECTIONS
    assert 4 * (MOST_CAPSULES + 1) < local_socket.MOST_CONNECTIONS


def test_who_stops_in_the_middle_of_a_frame_is_hung_up_on(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_socket, "TRANSFER_S", 0.2)

    def talk() -> bytes:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(10)
            line.connect(str(path))
            line.sendall(framed(messages.GetStatus())[:-1])
            return line.recv(1)

    assert served(path, talk) == b""


def test_who_takes_no_answer_is_hung_up_on_and_others_are_served(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_socket, "MOST_LONG", 1)
    within = [0.3]  # the first answer alone: all else takes what it takes on a busy machine
    ask = RunJob("x" * (4 << 20), 1, [], {}, "/", 0, [])

    async def echo(uid: int, ask: Message) -> Message | None:
        monkeypatch.setattr(local_socket, "TRANSFER_S", within.pop() if within else 30.0)
        return messages.Named(ask.name if isinstance(ask, RunJob) else str(uid))

    monkeypatch.setitem(globals(), "whoami", echo)

    def talk() -> None:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(10)
            line.connect(str(path))
            line.sendall(framed(ask))
            assert line.recv(4, socket.MSG_WAITALL)  # the answer has begun; no more is taken
            monkeypatch.setattr(local_socket, "TRANSFER_S", 30.0)
            assert len(exchange(path, framed(messages.GetStatus()))) == 1
            got = messages.decode(exchange(path, framed(ask))[0])  # when the other one is out
            assert got.answer == messages.Named(ask.name)
            rest = b""
            while part := line.recv(1 << 20):
                rest += part
            assert len(rest) < 4 << 20, "it was cut off"

    served(path, talk)
