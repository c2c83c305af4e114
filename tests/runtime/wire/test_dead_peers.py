# SPDX-License-Identifier: Apache-2.0
"""A host that is gone leaves no connections to an agent."""

from __future__ import annotations

import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from waits import until
from wire_ends import key_directory, receiver

__all__ = ["key_directory"]

GONE = """
import socket, subprocess, sys, time
import zmq
from liveshift.runtime.wire import dead_peers

def connections():
    lines = open("/proc/net/tcp").read().splitlines()[1:]
    return sum(line.split()[1].endswith(":1B58") and line.split()[3] == "01" for line in lines)

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
dead_peers.IDLE_S, dead_peers.PROBE_S, dead_peers.PROBES = 1, 1, 1
with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
    router.linger = 0
    if sys.argv[1] == "ends":
        dead_peers.end_dead_peers(router)
    router.bind("tcp://127.0.0.1:7000")
    with socket.create_connection(("127.0.0.1", 7000)) as peer:
        peer.recv(1)  # what libzmq says first
        assert connections() == 1
        subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
        until = time.monotonic() + 20
        while connections() and time.monotonic() < until and sys.argv[1] == "ends":
            time.sleep(0.05)
        time.sleep(0 if sys.argv[1] == "ends" else 4)
        print(connections())
"""


@pytest.mark.root
@pytest.mark.parametrize(("way", "left"), [("ends", 0), ("as libzmq does it", 1)])
def test_the_kernel_ends_a_connection_to_a_host_that_is_gone(way: str, left: int) -> None:
    words = ["unshare", "--net", sys.executable, "-c", GONE, way]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == (f"{left}\n", "")


def test_both_ports_of_an_agent_ask_silent_hosts(key_directory: Path) -> None:
    here, _ = receiver(key_directory)
    for address in (here.address, here.pages.address):
        host, port = address.rsplit(":", 1)
        with socket.create_connection((host, int(port))):
            until(partial(_asks_the_peer, port))


def _asks_the_peer(port: str) -> bool:
    """Whether the kernel would ask the peer of the open connection to a port of this machine."""
    words = ["ss", "-tnoH", "state", "established", f"sport = :{port}"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return "timer:(keepalive," in done.stdout
