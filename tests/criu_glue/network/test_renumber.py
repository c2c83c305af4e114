# SPDX-License-Identifier: Apache-2.0
"""A rewind gives a job another VXLAN id: what was sent before reaches no socket of the time after.

Frames that must not reach a socket are counted at the host to which they come. Beside each of them
stands one that differs in its id alone, and is heard.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from frames import Ear, counted, frame, inject, inner, say, settled
from three_hosts import OVERLAY, UNDERLAY, Net, answer_from, asked, connected, inside, ip
from waits import until

from liveshift.criu_glue.network import fence, network
from liveshift.criu_glue.network.overlay import ROUNDS, STRIDE, Overlay
from liveshift.errors import LiveshiftError

pytestmark = pytest.mark.root

Serve = Callable[..., None]
HOSTS = ("h0", "h1", "h2")
NOBODY = 65534
OLD, NEW = OVERLAY.wire_id, replace(OVERLAY, rewinds=1).wire_id
OF_OLD = f"@th,96,24 {OLD}"


def rewound(net: Net, *hosts: str, rewinds: int = 1, relay: str = "") -> None:
    """The hosts have heard of so many rewinds."""
    net.raised(*hosts, overlay=replace(OVERLAY, rewinds=rewinds), relay=relay)


def wire_id(net: Net, host: str) -> int:
    with net.on(host):
        (link,) = json.loads(ip("-json", "-details", "link", "show", OVERLAY.vxlan))
    return int(link["linkinfo"]["info_data"]["id"])


def tables(net: Net, host: str) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Where mobile addresses are, in a host's forwarding table, and its rules."""
    with net.on(host):
        shown = ["bridge", "-json", "fdb", "show", "dev", OVERLAY.vxlan]
        lines = subprocess.run(shown, check=True, capture_output=True).stdout
        ruleset = ["nft", "list", "ruleset"]
        rules = subprocess.run(ruleset, check=True, capture_output=True, text=True).stdout
    found = [(e["mac"], e.get("dst", ""), e.get("master", "")) for e in json.loads(lines)]
    return sorted(e for e in found if e[0].startswith("06:6c:")), sorted(rules.split())


def datagrams(netns: str) -> socket.socket:
    """A new socket of a capsule, for datagrams."""
    with inside(netns):
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind(("0.0.0.0", 6000))
    made.settimeout(5)
    return made


def checksum(data: bytes) -> bytes:
    """That of the internet protocols (RFC 1071)."""
    total = sum(struct.unpack(f"!{(len(data) + 1) // 2}H", data + bytes(len(data) % 2)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack("!H", ~total & 0xFFFF)


def next_segment(seen: bytes, words: bytes) -> bytes:
    """The segment that follows one of a TCP connection, as an Ethernet frame."""
    ethernet, head, tcp = seen[:14], seen[14:34], seen[34:]
    own = (tcp[12] >> 4) * 4
    (length,), (sequence,) = struct.unpack("!H", head[2:4]), struct.unpack("!I", tcp[4:8])
    follows = struct.pack("!I", sequence + length - 20 - own & 0xFFFFFFFF)
    before, after = tcp[:4] + follows + tcp[8:16], tcp[18:own] + words
    size = own + len(words)
    pseudo = head[12:20] + struct.pack("!HH", socket.IPPROTO_TCP, size)
    segment = before + checksum(pseudo + before + bytes(2) + after) + after
    first, last = head[:2] + struct.pack("!H", 20 + size) + head[4:10], head[12:]
    return ethernet + first + checksum(first + bytes(2) + last) + last + segment


@contextmanager
def held_back(net: Net, host: str) -> Iterator[Callable[[], None]]:
    """A host's cable holds back what the host sends, until the function is called.

    It is a token bucket (tbf) that has run empty: netem, which delays frames, is missing in many
    kernels. What is held back has its VXLAN id already.
    """

    def tc(verb: str, rate: str, burst: str) -> None:
        queue = ["dev", "cable", "root", "tbf", "rate", rate, "burst", burst, "limit", "1000000"]
        with net.on(host):
            subprocess.run(["tc", "qdisc", verb, *queue], check=True)

    def kick() -> None:
        say(net.name(host), bytes(1400), UNDERLAY["world"], port=4788)

    kick()  # so that the hosts know each other's MAC addresses
    tc("add", "1kbit", "1600")
    kick()  # it goes at once; the next one waits for 10 s, and all others behind it
    kick()

    def let_go() -> None:
        tc("change", "1gbit", "1000000")
        kick()  # only a frame that comes makes the queue look again

    yield let_go


# ---- what was sent before ----------------------------------------------------------------------


def test_a_frame_with_the_earlier_id_reaches_no_socket(net: Net, ear: Callable[[str], Ear]) -> None:
    zero, *_ = settled(net)
    listening, sender, h0 = ear(zero), net.name("h1"), UNDERLAY["h0"]
    before = frame("10.99.7.2", "10.99.7.1", b"from before")
    assert inject(sender, h0, OLD, before)
    assert b"from before" in listening.until(b"from before")[-1], "else it was not well made"
    rewound(net, *HOSTS)
    with counted(net, "h0", OF_OLD) as arrived:
        assert inject(sender, h0, OLD, before)
        assert arrived() == 1
    assert inject(sender, h0, NEW, frame("10.99.7.2", "10.99.7.1", b"from after"))
    assert b"from before" not in b"".join(listening.until(b"from after"))


def test_a_segment_that_fits_a_connection_is_taken_under_the_new_id_only(
    net: Net, ear: Callable[[str], Ear]
) -> None:
    """As after a rewind, when a socket has the numbers again that it had at the snapshot."""
    zero, one, *_ = settled(net)
    listening, sender, h0 = ear(zero), net.name("h1"), UNDERLAY["h0"]
    with inside(zero):
        server = socket.create_server(("10.99.7.1", 5000))
    with server, connected(one, "10.99.7.1") as line, server.accept()[0] as restored:
        line.sendall(b"at the snapshot")
        assert restored.recv(100) == b"at the snapshot"
        fits = next_segment(listening.until(b"at the snapshot")[-1], b"forged")
        rewound(net, *HOSTS)
        with counted(net, "h0", OF_OLD) as arrived:
            assert inject(sender, h0, OLD, fits)
            assert arrived() == 1
        restored.settimeout(0.2)
        with pytest.raises(TimeoutError):
            restored.recv(100)
        assert inject(sender, h0, NEW, fits)
        restored.settimeout(5)
        assert restored.recv(100) == b"forged", "else it did not fit"


@pytest.mark.parametrize("changes", [True, False], ids=["a new id", "the same id"])
def test_a_link_that_holds_frames_back_delivers_nothing_to_a_new_socket(
    net: Net, changes: bool
) -> None:
    zero, one, *_ = settled(net)
    say(one, b"so that hosts know each other", "10.99.7.1")
    with (
        held_back(net, "h1") as let_go,
        counted(net, "h0", inner("10.99.7.2")) as arrived,
    ):
        say(one, b"from before", "10.99.7.1")
        if changes:
            rewound(net, *HOSTS)
        with datagrams(zero) as new:
            say(one, b"from after", "10.99.7.1")
            assert arrived() == 0, "both are on their way"
            let_go()
            assert new.recv(100) == (b"from after" if changes else b"from before")
            until(lambda: arrived() == 2)


# ---- what goes on ------------------------------------------------------------------------------


def test_connections_go_on_under_each_new_id(net: Net, serve: Serve) -> None:
    zero, one, beside, visitor = settled(net)
    serve(zero, "10.99.7.1", "zero")
    serve(one, "10.99.7.2", "one")
    before = [tables(net, host)[0] for host in HOSTS]
    with connected(one, "10.99.7.1") as line, connected(visitor, "10.99.7.1") as far:
        for rewinds in (1, 2, ROUNDS + 1):
            rewound(net, *HOSTS, rewinds=rewinds)
            now = replace(OVERLAY, rewinds=rewinds)
            assert [wire_id(net, host) for host in HOSTS] == [now.wire_id] * 3
            assert [tables(net, host)[0] for host in HOSTS] == before
            assert asked(line, "on") == "zero 10.99.7.2 on"
            assert asked(far, "on") == "zero 10.99.7.4 on"
    assert answer_from(beside, "10.99.7.2") == "one 10.99.7.3 hello"
    new = net.plug("h2", 1)  # and a capsule moves
    net.located(1, "h2")
    assert answer_from(new, "10.99.7.1") == "zero 10.99.7.2 hello"


def test_connections_to_the_world_go_on_through_a_relay(net: Net, serve: Serve) -> None:
    net.raised(*HOSTS, relay="h2")
    serve(net.name("world"), UNDERLAY["world"], "world")
    zero = net.plug("h0", 0, relayed=True)
    net.located(0, "h0")
    with connected(zero, UNDERLAY["world"]) as line:
        rewound(net, *HOSTS, relay="h2")
        assert asked(line, "on") == f"world {UNDERLAY['h2']} on"


def test_a_fence_that_somebody_flushed_is_laid_again_with_the_new_id(
    net: Net, serve: Serve, ear: Callable[[str], Ear]
) -> None:
    zero, one, beside, _ = settled(net)
    serve(zero, "10.99.7.1", "zero")
    with net.on("h0"):
        subprocess.run(["nft", "flush", "ruleset"], check=True)
    rewound(net, *HOSTS)
    assert answer_from(one, "10.99.7.1") == "zero 10.99.7.2 hello"
    listening = ear(zero)
    forged = frame("10.99.7.2", "10.99.7.1", b"forged")
    assert inject(net.name("h2"), UNDERLAY["h0"], NEW, forged)
    say(beside, b"the end", "10.99.7.1")
    assert b"forged" not in b"".join(listening.until(b"the end"))


# ---- which number counts -----------------------------------------------------------------------


def test_a_lower_number_changes_nothing(net: Net) -> None:
    settled(net)
    rewound(net, *HOSTS, rewinds=3)
    before = tables(net, "h1")
    for late in (0, 2, 3):
        rewound(net, "h1", rewinds=late)
    assert tables(net, "h1") == before
    assert wire_id(net, "h1") == replace(OVERLAY, rewinds=3).wire_id


def test_what_an_earlier_job_of_the_subnet_has_left_is_made_anew(net: Net, serve: Serve) -> None:
    rewound(net, "h0", "h1", rewinds=3)
    net.raised("h0", "h1")
    assert wire_id(net, "h0") == OLD
    zero, one = net.plug("h0", 0), net.plug("h1", 1)
    for index, host in enumerate(("h0", "h1")):
        net.located(index, host, ("h0", "h1"))
    serve(zero, "10.99.7.1", "zero")
    assert answer_from(one, "10.99.7.1") == "zero 10.99.7.2 hello"


@pytest.mark.parametrize("step", ["renumber", "_no_ipv6", "locate"])
def test_a_change_that_was_interrupted_is_finished_and_not_undone(
    net: Net, serve: Serve, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def killed(*_: object) -> None:
        raise LiveshiftError("the agent is killed here")

    zero, one, *_ = settled(net)
    serve(zero, "10.99.7.1", "zero")
    before = tables(net, "h0")[0]
    with monkeypatch.context() as broken:
        broken.setattr(fence if step == "renumber" else network, step, killed)
        with pytest.raises(LiveshiftError, match="is killed here"):
            rewound(net, "h0")
    net.raised("h0")  # a late request comes first
    assert (wire_id(net, "h0"), tables(net, "h0")[0]) == (NEW, before)
    rewound(net, "h1", "h2")
    assert answer_from(one, "10.99.7.1") == "zero 10.99.7.2 hello"


def test_lowering_leaves_nothing_and_another_job_as_it_was(net: Net) -> None:
    other = Overlay(8, "10.99.8.0/24", 5)
    net.raised("h0", overlay=other)
    net.plug("h0", 0, overlay=other)
    with net.on("h0"):
        ruleset = ["nft", "list", "ruleset"]
        alone = subprocess.run(ruleset, check=True, capture_output=True).stdout
        for rewinds in (0, 1, 2):
            rewound(net, "h0", rewinds=rewinds)
        network.lower_overlay(OVERLAY)  # whoever does it may not know the number
        network.lower_overlay(OVERLAY)
        assert subprocess.run(ruleset, check=True, capture_output=True).stdout == alone
        network.lower_overlay(replace(other, rewinds=0))
        assert b"liveshift" not in subprocess.run(ruleset, check=True, capture_output=True).stdout


def test_users_of_a_host_send_under_no_id_that_a_job_may_have(net: Net) -> None:
    settled(net)
    sender, payload = net.name("h1"), frame("10.99.7.2", "10.99.7.1", b"forged")
    last = replace(OVERLAY, vni=256, rewinds=ROUNDS - 1).wire_id
    for taken in (OLD, NEW, last):
        assert not inject(sender, UNDERLAY["h0"], taken, payload, user=NOBODY)
    for free in (NEW + 4096, OLD + ROUNDS * STRIDE):
        assert inject(sender, UNDERLAY["h0"], free, payload, user=NOBODY)
