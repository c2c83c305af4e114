# SPDX-License-Identifier: Apache-2.0
"""The fence in the kernel: an address speaks from where the book has it, or not at all.

Frames that must not arrive are counted at the host they come to, so that "nobody heard it" is not
said of what was never sent; and what is heard afterwards comes by the same way.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from three_hosts import (
    CONTROL,
    OVERLAY,
    UNDERLAY,
    Net,
    answer_from,
    asked,
    connected,
    inside,
    ip,
)

from liveshift.criu_glue import fence, network
from liveshift.criu_glue.network import Overlay, mac
from liveshift.errors import LiveshiftError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces are made by root")

OTHER = Overlay(8, "10.99.8.0/24")
NOBODY = 65534
ETH_P_ALL = 3
Serve = Callable[..., None]


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


@contextmanager
def counted(net: Net, host: str, what: str) -> Iterator[Callable[[], int]]:
    """Counts the VXLAN frames that come in at a host, before any fence looks at them."""
    with net.on(host):
        network.nft(f"""
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
                check=True, capture_output=True,
            )  # fmt: skip
        return int(json.loads(done.stdout)["nftables"][1]["counter"]["packets"])

    yield read
    with net.on(host):
        subprocess.run(["nft", "delete", "table", "ip", "probe"], check=True)


def until(true: Callable[[], object], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def inner(address: str) -> str:
    """The match of frames whose inner source is an address's MAC."""
    return f"@th,176,48 0x{mac(address).replace(':', '')}"


def frame(source: str, destination: str, words: bytes, *, mac_from: str = "", arp: bool = False):  # type: ignore[no-untyped-def]
    """An Ethernet frame with a UDP datagram (or an ARP announcement) in it."""
    head = bytes.fromhex((mac(destination) + mac(mac_from or source)).replace(":", ""))
    pack = socket.inet_aton
    if arp:
        own = head[6:12]
        body = struct.pack("!HHBBH", 1, 0x800, 6, 4, 2) + own + pack(source)
        return head + b"\x08\x06" + body + head[:6] + pack(destination) + words
    datagram = struct.pack("!HHHH", 6000, 6000, 8 + len(words), 0) + words
    length = 20 + len(datagram)
    ip_head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, length, 0, 0, 64, 17, 0, pack(source),
                          pack(destination))  # fmt: skip
    total = sum(struct.unpack("!10H", ip_head))
    check = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
    return head + b"\x08\x00" + ip_head[:10] + struct.pack("!H", check) + ip_head[12:] + datagram


def inject(netns: str, host: str, vni: int, payload: bytes, user: int | None = None) -> bool:
    """Send what looks like VXLAN from a machine; whether it was let out."""
    program = (
        "import socket, sys\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(0.3)\n"
        "s.connect((sys.argv[1], 4789))\n"
        "try:\n s.send(bytes.fromhex(sys.argv[2])); s.recv(1)\n"
        "except TimeoutError: print('out')\n"
        "except OSError: pass\n"
    )
    packet = struct.pack("!II", 0x08000000, vni << 8) + payload
    identity = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    with inside(netns):
        done = subprocess.run(
            ["/usr/bin/python3", "-Sc", program, host, packet.hex()],
            check=True, capture_output=True, text=True, cwd="/", **identity,
        )  # fmt: skip
    return done.stdout == "out\n"


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


# ---- a stray copy ------------------------------------------------------------------------------


def settled(net: Net) -> tuple[str, str, str, str]:
    """Capsules 0 on h0, 1 and 2 on h1, 3 on h2, and every host knows."""
    net.raised("h0", "h1", "h2")
    names = net.plug("h0", 0), net.plug("h1", 1), net.plug("h1", 2), net.plug("h2", 3)
    for index, host in enumerate(("h0", "h1", "h1", "h2")):
        net.located(index, host)
    return names


def test_a_stray_copy_is_heard_by_nobody_and_the_new_one_is(
    net: Net, serve: Serve, ear: Callable[[str], Ear]
) -> None:
    zero, stray, beside, visitor = settled(net)
    serve(zero, "10.99.7.1", "zero")
    with connected(stray, "10.99.7.1") as line:
        assert asked(line, "before") == "zero 10.99.7.2 before"
        new = net.plug("h2", 1, locked=True)
        net.located(1, "h2")
        with net.on("h2"):
            network.unlock(net.pid_in(new))
        peers = {zero: "10.99.7.1", beside: "10.99.7.3", visitor: "10.99.7.4"}
        ears = [ear(peer) for peer in peers]
        for address in peers.values():
            say(stray, b"stray", address, 50)
        line.sendall(b"stray")
        line.settimeout(0.3)
        with pytest.raises(TimeoutError):
            line.recv(1)
        for address in peers.values():
            say(new, b"the new one", address)
        frames = heard_by(ears, b"the new one")
    assert len([f for f in frames if b"the new one" in f]) == 3
    assert [f for f in frames if b"stray" in f] == []
    assert answer_from(new, "10.99.7.1") == "zero 10.99.7.2 hello"


def test_a_stray_copy_whose_host_has_not_heard_is_dropped_where_it_arrives(
    net: Net, serve: Serve, ear: Callable[[str], Ear]
) -> None:
    """Its host is cut off from the orchestrator, or lies."""
    zero, stray, beside, visitor = settled(net)
    serve(zero, "10.99.7.1", "zero")
    with connected(stray, "10.99.7.1") as line:
        assert asked(line, "before") == "zero 10.99.7.2 before"
        new = net.plug("h2", 1)
        net.located(1, "h2", hosts=("h0", "h2"))
        ears = [ear(zero), ear(visitor)]
        with (
            counted(net, "h0", inner("10.99.7.2")) as at_h0,
            counted(net, "h2", inner("10.99.7.2")) as at_h2,
        ):
            line.sendall(b"stray")
            say(stray, b"stray", "10.99.7.1", 50)
            say(stray, b"stray", "10.99.7.4", 50)
            until(lambda: at_h0() >= 53 and at_h2() >= 50)  # TCP has sent it again by then
        say(beside, b"from the same host", "10.99.7.1")
        say(beside, b"from the same host", "10.99.7.4")
        frames = heard_by(ears, b"from the same host")
        assert len([f for f in frames if b"from the same host" in f]) == 2
        assert [f for f in frames if b"stray" in f] == []
        say(new, b"the new one", "10.99.7.1")
        assert b"the new one" in ears[0].until(b"the new one")[-1]
    assert answer_from(new, "10.99.7.1") == "zero 10.99.7.2 hello"


def test_a_move_back_is_heard_again(net: Net, serve: Serve) -> None:
    zero, one, _, _ = settled(net)
    serve(zero, "10.99.7.1", "zero")
    new = net.plug("h2", 1)
    net.located(1, "h2")
    assert answer_from(new, "10.99.7.1") == "zero 10.99.7.2 hello"
    with pytest.raises(OSError, match="timed out"):
        connected(one, "10.99.7.1", 0.3)
    net.located(1, "h1")
    assert answer_from(one, "10.99.7.1") == "zero 10.99.7.2 hello"
    with pytest.raises(OSError, match="timed out"):
        connected(new, "10.99.7.1", 0.3)


def test_a_room_that_waits_is_not_the_place_of_its_address(net: Net, serve: Serve) -> None:
    """Even without its lock it is silent, and the source is heard where it is being built."""
    zero, one, _, visitor = settled(net)
    serve(zero, "10.99.7.1", "zero")
    serve(one, "10.99.7.2", "one")
    waiting = net.plug("h2", 1, locked=True)
    network.unlock(net.pid_in(waiting))
    with pytest.raises(OSError, match="timed out"):
        connected(waiting, "10.99.7.1", 0.3)
    assert answer_from(visitor, "10.99.7.2") == "one 10.99.7.4 hello"
    assert answer_from(one, "10.99.7.1") == "zero 10.99.7.2 hello"


# ---- forged frames -----------------------------------------------------------------------------


def test_only_the_right_host_is_heard(net: Net, ear: Callable[[str], Ear]) -> None:
    zero, _, beside, _ = settled(net)
    listening, h0 = ear(zero), UNDERLAY["h0"]
    one = frame("10.99.7.2", "10.99.7.1", b"forged")
    nobody = frame("10.99.7.99", "10.99.7.1", b"forged")
    local = frame("10.99.7.1", "10.99.7.1", b"forged")
    with counted(net, "h0", "@th,96,24 7") as arrived:
        for machine, payload in (
            ("world", one),  # no host of the cluster
            ("h2", one),  # another host
            ("h1", nobody),  # a MAC that the book does not know
            ("h1", local),  # one that is here
            ("h0", local),  # by way of the host itself
        ):
            assert inject(net.name(machine), h0, 7, payload)
        assert arrived() == 5
    right = frame("10.99.7.2", "10.99.7.1", b"well made")
    assert inject(net.name("h1"), h0, 7, right)  # so the others were not just badly made
    say(beside, b"the end", "10.99.7.1")
    words = b"".join(listening.until(b"the end"))
    assert b"forged" not in words
    assert b"well made" in words


def test_fragments_are_whole_when_the_fence_sees_them(net: Net, ear: Callable[[str], Ear]) -> None:
    zero, _, beside, _ = settled(net)
    listening, h0 = ear(zero), UNDERLAY["h0"]
    inject_in_pieces(net, "h2", h0, 7, frame("10.99.7.2", "10.99.7.1", b"forged"))
    inject_in_pieces(net, "h1", h0, 7, frame("10.99.7.2", "10.99.7.1", b"well made"))
    say(beside, b"the end", "10.99.7.1")
    words = b"".join(listening.until(b"the end"))
    assert b"well made" in words
    assert b"forged" not in words


def test_users_of_a_host_cannot_forge_frames(net: Net, ear: Callable[[str], Ear]) -> None:
    zero, _, beside, _ = settled(net)
    listening = ear(zero)
    one = frame("10.99.7.2", "10.99.7.1", b"forged")
    assert not inject(net.name("h1"), UNDERLAY["h0"], 7, one, user=NOBODY)
    say(beside, b"the end", "10.99.7.1")
    assert b"forged" not in b"".join(listening.until(b"the end"))


def test_containers_of_a_host_cannot_forge_frames(net: Net, ear: Callable[[str], Ear]) -> None:
    """Other machines take what a host masquerades for the host's own."""
    zero, _, beside, _ = settled(net)
    container = net.name("container")
    ip("netns", "add", container)
    net.capsules.add(container)
    with net.on("h1"):
        ip("link", "add", "docker0", "type", "veth", "peer", "name", "eth0", "netns", container)
        ip("addr", "add", "172.31.0.1/24", "dev", "docker0")
        ip("link", "set", "docker0", "up")
        network.nft(
            "table ip docker { chain post { type nat hook postrouting priority 100;\n"
            "ip saddr 172.31.0.0/24 masquerade;\n}\n}\n"
        )
    with inside(container):
        ip("addr", "add", "172.31.0.2/24", "dev", "eth0")
        ip("link", "set", "eth0", "up")
        ip("route", "add", "default", "via", "172.31.0.1")
        with net.on("h0"), socket.create_server((UNDERLAY["h0"], 5000)), inside(container):
            socket.create_connection((UNDERLAY["h0"], 5000), 5).close()  # it has a way there
    listening = ear(zero)
    one = frame("10.99.7.2", "10.99.7.1", b"forged")
    assert not inject(container, UNDERLAY["h0"], 7, one)
    say(beside, b"the end", "10.99.7.1")
    assert b"forged" not in b"".join(listening.until(b"the end"))


def test_other_peoples_vxlan_is_let_alone(net: Net, serve: Serve) -> None:
    settled(net)
    for host, peer, address in (("h0", "h1", "192.168.9.1"), ("h1", "h0", "192.168.9.2")):
        with net.on(host):
            ip(
                *("link", "add", "other", "type", "vxlan", "id", "99", "dstport", "4789"),
                *("local", UNDERLAY[host], "remote", UNDERLAY[peer]),
            )
            ip("addr", "add", f"{address}/24", "dev", "other")
            ip("link", "set", "other", "up")
    serve(net.name("h0"), "192.168.9.1", "theirs")
    assert answer_from(net.name("h1"), "192.168.9.1") == "theirs 192.168.9.2 hello"


@pytest.mark.parametrize(
    ("what", "heard"),
    [
        (frame("10.99.7.2", "10.99.7.1", b"sent"), True),
        (frame("10.99.7.3", "10.99.7.1", b"sent"), False),
        (frame("10.99.7.3", "10.99.7.1", b"sent", mac_from="10.99.7.2"), False),
        (frame("10.99.7.2", "10.99.7.1", b"sent", mac_from="10.99.7.3"), False),
        (frame("10.99.7.254", "10.99.7.1", b"sent"), False),
        (frame("10.88.0.1", "10.99.7.1", b"sent", mac_from="10.99.7.2"), False),
        (frame("10.99.7.3", "10.99.7.1", b"sent", mac_from="10.99.7.2", arp=True), False),
        (frame("10.99.7.2", "10.99.7.1", b"sent", arp=True), True),
        (b"\xff" * 6 + frame("10.99.7.2", "10.99.7.1", b"sent")[6:12] + b"\x86\xddsent" * 9, False),
    ],
    ids=[
        "its own", "another's", "another's IP", "another's MAC", "the gateway's", "no capsule's",
        "ARP for another", "ARP for itself", "IPv6",
    ],
)  # fmt: skip
def test_root_in_a_capsule_cannot_be_another(
    net: Net, ear: Callable[[str], Ear], what: bytes, heard: bool
) -> None:
    """Neither on its own host nor on another: frames as CAP_NET_RAW makes them."""
    net.raised("h0")
    zero, one, beside = net.plug("h0", 0), net.plug("h0", 1), net.plug("h0", 2)
    listening = ear(zero)
    with inside(one), socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
        raw.bind(("eth0", 0))
        raw.send(what)
    say(beside, b"the end", "10.99.7.1")
    assert (b"sent" in b"".join(listening.until(b"the end"))) == heard


def test_a_capsule_cannot_speak_through_the_gateway(net: Net, ear: Callable[[str], Ear]) -> None:
    """The host would hand it on to the subnet under the gateway's own MAC."""
    zero, one, beside, _ = settled(net)
    listening = ear(zero)
    whole = frame("10.99.7.2", "10.99.7.1", b"round about")
    gateway = bytes.fromhex(mac(OVERLAY.gateway).replace(":", ""))
    with inside(one), socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
        raw.bind(("eth0", 0))
        raw.send(gateway + whole[6:])
    say(beside, b"the end", "10.99.7.1")
    assert b"round about" not in b"".join(listening.until(b"the end"))


# ---- what capsules do not reach ----------------------------------------------------------------


def refusal(netns: str, address: str, port: int) -> str:
    """How a TCP connection is refused, at once."""
    with inside(netns), socket.socket() as line:
        line.settimeout(5)
        return os.strerror(line.connect_ex((address, port)))  # EAGAIN: there was no answer


def test_control_ports_are_out_of_reach_and_services_are_not(net: Net, serve: Serve) -> None:
    zero, *_ = settled(net)
    listeners = []
    try:
        for address, port in [*CONTROL, (UNDERLAY["h1"], 22)]:
            machine = next(name for name, own in UNDERLAY.items() if own == address)
            with net.on(machine):
                listeners.append(socket.create_server((address, port)))
        for address, port in CONTROL:
            assert refusal(zero, address, port) == "Connection refused"
            with net.on("h1"):
                socket.create_connection((address, port), 5).close()  # hosts among themselves
        with inside(zero):
            socket.create_connection((UNDERLAY["h1"], 22), 5).close()
    finally:
        for listener in listeners:
            listener.close()
    for host in ("h0", "h1"):
        serve(net.name(host), UNDERLAY[host], host)
        assert answer_from(zero, UNDERLAY[host]) == f"{host} 10.99.7.1 hello"


def test_a_capsule_cannot_send_vxlan_to_hosts(net: Net, ear: Callable[[str], Ear]) -> None:
    zero, one, beside, _ = settled(net)
    listening = ear(one)
    for host in ("h0", "h1", "h2"):
        payload = frame("10.99.7.1", "10.99.7.2", b"forged")
        assert not inject(zero, UNDERLAY[host], 7, payload)
    say(beside, b"the end", "10.99.7.2")
    assert b"forged" not in b"".join(listening.until(b"the end"))
    with net.on("world"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as world:
        world.bind((UNDERLAY["world"], 4789))
        world.settimeout(5)
        say(zero, b"to the world it may", UNDERLAY["world"], port=4789)
        assert world.recvfrom(100)[1][0] == UNDERLAY["h0"]


@pytest.mark.parametrize("where", ["h0", "h1"])
@pytest.mark.parametrize("both", [True, False], ids=["both jobs here", "the other job elsewhere"])
def test_jobs_do_not_reach_each_other(net: Net, serve: Serve, where: str, both: bool) -> None:
    zero, *_ = settled(net)
    for host in ("h0", "h1") if both else (where,):
        net.raised(host, overlay=OTHER)
    theirs = net.plug(where, 0, overlay=OTHER)
    serve(theirs, "10.99.8.1", "theirs")
    serve(zero, "10.99.7.1", "ours")
    serve(net.name(where), OTHER.gateway, "gateway")
    if not both and where != "h0":  # it has no bridge of that job, but somebody gave it a route
        with net.on("h0"):
            ip("route", "add", OTHER.subnet, "via", UNDERLAY[where])
    assert refusal(zero, "10.99.8.1", 5000) == "No route to host"
    assert refusal(theirs, "10.99.7.1", 5000) == "No route to host"
    assert refusal(zero, OTHER.gateway, 5000) == "No route to host"
    assert answer_from(theirs, OTHER.gateway) == "gateway 10.99.8.1 hello"
    assert answer_from(zero, "10.99.7.1") == "ours 10.99.7.1 hello"


# ---- making, removing, finding gone ------------------------------------------------------------


@pytest.mark.parametrize("filtered", ["0", "1"])
def test_bridged_traffic_passes_whether_or_not_it_is_filtered(
    net: Net, serve: Serve, filtered: str
) -> None:
    """net.bridge.bridge-nf-call-iptables brings what a bridge hands on to the forward hook."""
    setting = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
    if not setting.exists():
        pytest.skip("the kernel has no br_netfilter")
    _, one, beside, _ = settled(net)
    for host in ("h0", "h1"):
        with net.on(host):
            subprocess.run(["sysctl", "-q", f"net.bridge.{setting.name}={filtered}"], check=True)
    serve(one, "10.99.7.2", "one")
    assert answer_from(beside, "10.99.7.2") == "one 10.99.7.3 hello"


def rules(net: Net, host: str) -> str:
    with net.on(host):
        done = subprocess.run(
            ["nft", "list", "ruleset"], capture_output=True, check=True, text=True
        )
    return done.stdout


def test_one_job_ends_and_the_other_goes_on(net: Net, serve: Serve) -> None:
    before = rules(net, "h0")
    zero, *_ = settled(net)
    alone = rules(net, "h0")
    for host in ("h0", "h1"):
        net.raised(host, overlay=OTHER)
    net.plug("h0", 0, overlay=OTHER)
    with net.on("h0"):
        network.unplug(OTHER, net.name("c8.0.h0"), 0)
        network.lower_overlay(OTHER)
        network.lower_overlay(OTHER)
    assert rules(net, "h0") == alone
    serve(zero, "10.99.7.1", "zero")
    assert answer_from(net.name("c7.1.h1"), "10.99.7.1") == "zero 10.99.7.2 hello"
    net.unplug("h0", 0)
    with net.on("h0"):
        network.lower_overlay(OVERLAY)
    assert rules(net, "h0") == before


def test_an_overlay_that_is_lowered_with_a_capsule_in_it_leaves_no_rule(net: Net) -> None:
    net.raised("h0")
    net.plug("h0", 0)
    with net.on("h0"):
        network.lower_overlay(OVERLAY)
    assert "liveshift" not in rules(net, "h0")


def test_a_fence_that_somebody_flushed_is_laid_again(
    net: Net, serve: Serve, ear: Callable[[str], Ear]
) -> None:
    zero, one, beside, _ = settled(net)
    net.plug("h1", 0, locked=True)  # a room that waits for capsule 0
    before = rules(net, "h1")
    with net.on("h1"):
        subprocess.run(["nft", "flush", "ruleset"], check=True)
    net.raised("h1")
    assert sorted(rules(net, "h1").split()) == sorted(before.split())
    serve(zero, "10.99.7.1", "zero")
    assert answer_from(one, "10.99.7.1") == "zero 10.99.7.2 hello"
    listening = ear(one)
    assert inject(net.name("h2"), UNDERLAY["h1"], 7, frame("10.99.7.1", "10.99.7.2", b"forged"))
    say(zero, b"the end", "10.99.7.2")
    assert b"forged" not in b"".join(listening.until(b"the end"))
    say(beside, b"here", "10.99.7.2")
    assert b"here" in listening.until(b"here")[-1]


def test_who_is_heard_is_what_the_books_say(net: Net) -> None:
    """Any order of books leaves what the last of each address says, in all tables alike."""
    net.raised("h0")
    places = st.sampled_from([None, UNDERLAY["h1"], UNDERLAY["h2"]])
    addresses = st.sampled_from([OVERLAY.address(n) for n in range(4)])
    books = st.lists(st.dictionaries(addresses, places, max_size=4), max_size=6)

    def elements(*what: str) -> list[object]:
        return network.fence.nft_elements(*what) or []

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(books)
    def check(these: list[dict[str, str | None]]) -> None:
        known: dict[str, str | None] = dict.fromkeys(map(OVERLAY.address, range(4)))
        with net.on("h0"):
            network.locate(OVERLAY, known)
            for book in these:
                network.locate(OVERLAY, book)
                known |= book
            heard = {
                (f"{e['concat'][0]:012x}", e["concat"][1])  # type: ignore[index]
                for e in elements("set", "ip", "liveshift", "heard_7")
            }
            here = set(elements("set", "netdev", "liveshift_7", "here"))
        hosts = {(mac(OVERLAY.gateway), UNDERLAY[h]) for h in ("h1", "h2")}
        away = {(mac(a), h) for a, h in known.items() if h is not None}
        assert heard == {(m.replace(":", ""), h) for m, h in hosts | away}
        assert here == {mac(a) for a, h in known.items() if h is None}

    check()


def test_a_job_of_250_capsules_is_entered_at_once(net: Net) -> None:
    net.raised("h0")
    where = {OVERLAY.address(n): UNDERLAY["h1" if n % 2 else "h2"] for n in range(250)}
    with net.on("h0"):
        network.locate(OVERLAY, where)
        began = time.monotonic()
        network.locate(OVERLAY, where)
        network.locate(OVERLAY, {OVERLAY.address(7): None})
        assert time.monotonic() - began < 2
    assert rules(net, "h0").count("0x66c0a6307") == 249 + 2


def test_a_fence_that_does_not_stand_takes_no_book(net: Net) -> None:
    with net.on("h0"), pytest.raises(LiveshiftError, match=r"there is no set ip liveshift heard_7"):
        fence.hear(OVERLAY, {"10.99.7.1": UNDERLAY["h1"]})
    with net.on("h0"):
        assert not fence.stands(OVERLAY)
        fence.lift(OVERLAY)
