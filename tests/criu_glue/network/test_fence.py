# SPDX-License-Identifier: Apache-2.0
"""The fence in the kernel: an address speaks from where the book has it, or not at all.

Frames that must not arrive are counted at the host they come to, so that "nobody heard it" is not
said of what was never sent; and what is heard afterwards comes by the same way.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
from frames import (
    Ear,
    counted,
    frame,
    heard_by,
    inject,
    inject_in_pieces,
    inner,
    say,
    settled,
    somebody_elses_vxlan,
)
from three_hosts import (
    OVERLAY,
    UNDERLAY,
    Net,
    answer_from,
    asked,
    connected,
    inside,
    ip,
)
from waits import until

from liveshift.criu_glue.network import network_lock
from liveshift.criu_glue.network.iproute import nft
from liveshift.criu_glue.network.overlay import mac

pytestmark = pytest.mark.root

Serve = Callable[..., None]
NOBODY = 65534


# ---- a stray copy ------------------------------------------------------------------------------


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
            network_lock.unlock(net.pid_in(new))
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
            until(lambda: at_h0() >= 53 and at_h2() >= 50, 5.0)  # TCP has sent it again by then
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


def test_a_sandbox_that_waits_is_not_the_place_of_its_address(net: Net, serve: Serve) -> None:
    """Even without its lock it is silent, and the source is heard where it is being built."""
    zero, one, _, visitor = settled(net)
    serve(zero, "10.99.7.1", "zero")
    serve(one, "10.99.7.2", "one")
    waiting = net.plug("h2", 1, locked=True)
    network_lock.unlock(net.pid_in(waiting))
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
        nft(
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
    somebody_elses_vxlan(net, 99)
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
        "its own",
        "another's",
        "another's IP",
        "another's MAC",
        "the gateway's",
        "no capsule's",
        "ARP for another",
        "ARP for itself",
        "IPv6",
    ],
)
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
