# SPDX-License-Identifier: Apache-2.0
"""Capsules that are all locked at once, as a snapshot locks them: what the kernel does with data
that is in flight meanwhile, with real TCP."""

from __future__ import annotations

import errno
import socket
import struct
import time
from collections.abc import Callable

import pytest
from three_hosts import Net, asked, connected, inside
from waits import until

from liveshift.criu_glue.network import network_lock

pytestmark = pytest.mark.root

SYN_SENT = 2  # include/net/tcp_states.h
MANY = 20
"""Retransmissions. At intervals that double from 10 ms, so many would take hours."""


def tcp_info(line: socket.socket) -> tuple[int, int, int]:
    """The state, how often the interval is doubled now, and all retransmissions so far (struct
    tcp_info of linux/tcp.h: tcpi_state, tcpi_backoff, tcpi_total_retrans)."""
    raw = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    (retransmissions,) = struct.unpack_from("=I", raw, 100)
    return raw[0], raw[4], retransmissions


class Pair:
    """Two capsules on two hosts; the second one serves."""

    def __init__(self, net: Net, serve: Callable[..., None], *, ingress_only: bool) -> None:
        net.raised("h0", "h1")
        self.zero, one = net.plug("h0", 0), net.plug("h1", 1)
        net.located(0, "h0", ("h0", "h1"))
        net.located(1, "h1", ("h0", "h1"))
        serve(one, "0.0.0.0", "one")
        self._pids = [net.pid_in(self.zero), net.pid_in(one)]
        for pid in self._pids:
            network_lock.prepare_lock(pid, ingress_only=ingress_only)

    def lock(self, *, both: bool = True) -> None:
        """Close the locks of both capsules, or only that of the second one."""
        pids = self._pids if both else self._pids[1:]
        for pid in pids:
            network_lock.lock(pid)
        assert all(map(network_lock.locked, pids))

    def unlock(self) -> None:
        for pid in self._pids:
            network_lock.unlock(pid)
        assert not any(map(network_lock.locked, self._pids))


def test_locks_of_what_comes_in_leave_the_intervals_of_both_ends_short(
    net: Net, serve: Callable[..., None]
) -> None:
    pair = Pair(net, serve, ingress_only=True)
    with connected(pair.zero, "10.99.7.2") as line:
        assert asked(line, "1") == "one 10.99.7.1 1"
        pair.lock()
        before = tcp_info(line)[2]
        line.sendall(b"2")
        until(lambda: tcp_info(line)[2] >= before + MANY)
        line.settimeout(0.1)
        with pytest.raises(TimeoutError):
            line.recv(100)
        pair.unlock()
        line.settimeout(5)
        assert line.recv(100) == b"one 10.99.7.1 2"
        assert asked(line, "3") == "one 10.99.7.1 3"


def test_locks_of_both_ways_make_the_kernel_double_them(
    net: Net, serve: Callable[..., None]
) -> None:
    pair = Pair(net, serve, ingress_only=False)
    with connected(pair.zero, "10.99.7.2") as line:
        assert asked(line, "1") == "one 10.99.7.1 1"
        pair.lock()
        before = tcp_info(line)[2]
        line.sendall(b"2")
        until(lambda: tcp_info(line)[1] >= 4)
        assert tcp_info(line)[2] < before + MANY
        pair.unlock()
        assert line.recv(100) == b"one 10.99.7.1 2"


@pytest.mark.parametrize(
    ("ingress_only", "both"),
    [(True, True), (True, False), (False, False)],
    ids=["a snapshot locks both ends", "the peer is in a snapshot", "the peer moves"],
)
def test_a_connection_that_is_just_made_outlasts_the_locks(
    net: Net, serve: Callable[..., None], ingress_only: bool, both: bool
) -> None:
    """An answer from the peer's lock would end it with EHOSTUNREACH."""
    pair = Pair(net, serve, ingress_only=ingress_only)
    pair.lock(both=both)
    with inside(pair.zero):
        line = socket.socket()
    with line:
        line.setblocking(False)
        assert line.connect_ex(("10.99.7.2", 5000)) == errno.EINPROGRESS
        over = time.monotonic() + 0.2
        while time.monotonic() < over:
            assert tcp_info(line)[0] == SYN_SENT
            assert line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
            time.sleep(0.01)
        pair.unlock()
        until(lambda: tcp_info(line)[0] != SYN_SENT)
        line.settimeout(5)
        assert asked(line, "1") == "one 10.99.7.1 1"
