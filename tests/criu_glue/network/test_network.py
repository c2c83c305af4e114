# SPDX-License-Identifier: Apache-2.0
"""The overlay between real hosts: network namespaces joined by a switch, with real TCP over it."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from three_hosts import (
    OVERLAY,
    UNDERLAY,
    Net,
    answer_from,
    asked,
    connected,
    inside,
    ip,
    raise_overlay,
)

from liveshift.criu_glue.network import network, network_lock
from liveshift.criu_glue.network.iproute import nft_elements
from liveshift.criu_glue.network.network_lock import LOCK_TABLE
from liveshift.criu_glue.network.overlay import Overlay, mac
from liveshift.errors import LiveshiftError

pytestmark = pytest.mark.root


def forwarding(net: Net, host: str, index: int) -> list[str]:
    """Where this host's VXLAN sends what is meant for an address."""
    with net.on(host):
        done = subprocess.run(
            ["bridge", "-json", "fdb", "show", "dev", OVERLAY.vxlan],
            check=True,
            capture_output=True,
        )
    wanted = mac(OVERLAY.address(index))
    return [e["dst"] for e in json.loads(done.stdout) if e["mac"] == wanted and "dst" in e]


def test_capsules_reach_each_other_under_their_own_addresses(
    net: Net, serve: Callable[..., None]
) -> None:
    net.raised("h0", "h1")
    zero, one, two = net.plug("h0", 0), net.plug("h1", 1), net.plug("h1", 2)
    for index, host in ((0, "h0"), (1, "h1"), (2, "h1")):
        for other in ("h0", "h1"):
            with net.on(other):
                where = None if host == other else UNDERLAY[host]
                network.locate(OVERLAY, {OVERLAY.address(index): where})
    serve(one, OVERLAY.address(1), "one")
    serve(zero, OVERLAY.address(0), "zero")
    assert answer_from(zero, "10.99.7.2") == "one 10.99.7.1 hello"
    assert answer_from(two, "10.99.7.2") == "one 10.99.7.3 hello"
    assert answer_from(two, "10.99.7.1") == "zero 10.99.7.3 hello"
    with inside(zero):  # nothing that is large gets stuck on the way
        assert json.loads(ip("-json", "link", "show", "eth0"))[0]["mtu"] == 1450
    with connected(zero, "10.99.7.2") as line:
        block = os.urandom(1 << 20)
        threading.Thread(target=line.sendall, args=(block,), daemon=True).start()
        got = 0
        while got < len(block):
            got += len(line.recv(1 << 20))


def test_hosts_see_mobile_addresses_and_the_world_sees_the_hosts(
    net: Net, serve: Callable[..., None]
) -> None:
    net.raised("h0", "h1")
    zero = net.plug("h0", 0)
    with net.on("h1"):
        network.locate(OVERLAY, {OVERLAY.address(0): UNDERLAY["h0"]})
    serve(net.name("h1"), UNDERLAY["h1"], "h1")
    serve(net.name("h0"), UNDERLAY["h0"], "h0")
    serve(net.name("world"), UNDERLAY["world"], "world")
    assert answer_from(zero, UNDERLAY["h1"]) == "h1 10.99.7.1 hello"
    assert answer_from(zero, UNDERLAY["h0"]) == "h0 10.99.7.1 hello"
    assert answer_from(zero, UNDERLAY["world"]) == f"world {UNDERLAY['h0']} hello"


def test_a_locked_capsule_is_silent_but_for_itself_and_its_connections_outlast_it(
    net: Net, serve: Callable[..., None]
) -> None:
    net.raised("h0", "h1")
    zero, one = net.plug("h0", 0), net.plug("h1", 1)
    net.raised("h2")
    net.located(0, "h0")
    net.located(1, "h1")
    serve(one, "0.0.0.0", "one")
    line = connected(zero, "10.99.7.2")
    assert asked(line, "1") == "one 10.99.7.1 1"
    pid = net.pid_in(one)
    network_lock.prepare_lock(pid)
    assert asked(line, "open") == "one 10.99.7.1 open"
    network_lock.lock(pid)
    network_lock.lock(pid)
    assert network_lock.locked(pid)
    line.settimeout(0.4)
    with pytest.raises(TimeoutError):
        asked(line, "2")
    with pytest.raises(OSError, match=r"No route to host|timed out"):
        connected(zero, "10.99.7.2", 1.0)
    assert answer_from(one, "127.0.0.1") == "one 127.0.0.1 hello"
    network_lock.prepare_lock(pid)
    assert network_lock.locked(pid)
    network_lock.unlock(pid)
    network_lock.unlock(pid)
    assert not network_lock.locked(pid)
    began = time.monotonic()
    line.settimeout(5)
    assert line.recv(100) == b"one 10.99.7.1 2"  # what was under way arrives, and soon
    assert time.monotonic() - began < 1
    assert asked(line, "3") == "one 10.99.7.1 3"
    line.close()


def test_a_namespace_that_was_never_locked_is_open_and_one_that_has_gone_is_told_of(
    net: Net,
) -> None:
    net.raised("h0")
    pid = net.pid_in(net.plug("h0", 0))
    assert not network_lock.locked(pid)
    network_lock.unlock(pid)
    assert not network_lock.locked(pid)
    network_lock.lock(pid)
    assert network_lock.locked(pid)
    with pytest.raises(LiveshiftError, match="of process 999999999 cannot be changed"):
        network_lock.lock(999999999)


def test_an_address_moves_and_packets_follow(net: Net, serve: Callable[..., None]) -> None:
    net.raised("h0", "h1", "h2")
    zero, here, beside = net.plug("h0", 0), net.plug("h1", 1), net.plug("h1", 2)
    for index, host in ((0, "h0"), (1, "h1"), (2, "h1")):
        net.located(index, host)
    serve(here, "10.99.7.2", "on h1")
    assert answer_from(zero, "10.99.7.2").startswith("on h1 ")

    there = net.plug("h2", 1, locked=True)  # an empty sandbox: nobody may notice it yet
    serve(there, "10.99.7.2", "on h2")
    assert answer_from(zero, "10.99.7.2").startswith("on h1 ")
    assert answer_from(beside, "10.99.7.2").startswith("on h1 ")

    network_lock.lock(net.pid_in(here))
    net.located(1, "h2")
    assert forwarding(net, "h0", 1) == [UNDERLAY["h2"]]
    assert forwarding(net, "h1", 1) == [UNDERLAY["h2"]]
    assert forwarding(net, "h2", 1) == []
    network_lock.unlock(net.pid_in(there))
    assert answer_from(zero, "10.99.7.2").startswith("on h2 ")
    assert answer_from(beside, "10.99.7.2").startswith("on h2 ")
    net.unplug("h1", 1)
    assert answer_from(beside, "10.99.7.2").startswith("on h2 ")

    back = net.plug("h1", 1)  # and home again
    serve(back, "10.99.7.2", "back on h1")
    net.unplug("h2", 1)
    net.located(1, "h1")
    assert answer_from(zero, "10.99.7.2").startswith("back on h1 ")
    assert answer_from(beside, "10.99.7.2").startswith("back on h1 ")
    net.located(1, "h1")  # repeating it adds nothing
    assert forwarding(net, "h0", 1) == [UNDERLAY["h1"]]
    assert forwarding(net, "h2", 1) == [UNDERLAY["h1"]]


def test_an_empty_sandbox_that_is_discarded_leaves_the_address_where_it_was(
    net: Net, serve: Callable[..., None]
) -> None:
    net.raised("h0", "h1", "h2")
    zero, here, visitor = net.plug("h0", 0), net.plug("h1", 1), net.plug("h2", 2)
    for index, host in ((0, "h0"), (1, "h1"), (2, "h2")):
        net.located(index, host)
    serve(here, "10.99.7.2", "on h1")
    net.plug("h2", 1, locked=True)
    assert answer_from(visitor, "10.99.7.2").startswith("on h1 ")  # nor does it while it is there
    net.unplug("h2", 1)
    with net.on("h2"):  # what the destination's agent does then
        network.locate(OVERLAY, {"10.99.7.2": UNDERLAY["h1"]})
    assert answer_from(visitor, "10.99.7.2").startswith("on h1 ")
    assert answer_from(zero, "10.99.7.2").startswith("on h1 ")


def test_raising_again_changes_nothing_and_finishes_what_was_interrupted(net: Net) -> None:
    net.raised("h0")
    one = net.plug("h0", 0)
    net.raised("h0")
    with inside(one):
        assert "10.99.7.1/24" in ip("addr", "show", "eth0")
    with net.on("h0"):
        assert OVERLAY.veth(0) in ip("link")
        ip("link", "set", OVERLAY.bridge, "alias", "half")  # as if it had never been completed
        ip("link", "del", OVERLAY.vxlan)
    net.raised("h0")
    with net.on("h0"):
        assert OVERLAY.vxlan in ip("link")
        rules = subprocess.run(
            ["nft", "list", "ruleset"], capture_output=True, text=True, check=True
        )
        assert rules.stdout.count("masquerade") == 1


def test_books_that_several_threads_enter_follow_each_other(net: Net) -> None:
    """A restore says that the address is here while the book that says so comes in."""
    net.raised("h0")
    address = OVERLAY.address(1)
    places = [None, UNDERLAY["h1"], None, UNDERLAY["h2"]]

    def enter(where: str | None) -> None:
        with net.on("h0"):
            for _ in range(5):
                network.locate(OVERLAY, {address: where})

    with ThreadPoolExecutor(len(places)) as threads:
        list(threads.map(enter, places))
    last = forwarding(net, "h0", 1)
    assert len(last) <= 1
    with net.on("h0"):
        found = nft_elements("set", "ip", "liveshift", "placed_7") or []
        number = int(mac(address).replace(":", ""), 16)
        heard = [e["concat"][1] for e in found if e["concat"][0] == number]
        here = nft_elements("set", "netdev", "liveshift_7", "here") or []
    assert heard == last
    assert here == ([] if last else [mac(address)])


def test_plugging_in_replaces_what_an_earlier_stay_left(net: Net) -> None:
    net.raised("h0")
    name = net.plug("h0", 0)
    first = os.stat(f"/run/netns/{name}").st_ino
    assert net.plug("h0", 0, locked=True) == name
    assert os.stat(f"/run/netns/{name}").st_ino != first
    with inside(name):
        rules = subprocess.run(
            ["nft", "list", "ruleset"], capture_output=True, text=True, check=True
        )
        assert LOCK_TABLE in rules.stdout


def test_lowering_leaves_nothing(net: Net) -> None:
    def everything() -> tuple[list[str], str, str]:
        with net.on("h0"):
            links = [link["ifname"] for link in json.loads(ip("-json", "link"))]
            nft = subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True)
            return sorted(links), ip("route"), nft.stdout

    def namespaces() -> set[str]:
        return {name for name in os.listdir("/run/netns") if name.startswith(f"{net.tag}-")}

    before, spaces = everything(), namespaces()
    net.raised("h0")
    net.plug("h0", 0)
    net.plug("h0", 1, locked=True)
    assert everything() != before
    net.unplug("h0", 0)
    net.unplug("h0", 1)
    net.unplug("h0", 1)
    with net.on("h0"):
        network.lower_overlay(OVERLAY)
        network.lower_overlay(OVERLAY)
    assert everything() == before
    assert namespaces() == spaces


def test_two_jobs_on_one_host_do_not_hear_each_other(net: Net, serve: Callable[..., None]) -> None:
    other = Overlay(8, "10.99.8.0/24")
    net.raised("h0")
    zero = net.plug("h0", 0)
    with net.on("h0"):
        raise_overlay(other, UNDERLAY["h0"])
        network.plug_in(other, net.name("other"), 0, [], locked=False, owner=0)
        net.capsules.add(net.name("other"))
        network.lower_overlay(OVERLAY)
        assert Path(f"/run/netns/{net.name('other')}").exists()
        assert other.bridge in ip("link")
    serve(net.name("other"), "10.99.8.1", "other")
    with pytest.raises(OSError, match=r"unreachable|No route|timed out"):
        connected(zero, "10.99.8.1", 0.5)


def test_an_address_that_no_device_has_is_named(net: Net) -> None:
    with (
        net.on("h0"),
        pytest.raises(LiveshiftError, match=r"no interface with address 10\.1\.1\.1"),
    ):
        raise_overlay(OVERLAY, "10.1.1.1")
    with (
        net.on("h0"),
        pytest.raises(LiveshiftError, match=r"overlay 10\.99\.7\.0/24 does not exist"),
    ):
        network.plug_in(OVERLAY, net.name("c7.0.h0"), 0, [], locked=False, owner=0)
    assert not Path(f"/run/netns/{net.name('c0.h0')}").exists()


def test_a_mac_follows_from_its_address() -> None:
    assert mac("10.99.7.1") == "06:6c:0a:63:07:01"


TABLE = Path("/proc/sys/net/ipv4/tcp_ehash_entries")


@pytest.mark.machine("Linux 6.1 (tcp_child_ehash_entries)")
def test_a_capsule_has_a_small_table_of_connections_and_the_limits_of_its_host(net: Net) -> None:
    """Where a namespace shares the host's table, the kernel shows a negative size (ip-sysctl)."""
    net.raised("h0")
    names = ("tcp_max_tw_buckets", "tcp_max_syn_backlog", "tcp_child_ehash_entries")

    def limits() -> list[str]:
        return [(TABLE.parent / name).read_text().strip() for name in names]

    with net.on("h0"):
        of_host = limits()
    with inside(net.plug("h0", 0)):
        assert int(TABLE.read_text()) == 4096
        assert limits() == of_host
    with net.on("h0"):
        assert limits() == of_host
