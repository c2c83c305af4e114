# SPDX-License-Identifier: Apache-2.0
"""Hosts for the overlay's tests: network namespaces joined by a switch, with real TCP over it."""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import pytest

from liveshift.criu_glue.network import fence, network
from liveshift.criu_glue.network.fence import Surroundings
from liveshift.criu_glue.network.overlay import Overlay

OVERLAY = Overlay(7, "10.99.7.0/24")
OVERLAYS = "10.99.0.0/16"
UNDERLAY = {"h0": "10.234.0.10", "h1": "10.234.0.11", "h2": "10.234.0.12", "world": "10.234.0.99"}
CLUSTER = [UNDERLAY[name] for name in ("h0", "h1", "h2")]
CONTROL = [(UNDERLAY["world"], 7400)]
"""The orchestrator is no host of the cluster here, as in a lab."""
AGENTS = [(address, port) for address in CLUSTER for port in (7401, 7402)]
CLONE_NEWNET = 0x40000000
numbers = itertools.count()
libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def inside(netns: str) -> Iterator[None]:
    """What this thread does, and the programs it starts, are in that network namespace."""
    with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{netns}") as there:
        if libc.setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), netns)
        try:
            yield
        finally:
            assert libc.setns(home.fileno(), CLONE_NEWNET) == 0


def raise_overlay(overlay: Overlay, address: str, relay: str = "") -> None:
    around = Surroundings(CLUSTER, OVERLAYS, CONTROL, AGENTS, relay)
    network.raise_overlay(overlay, address, around)


def hold_fence() -> None:
    """As an agent does when it starts."""
    fence.hold(Surroundings(CLUSTER, OVERLAYS, CONTROL, AGENTS))


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def ip_batch(*lines: str) -> None:
    words = ["ip", "-batch", "-"]
    subprocess.run(words, input="\n".join(lines), check=True, capture_output=True, text=True)


class Net:
    """Three hosts and a machine of the outside world on one switch."""

    def __init__(self) -> None:
        self.tag = f"ls-test-{os.getpid()}-{next(numbers)}"
        self.capsules: set[str] = set()
        self.sleepers: list[subprocess.Popen[bytes]] = []

    def make(self) -> None:
        """By few processes: there is a test for each thing that a host must not hear."""
        ip_batch(*(f"netns add {self.name(what)}" for what in ("switch", *UNDERLAY)))
        with inside(self.name("switch")):
            ip_batch(
                "link add fabric type bridge",
                "link set fabric up",
                *(
                    line
                    for host in UNDERLAY
                    for line in (
                        f"link add {host} type veth peer name cable netns {self.name(host)}",
                        f"link set {host} master fabric up",
                    )
                ),
            )
        for host, address in UNDERLAY.items():
            with inside(self.name(host)):
                ip_batch("link set lo up", "link set cable up", f"addr add {address}/24 dev cable")

    def name(self, what: str) -> str:
        return f"{self.tag}-{what}"

    @contextmanager
    def on(self, host: str) -> Iterator[None]:
        with inside(self.name(host)):
            yield

    def raised(self, *hosts: str, overlay: Overlay = OVERLAY, relay: str = "") -> None:
        for host in hosts:
            with self.on(host):
                raise_overlay(overlay, UNDERLAY[host], UNDERLAY.get(relay, ""))

    def plug(
        self,
        host: str,
        index: int,
        locked: bool = False,
        overlay: Overlay = OVERLAY,
        relayed: bool = False,
        owner: int = 0,
    ) -> str:
        """A capsule's namespace on a host; the name says both, as two hosts share /run/netns."""
        name = self.name(f"c{overlay.vni}.{index}.{host}")
        peers = [overlay.address(n) for n in range(4)]
        with self.on(host):
            network.plug_in(
                overlay, name, index, peers, locked, owner, CLUSTER if relayed else None
            )
        self.capsules.add(name)
        return name

    def unplug(self, host: str, index: int) -> None:
        with self.on(host):
            network.unplug(OVERLAY, self.name(f"c{OVERLAY.vni}.{index}.{host}"), index)

    def located(self, index: int, at: str, hosts: Iterable[str] = ("h0", "h1", "h2")) -> None:
        """Every host (of these) hears where the address is now."""
        for host in hosts:
            with self.on(host):
                where = None if host == at else UNDERLAY[at]
                network.locate(OVERLAY, {OVERLAY.address(index): where})

    def pid_in(self, netns: str) -> int:
        with inside(netns):
            self.sleepers.append(subprocess.Popen(["sleep", "600"]))
        return self.sleepers[-1].pid

    def close(self) -> None:
        for sleeper in self.sleepers:
            sleeper.kill()
            sleeper.wait()
        existing = {line.split()[0] for line in ip("netns").splitlines() if line}
        made = [*self.capsules, *map(self.name, (*UNDERLAY, "switch"))]
        ip_batch(*(f"netns del {name}" for name in made if name in existing))


@pytest.fixture
def net() -> Iterator[Net]:
    made = Net()
    try:
        made.make()
        yield made
    finally:
        made.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., None]]:
    """Servers that answer every line with their own name and the caller's address."""
    servers: list[socket.socket] = []

    def answer(server: socket.socket, name: str) -> None:
        with suppress(OSError):
            while True:
                line, (caller, _) = server.accept()
                threading.Thread(target=talk, args=(line, f"{name} {caller} "), daemon=True).start()

    def talk(line: socket.socket, prefix: str) -> None:
        with line, suppress(OSError):
            while data := line.recv(100):
                line.sendall(prefix.encode() + data)

    def start(netns: str, address: str, name: str) -> None:
        with inside(netns):
            server = socket.create_server((address, 5000))
        servers.append(server)
        threading.Thread(target=answer, args=(server, name), daemon=True).start()

    yield start
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def connected(netns: str, address: str, timeout: float = 5.0) -> socket.socket:
    with inside(netns):
        line = socket.create_connection((address, 5000), timeout)
    line.settimeout(timeout)
    return line


def asked(line: socket.socket, word: str = "hello") -> str:
    line.sendall(word.encode())
    return line.recv(100).decode()


def answer_from(netns: str, address: str) -> str:
    with connected(netns, address) as line:
        return asked(line)
