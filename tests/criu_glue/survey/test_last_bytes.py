# SPDX-License-Identifier: Apache-2.0
"""What a program had sent before it ended is on its way for as long as the kernel keeps it. The
kernel is real, but for what only a long silence would show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from liveshift.criu_glue.network.tcp_sockets import TcpSocket
from liveshift.criu_glue.survey import last_bytes
from liveshift.criu_glue.survey.last_bytes import under_way

RETRANSMIT, PROBE = 1, 4  # what the kernel's timer of a connection is for

SLOW_READER = """
import socket, subprocess, time
from pathlib import Path
from liveshift.criu_glue.survey.last_bytes import under_way
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
own = Path("/proc/self/ns/net")
server = socket.create_server(("127.0.0.1", 0))
sender = socket.create_connection(server.getsockname())
reader = server.accept()[0]
sender.setblocking(False)
sent = 0
try:
    while True:
        sent += sender.send(bytes(1 << 16))
except BlockingIOError:
    print("open", under_way(own))
sender.close()
print("closed", under_way(own))
got = 0
while chunk := reader.recv(1 << 16):
    got += len(chunk)
until = time.monotonic() + 20  # a kernel acknowledges the last bytes some time later
while under_way(own) and time.monotonic() < until:
    time.sleep(0.01)
print("read", got == sent, under_way(own))
reader.close()
"""
"""A peer has a full buffer. The connection is closed, and then the peer reads."""


@pytest.mark.root
def test_bytes_for_a_slow_reader_are_under_way_until_it_has_read_them() -> None:
    words = ["unshare", "--net", sys.executable, "-c", SLOW_READER]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert ran.stdout.splitlines() == ["open False", "closed True", "read True False"], ran.stderr


def seen(monkeypatch: pytest.MonkeyPatch, **facts: float) -> bool:
    """Whether a closed connection with these facts counts."""
    usual = {"timer": RETRANSMIT, "times": 0, "left_s": 0.2, "timeout_s": 0.2, "unacknowledged": 9}
    one = TcpSocket(2, b"", "10.99.1.2", 5000, **{**usual, **facts})  # type: ignore[arg-type]
    monkeypatch.setattr(last_bytes, "tcp_sockets", lambda *_: iter([one]))
    return under_way(Path("/nowhere"))


def test_the_end_of_a_stream_alone_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that has ended, too, has no network any more that could acknowledge it."""
    assert not seen(monkeypatch, unacknowledged=1)
    assert seen(monkeypatch, unacknowledged=2)


def test_a_peer_that_is_gone_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(monkeypatch, times=3, timeout_s=1.6, left_s=1.0)
    assert not seen(monkeypatch, times=5, timeout_s=6.4, left_s=5.0)


def test_a_peer_that_answers_may_read_as_slowly_as_it_likes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert seen(monkeypatch, timer=PROBE, times=0, timeout_s=120.0)
    assert not seen(monkeypatch, timer=PROBE, times=5)


def test_without_a_namespace_nothing_is_sent(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        under_way(tmp_path / "gone")
