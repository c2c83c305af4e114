# SPDX-License-Identifier: Apache-2.0
"""A relay keeps connections to the world: hosts, a machine outside, and real TCP between them."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable

import pytest
from three_hosts import OVERLAY, UNDERLAY, Net, answer_from, asked, connected, inside, net, serve

from liveshift.criu_glue.network import network
from liveshift.criu_glue.network.overlay import Overlay, mac

__all__ = ["net", "serve"]

pytestmark = pytest.mark.root

HOSTS = ("h0", "h1", "h2")
WORLD = UNDERLAY["world"]


@pytest.fixture
def relayed(net: Net, serve: Callable[..., None]) -> Net:
    """The overlay on three hosts, of which h2 relays; a server outside and one on each host."""
    net.raised(*HOSTS, relay="h2")
    serve(net.name("world"), WORLD, "world")
    return net


def moved(net: Net, index: int, at: str) -> str:
    """A capsule's namespace at another host, as at a destination: the book says so everywhere."""
    name = net.plug(at, index, locked=True, relayed=True)
    net.located(index, at)
    return name


def test_the_world_sees_the_relay_wherever_a_capsule_is(relayed: Net) -> None:
    for host in ("h0", "h2", "h1"):
        zero = relayed.plug(host, 0, relayed=True)
        relayed.located(0, host)
        assert answer_from(zero, WORLD) == f"world {UNDERLAY['h2']} hello"
        relayed.unplug(host, 0)


def test_a_connection_to_the_world_goes_on_at_another_host(relayed: Net) -> None:
    """As CRIU does it: the socket's state is read at one host and written at the other."""
    zero = relayed.plug("h0", 0, relayed=True)
    relayed.located(0, "h0")
    line = connected(zero, WORLD)
    assert asked(line, "before") == f"world {UNDERLAY['h2']} before"
    # The socket itself moves: its namespace goes to the other host's end of a new veth.
    with relayed.on("h0"):
        network.unplug(OVERLAY, "none", 0)  # the port at h0 is gone, the namespace stays
    gone = moved(relayed, 0, "h1")
    hand_over(relayed, gone, zero)
    assert asked(line, "after") == f"world {UNDERLAY['h2']} after"
    line.close()


def hand_over(net: Net, source: str, target: str) -> None:
    """Give the device of one namespace to another, with all that plug_in enters there."""
    with inside(source):
        subprocess.run(["ip", "link", "set", "eth0", "netns", target], check=True)
    own, gateway, relay = OVERLAY.address(0), OVERLAY.gateway, OVERLAY.relay
    with inside(target):
        for words in (
            "link set eth0 up",
            f"addr add {own}/24 dev eth0",
            f"route add default via {relay} dev eth0 src {own}",
            *(
                f"neigh replace {a} lladdr {mac(a)} dev eth0 nud permanent"
                for a in (gateway, relay)
            ),
        ):
            subprocess.run(["ip", *words.split()], check=True)


def test_hosts_of_the_cluster_still_see_mobile_addresses(
    relayed: Net, serve: Callable[..., None]
) -> None:
    zero = relayed.plug("h0", 0, relayed=True)
    relayed.located(0, "h0")
    for host in HOSTS:
        serve(relayed.name(host), UNDERLAY[host], host)
        assert answer_from(zero, UNDERLAY[host]) == f"{host} 10.99.7.1 hello"


def test_nothing_but_the_relay_speaks_for_the_world(net: Net, serve: Callable[..., None]) -> None:
    """h1 is no relay to h0 and h2: what it sends under the world's address is dropped."""
    net.raised("h0", "h2", relay="h2")
    net.raised("h1", relay="h1")
    with net.on("h1"):
        network.locate(OVERLAY, {OVERLAY.address(0): UNDERLAY["h0"]})
    zero = net.plug("h0", 0, relayed=True)
    net.located(0, "h0", ("h0", "h2"))
    heard = listening(zero)
    send_as_world(net, "h2")
    assert heard.recv(100) == b"from h2"
    send_as_world(net, "h1")
    with pytest.raises(TimeoutError):
        heard.recv(100)
    heard.close()


def listening(netns: str) -> socket.socket:
    with inside(netns):
        heard = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        heard.bind(("0.0.0.0", 6000))
    heard.settimeout(1.0)
    return heard


def send_as_world(net: Net, host: str) -> None:
    """From a host's kernel into the overlay, under an address of the world."""
    with net.on(host):
        subprocess.run(["ip", "addr", "add", "203.0.113.9/32", "dev", "lo"], check=True)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
            line.bind(("203.0.113.9", 0))
            line.sendto(f"from {host}".encode(), (OVERLAY.address(0), 6000))


def test_a_capsule_reaches_no_other_job_by_the_relay(
    relayed: Net, serve: Callable[..., None]
) -> None:
    other = Overlay(8, "10.99.8.0/24")
    relayed.raised(*HOSTS, overlay=other, relay="h2")
    theirs = relayed.plug("h2", 0, overlay=other, relayed=True)
    serve(theirs, other.address(0), "theirs")
    zero = relayed.plug("h0", 0, relayed=True)
    relayed.located(0, "h0")
    assert answer_from(zero, WORLD).startswith("world")
    with pytest.raises(OSError, match=r"No route|refused|prohibited|timed out|unreachable"):
        connected(zero, other.address(0), 1.0)
    with pytest.raises(OSError, match=r"No route|refused|prohibited|timed out|unreachable"):
        connected(zero, OVERLAY.relay, 1.0)


def test_nothing_of_the_relay_is_left(relayed: Net) -> None:
    with relayed.on("h2"):
        rules = subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True)
        assert mac(OVERLAY.relay) in rules.stdout
        network.lower_overlay(OVERLAY)
        rules = subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True)
    assert not rules.stdout


def test_the_rules_come_back_with_the_relay_in_them(relayed: Net) -> None:
    """Somebody flushes the rules of all hosts while connections are open."""
    zero = relayed.plug("h0", 0, relayed=True)
    relayed.located(0, "h0")
    line = connected(zero, WORLD)
    for host in HOSTS:
        with relayed.on(host):
            subprocess.run(["nft", "flush", "ruleset"], check=True)
    relayed.raised(*HOSTS, relay="h2")
    assert asked(line, "on") == f"world {UNDERLAY['h2']} on"
    assert answer_from(zero, WORLD) == f"world {UNDERLAY['h2']} hello"
    line.close()
