# SPDX-License-Identifier: Apache-2.0
"""Connections that lead out of a job are closed; those inside it stay. The kernel is real."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from descriptors import no_descriptor_left
from frames import settled
from three_hosts import OVERLAY, Net, asked, connected, inside, ip

from liveshift.criu_glue.network import socket_diag
from liveshift.criu_glue.network.tcp_sockets import ESTABLISHED, abort_all_but, tcp_sockets

pytestmark = [pytest.mark.root, pytest.mark.machine("SOCK_DESTROY")]

PEER, ELSEWHERE = "10.99.7.2", "198.51.100.7"


@dataclass
class Lines:
    """``pid``: a process of the capsule."""

    pid: int
    peer: socket.socket
    itself: socket.socket
    world: tuple[socket.socket, socket.socket]


@pytest.fixture
def lines(net: Net, serve: Callable[..., None]) -> Iterator[Lines]:
    """Connections of capsule 0: to a peer, over loopback, and to an address out of the job, over
    IPv4 and as an IPv6 program makes it."""
    zero, one, *_ = settled(net)
    serve(one, PEER, "one")
    serve(zero, "127.0.0.1", "itself")
    with inside(zero):
        ip("addr", "add", f"{ELSEWHERE}/32", "dev", "eth0")
    serve(zero, ELSEWHERE, "world")
    with inside(zero):
        as_ipv6 = socket.create_connection((f"::ffff:{ELSEWHERE}", 5000), 5)
    made = Lines(
        net.pid_in(zero),
        connected(zero, PEER),
        connected(zero, "127.0.0.1"),
        (connected(zero, ELSEWHERE), as_ipv6),
    )
    yield made
    for line in (made.peer, made.itself, *made.world):
        line.close()


def test_what_leads_out_of_the_job_is_closed_at_once(lines: Lines) -> None:
    for line, name in ((lines.peer, "one"), (lines.itself, "itself"), (lines.world[0], "world")):
        assert name in asked(line)
    with no_descriptor_left():
        closed = abort_all_but(lines.pid, OVERLAY.subnet, OVERLAY.gateway)
    assert {each.rpartition(":")[0] for each in closed} == {ELSEWHERE}
    for line in lines.world:
        with pytest.raises((ConnectionAbortedError, ConnectionResetError)):
            line.recv(1)
    assert "one" in asked(lines.peer)
    assert "itself" in asked(lines.itself)
    assert abort_all_but(lines.pid, OVERLAY.subnet, OVERLAY.gateway) == []


def test_the_gateway_is_no_part_of_the_job(lines: Lines) -> None:
    """It is always the capsule's present host."""
    assert f"{PEER}:5000" in abort_all_but(lines.pid, OVERLAY.subnet, PEER)
    with pytest.raises(ConnectionAbortedError):
        lines.peer.recv(1)


def test_sockets_are_told_with_their_peers(lines: Lines) -> None:
    found = [(each.peer, each.port) for each in tcp_sockets(lines.pid, ESTABLISHED)]
    assert (PEER, 5000) in found
    assert found.count((ELSEWHERE, 5000)) == 2
    assert not any(each.times for each in tcp_sockets(lines.pid, ESTABLISHED))


def test_an_answer_that_is_an_error_is_raised() -> None:
    with pytest.raises(FileNotFoundError):
        list(tcp_sockets(2**22 + 1, ESTABLISHED))
    with pytest.raises(OSError, match="Invalid argument"):
        list(socket_diag.sockets_of(os.getpid(), b"\xff" * 4))
