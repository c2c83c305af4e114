# SPDX-License-Identifier: Apache-2.0
"""What the fence's tests send and hear: frames, well made and forged."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import pytest
from three_hosts import UNDERLAY, Net, inside, ip

from liveshift.criu_glue.network.iproute import nft
from liveshift.criu_glue.network.overlay import mac

ETH_P_ALL = 3


class Ear:
    """Everything that comes in at a capsule's eth0."""

    def __init__(self, netns: str) -> None:
        with inside(netns):
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
            self._socket.bind(("eth0", ETH_P_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self._socket.settimeout(5)

    def until(self, last: bytes) -> list[bytes]:
        """The frames that came in before, and with, one that contains ``last``."""
        frames = []
        while True:
            frame, (*_, kind, _, _) = self._socket.recvfrom(65536)
            if kind != socket.PACKET_OUTGOING:
                frames.append(frame)
                if last in frame:
                    return frames

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def ear() -> Iterator[Callable[[str], Ear]]:
    ears: list[Ear] = []

    def listen(netns: str) -> Ear:
        ears.append(Ear(netns))
        return ears[-1]

    yield listen
    for open_one in ears:
        open_one.close()


def say(netns: str, words: bytes, to: str, times: int = 1, port: int = 6000) -> None:
    """Datagrams from a capsule (or a host)."""
    with inside(netns), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        for _ in range(times):
            line.sendto(words, (to, port))


class Hosts(Protocol):
    """Network namespaces of hosts."""

    def on(self, host: str) -> AbstractContextManager[None]: ...


@contextmanager
def counted(net: Hosts, host: str, what: str) -> Iterator[Callable[[], int]]:
    """Counts the VXLAN frames that come in at a host, before any fence looks at them."""
    with net.on(host):
        nft(f"""
table ip probe {{
  counter seen {{ }}
  chain arriving {{ type filter hook input priority -400;
    udp dport 4789 {what} counter name seen
  }}
}}
""")

    def read() -> int:
        with net.on(host):
            done = subprocess.run(
                ["nft", "-j", "list", "counter", "ip", "probe", "seen"],
                check=True,
                capture_output=True,
            )
        return int(json.loads(done.stdout)["nftables"][1]["counter"]["packets"])

    yield read
    with net.on(host):
        subprocess.run(["nft", "delete", "table", "ip", "probe"], check=True)


def inner(address: str) -> str:
    """The match of frames whose inner source is an address's MAC."""
    return f"@th,176,48 0x{mac(address).replace(':', '')}"


def frame(
    source: str, destination: str, words: bytes, *, mac_from: str = "", arp: bool = False
) -> bytes:
    """An Ethernet frame with a UDP datagram (or an ARP announcement) in it."""
    head = bytes.fromhex((mac(destination) + mac(mac_from or source)).replace(":", ""))
    pack = socket.inet_aton
    if arp:
        own = head[6:12]
        body = struct.pack("!HHBBH", 1, 0x800, 6, 4, 2) + own + pack(source)
        return head + b"\x08\x06" + body + head[:6] + pack(destination) + words
    datagram = struct.pack("!HHHH", 6000, 6000, 8 + len(words), 0) + words
    length = 20 + len(datagram)
    ip_head = struct.pack(
        "!BBHHHBBH4s4s", 0x45, 0, length, 0, 0, 64, 17, 0, pack(source), pack(destination)
    )
    total = sum(struct.unpack("!10H", ip_head))
    check = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
    return head + b"\x08\x00" + ip_head[:10] + struct.pack("!H", check) + ip_head[12:] + datagram


def inject(netns: str, host: str, vni: int, payload: bytes, user: int | None = None) -> bool:
    """Send what looks like VXLAN from a machine; whether it was let out."""
    program = (
        "import socket, sys\n"
        "kind, _, _, _, to = socket.getaddrinfo(sys.argv[1], 4789, type=socket.SOCK_DGRAM)[0]\n"
        "s = socket.socket(kind, socket.SOCK_DGRAM); s.settimeout(0.3)\n"
        "s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1); s.connect(to)\n"
        "try:\n s.send(bytes.fromhex(sys.argv[2])); s.recv(1)\n"
        "except TimeoutError: print('out')\n"
        "except OSError: pass\n"
    )
    packet = struct.pack("!II", 0x08000000, vni << 8) + payload
    identity: dict[str, Any] = (
        {} if user is None else {"user": user, "group": user, "extra_groups": []}
    )
    with inside(netns):
        done = subprocess.run(
            ["/usr/bin/python3", "-Sc", program, host, packet.hex()],
            check=True,
            capture_output=True,
            text=True,
            cwd="/",
            **identity,
        )
    return str(done.stdout) == "out\n"


def inject_in_pieces(net: Net, machine: str, to: str, vni: int, payload: bytes) -> None:
    """The same as fragments of 8 bytes, so that no piece has what the fence looks at."""
    vxlan = struct.pack("!II", 0x08000000, vni << 8) + payload
    datagram = struct.pack("!HHHH", 4789, 4789, 8 + len(vxlan), 0) + vxlan
    ends = socket.inet_aton(UNDERLAY[machine]) + socket.inet_aton(to)
    with (
        net.on(machine),
        socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw,
    ):
        for at in range(0, len(datagram), 8):
            more = 0x2000 if at + 8 < len(datagram) else 0
            head = struct.pack("!BBHHHBBH", 0x45, 0, 0, 4242, more | at // 8, 64, 17, 0)
            raw.sendto(head + ends + datagram[at : at + 8], (to, 0))


def heard_by(ears: list[Ear], last: bytes) -> list[bytes]:
    return [frame for one in ears for frame in one.until(last)]


def somebody_elses_vxlan(net: Net, vni: int) -> None:
    """Between h0, where it is 192.168.9.1, and h1, where it is 192.168.9.2."""
    for host, peer, address in (("h0", "h1", "192.168.9.1"), ("h1", "h0", "192.168.9.2")):
        with net.on(host):
            ip(
                *("link", "add", "other", "type", "vxlan", "id", str(vni), "dstport", "4789"),
                *("local", UNDERLAY[host], "remote", UNDERLAY[peer]),
            )
            ip("addr", "add", f"{address}/24", "dev", "other")
            ip("link", "set", "other", "up")


def settled(net: Net) -> tuple[str, str, str, str]:
    """Capsules 0 on h0, 1 and 2 on h1, 3 on h2, and every host knows."""
    net.raised("h0", "h1", "h2")
    names = net.plug("h0", 0), net.plug("h1", 1), net.plug("h1", 2), net.plug("h2", 3)
    for index, host in enumerate(("h0", "h1", "h1", "h2")):
        net.located(index, host)
    return names
