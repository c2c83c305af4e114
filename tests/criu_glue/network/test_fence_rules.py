# SPDX-License-Identifier: Apache-2.0
"""What the fence keeps capsules from, how its rules come and go, and what they hold."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from frames import (
    Ear,
    frame,
    inject,
    say,
    settled,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machine_needs import needs_fact
from three_hosts import (
    AGENTS,
    CONTROL,
    OVERLAY,
    UNDERLAY,
    Net,
    answer_from,
    inside,
    ip,
)

from liveshift.criu_glue.network import fence, network
from liveshift.criu_glue.network.iproute import nft_elements
from liveshift.criu_glue.network.overlay import Overlay, mac
from liveshift.errors import LiveshiftError

pytestmark = pytest.mark.root

Serve = Callable[..., None]
OTHER = Overlay(8, "10.99.8.0/24")


# ---- what capsules do not reach ----------------------------------------------------------------


def refusal(netns: str, address: str, port: int) -> str:
    """How a TCP connection is refused, at once."""
    with inside(netns), socket.socket() as line:
        line.settimeout(5)
        return os.strerror(line.connect_ex((address, port)))  # EAGAIN: there was no answer


def connects(netns: str, user: int, address: str, port: int) -> bool:
    """Whether a user of a host gets a TCP connection."""
    knock = ["bash", "-c", f"exec 3<>/dev/tcp/{address}/{port}"]
    words = ["setpriv", f"--reuid={user}", "--clear-groups", *knock]
    done = subprocess.run(["ip", "netns", "exec", netns, *words], capture_output=True, text=True)
    assert not done.returncode or "Connection refused" in done.stderr, done.stderr
    return not done.returncode


def test_control_ports_are_out_of_reach_and_services_are_not(net: Net, serve: Serve) -> None:
    zero, *_ = settled(net)
    listeners = []
    try:
        for address, port in [*CONTROL, *AGENTS, (UNDERLAY["h1"], 22)]:
            machine = next(name for name, own in UNDERLAY.items() if own == address)
            with net.on(machine):
                listeners.append(socket.create_server((address, port)))
        for address, port in [*CONTROL, *AGENTS]:
            assert refusal(zero, address, port) == "Connection refused"
            with net.on("h1"):
                socket.create_connection((address, port), 5).close()  # hosts among themselves
        with inside(zero):
            socket.create_connection((UNDERLAY["h1"], 22), 5).close()
        for address, port in CONTROL:
            assert connects(net.name("h0"), 65534, address, port)
        for address, port in AGENTS:
            assert connects(net.name("h0"), 0, address, port)
            assert not connects(net.name("h0"), 65534, address, port), "only root is an agent"
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
        world.bind((UNDERLAY["world"], 4788))
        world.settimeout(5)
        say(zero, b"to the world it may", UNDERLAY["world"], port=4788)
        assert world.recvfrom(100)[1][0] == UNDERLAY["h0"]
    assert not inject(zero, UNDERLAY["world"], 7, b"anything"), "not even to the world"


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


BRIDGED = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")


@pytest.fixture
def br_netfilter() -> Iterator[None]:
    """That module, for as long as a test lasts if nothing had loaded it before."""
    load = not BRIDGED.exists() and shutil.which("modprobe") is not None
    if load:
        subprocess.run(["modprobe", "br_netfilter"], check=False)
    yield
    if load and BRIDGED.exists():
        subprocess.run(["modprobe", "-r", "br_netfilter"], check=True)


@pytest.mark.usefixtures("br_netfilter")
@pytest.mark.parametrize("filtered", ["0", "1"])
def test_bridged_traffic_passes_whether_or_not_it_is_filtered(
    net: Net, serve: Serve, filtered: str
) -> None:
    """net.bridge.bridge-nf-call-iptables brings what a bridge hands on to the forward hook."""
    _, one, beside, _ = settled(net)
    if BRIDGED.exists() or filtered == "1":  # without the module nothing is filtered
        needs_fact("br_netfilter")
        for host in ("h0", "h1"):
            with net.on(host):
                words = ["sysctl", "-q", f"net.bridge.{BRIDGED.name}={filtered}"]
                subprocess.run(words, check=True)
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
    net.plug("h1", 0, locked=True)  # a sandbox that waits for capsule 0
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
        return nft_elements(*what) or []

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
                (f"{mac:012x}", host, f"{address:08x}")
                for e in elements("set", "ip", "liveshift", "placed_7")
                for mac, host, address in [e["concat"]]  # type: ignore[index]
            }
            here = set(elements("set", "netdev", "liveshift_7", "here"))
        hosts = {(mac(OVERLAY.gateway), UNDERLAY[h], UNDERLAY[h]) for h in ("h1", "h2")}
        away = {(mac(a), h, a) for a, h in known.items() if h is not None}
        assert heard == {
            (m.replace(":", ""), h, socket.inet_aton(a).hex()) for m, h, a in hosts | away
        }
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
    with (
        net.on("h0"),
        pytest.raises(LiveshiftError, match=r"there is no set ip liveshift placed_7"),
    ):
        fence.accept(OVERLAY, {"10.99.7.1": UNDERLAY["h1"]})
    with net.on("h0"):
        assert not fence.stands(OVERLAY)
        fence.lift(OVERLAY)
