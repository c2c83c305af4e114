# SPDX-License-Identifier: Apache-2.0
"""Which peers have not answered, and for how long, is read off the kernel's sockets."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct

import pytest

from liveshift.criu_glue.network import tcp_sockets
from liveshift.criu_glue.survey.unanswered import missed_answers, unanswered

AGAIN, PROBE, KEEP_ALIVE = 1, 4, 2  # what the kernel's timer of a connection is for
PEER = "10.99.1.2"


def entry(timer: int, times: int, left_s: float, timeout_s: float, peer: str = PEER) -> bytes:
    """A connection, as the kernel describes it (inet_diag_msg, and tcp_info behind it)."""
    address = ipaddress.ip_address(peer)
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    ports = struct.pack("!HH", 4000, 5000)
    own, raw = bytes(16), address.packed.ljust(16, bytes(1))
    rest = struct.pack("=IIIIIIII", 0, 0, 0, round(left_s * 1000), 0, 1600, 0, 4711)
    info = struct.pack("=8xI", round(timeout_s * 1e6)) + bytes(92)
    head = struct.pack("=BBBB", family, 1, timer, times)
    return head + ports + own + raw + rest + struct.pack("=HH", 4 + len(info), 2) + info


def read(monkeypatch: pytest.MonkeyPatch, *entries: bytes) -> dict[str, float]:
    def sockets_of(_pid: int, asked: bytes) -> list[bytes]:
        return [each for each in entries if each[0] == asked[0]]

    monkeypatch.setattr(tcp_sockets, "sockets_of", sockets_of)
    return unanswered(os.getpid(), "10.99.1.0/24")


@pytest.mark.parametrize(
    ("left_s", "times", "timeout_s", "waited_s"),
    [(0.4, 1, 0.4, 0.2), (0.1, 1, 0.4, 0.5), (0.8, 2, 0.8, 0.6), (1.5, 4, 3.2, 4.7)],
)
def test_a_timeout_that_doubles_says_when_it_began(
    monkeypatch: pytest.MonkeyPatch, left_s: float, times: int, timeout_s: float, waited_s: float
) -> None:
    found = read(monkeypatch, entry(AGAIN, times, left_s, timeout_s))
    assert found == {PEER: pytest.approx(waited_s)}


def test_only_what_was_sent_again_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, entry(AGAIN, 0, 0.1, 0.2)) == {}, "it was sent just now"
    assert read(monkeypatch, entry(PROBE, 0, 0.1, 0.2)) == {}, "the peer's kernel answers"
    assert read(monkeypatch, entry(KEEP_ALIVE, 1, 0.1, 0.2)) == {}


def test_probes_of_a_full_window_that_have_no_answer_count_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert read(monkeypatch, entry(PROBE, 2, 0.1, 0.2)) == {PEER: 0.0}


def test_the_longest_silence_of_a_peer_of_the_job_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(
        monkeypatch,
        entry(AGAIN, 1, 0.4, 0.4),
        entry(AGAIN, 4, 1.5, 3.2),
        entry(AGAIN, 4, 1.5, 3.2, "203.0.113.9"),
        entry(AGAIN, 1, 0.4, 0.4, "::ffff:10.99.1.3"),
    )
    assert found == {PEER: pytest.approx(4.7), "10.99.1.3": pytest.approx(0.2)}


def test_a_process_that_has_ended_missed_nothing() -> None:
    nobody = 2**22 + 1
    assert missed_answers(nobody) == 0
    with pytest.raises(FileNotFoundError):
        unanswered(nobody, "10.99.1.0/24")
    assert missed_answers(os.getpid()) >= 0
