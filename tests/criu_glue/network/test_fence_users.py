# SPDX-License-Identifier: Apache-2.0
"""What users of a host, other jobs' capsules and machines beside the cluster can do to a capsule.

VXLAN is forged to every address that the kernel's socket listens on; ports of capsules are tried
from everywhere but the overlay. Beside each refusal stands what must go on.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from frames import Ear, counted, frame, inject, inner, say, settled, somebody_elses_vxlan
from three_hosts import (
    OVERLAY,
    UNDERLAY,
    Net,
    answer_from,
    hold_fence,
    inside,
    ip,
    raise_overlay,
)
from waits import until

from liveshift.criu_glue.network import fence, network
from liveshift.criu_glue.network.overlay import Overlay, mac

pytestmark = pytest.mark.root

Serve = Callable[..., None]
Listen = Callable[[str], Ear]
NOBODY = 65534
OTHER = Overlay(8, "10.99.8.0/24")

SECOND = "10.234.0.110"
OUTSIDE = "10.235.0.10"  # routed to h0, and in none of the cluster's networks
TARGETS = {
    "its address": UNDERLAY["h0"],
    "a second address": SECOND,
    "a routed address": OUTSIDE,
    "the subnet's broadcast": "10.234.0.255",
    "the limited broadcast": "255.255.255.255",
    "all hosts' multicast": "224.0.0.1",
}
TARGETS_V6 = {
    "IPv6": "fd00::10",
    "IPv6 multicast": "ff02::1%cable",
    "IPv4 in IPv6": f"::ffff:{SECOND}",
}


@pytest.fixture
def reachable(net: Net) -> Net:
    """h0 has further addresses, and the others have ways to all of them."""
    for number, host in enumerate(UNDERLAY):
        with net.on(host):
            ip("addr", "add", f"fd00::1{number}/64", "dev", "cable", "nodad")
            if host != "h0":
                ip("route", "add", "default", "via", UNDERLAY["h0"], "dev", "cable")
    with net.on("h0"):
        ip("addr", "add", f"{SECOND}/24", "dev", "cable")
        ip("addr", "add", f"{OUTSIDE}/32", "dev", "lo")
    return net


def user_sends(words: str, *argv: str, user: int = NOBODY) -> subprocess.CompletedProcess[str]:
    """A short program of an ordinary user in this thread's network namespace."""
    return subprocess.run(
        ["/usr/bin/python3", "-Sc", "import socket, sys\n" + words, *argv],
        capture_output=True,
        text=True,
        cwd="/",
        user=user,
        group=NOBODY,
        extra_groups=[],
        timeout=30,
        check=False,
    )


@contextmanager
def user_serves(net: Net, host: str, address: str) -> Iterator[None]:
    """A TCP and a UDP service of an ordinary user; both answer with what they were told."""
    program = (
        "import os, socket\n"
        f"tcp = socket.create_server(({address!r}, 5000))\n"
        f"udp = socket.socket(type=socket.SOCK_DGRAM); udp.bind(({address!r}, 5000))\n"
        "print('up', flush=True)\n"
        "if os.fork():\n"
        "  while True: udp.sendto(*udp.recvfrom(100))\n"
        "while True:\n"
        "  line, _ = tcp.accept(); line.sendall(line.recv(100)); line.close()\n"
    )
    with (
        net.on(host),
        subprocess.Popen(
            ["/usr/bin/python3", "-Sc", program],
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            process_group=0,
        ) as server,
    ):
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "up\n"
            yield
        finally:
            os.killpg(server.pid, 9)


# ---- VXLAN that is no kernel's -----------------------------------------------------------------


def test_no_user_and_no_capsule_is_heard_as_a_rank_whatever_they_send_to(
    reachable: Net, ear: Listen
) -> None:
    """From the very host where the rank is, under its MAC and address."""
    net = reachable
    zero, one, beside, _ = settled(net)
    net.raised("h1", overlay=OTHER)
    theirs = net.plug("h1", 0, overlay=OTHER)
    with net.on("h1"):
        network.locate(OTHER, {OTHER.address(0): None})
    listening = ear(zero)
    forged = frame("10.99.7.2", "10.99.7.1", b"forged")
    for what, target in TARGETS.items():
        assert not inject(net.name("h1"), target, 7, forged, user=NOBODY), f"a user, to {what}"
        # No complaint answers a broadcast, so that one may seem to get out of a capsule.
        theirs_got_out = inject(theirs, target, 7, forged)
        ours_got_out = inject(one, target, 7, forged, user=NOBODY)
        assert not (theirs_got_out or ours_got_out) or "cast" in what, f"a capsule, to {what}"
    for target in TARGETS_V6.values():  # IPv6 may go out: nothing listens
        inject(net.name("h1"), target, 7, forged, user=NOBODY)
    say(beside, b"the end", "10.99.7.1")
    assert b"forged" not in b"".join(listening.until(b"the end"))


@pytest.mark.parametrize("target", TARGETS)
def test_a_host_hears_what_comes_to_its_cluster_address_only(
    reachable: Net, ear: Listen, target: str
) -> None:
    """The sender's host has no fence that would refuse it: root's packets are let out."""
    net = reachable
    zero, _, beside, _ = settled(net)
    listening = ear(zero)
    payload = frame("10.99.7.2", "10.99.7.1", b"injected")
    with counted(net, "h0", inner("10.99.7.2")) as arrived:
        assert inject(net.name("h1"), TARGETS[target], 7, payload)
        assert arrived() == 1
    say(beside, b"the end", "10.99.7.1")
    heard = b"injected" in b"".join(listening.until(b"the end"))
    assert heard == (target == "its address")


def test_users_of_a_host_without_a_job_cannot_speak_as_it(net: Net, ear: Listen) -> None:
    """Its agent's rules stand before a job comes and after the last one has gone."""
    with net.on("h1"):
        hold_fence()
    net.raised("h0", "h2")
    zero, beside = net.plug("h0", 0), net.plug("h2", 1)
    for index, host in enumerate(("h0", "h2", "h1")):
        net.located(index, host, ("h0", "h2"))
    listening = ear(zero)
    forged = frame("10.99.7.3", "10.99.7.1", b"forged")
    for had_one in (False, True):
        if had_one:
            with net.on("h1"):
                raise_overlay(OVERLAY, UNDERLAY["h1"])
                network.lower_overlay(OVERLAY)
        assert not inject(net.name("h1"), UNDERLAY["h0"], 7, forged, user=NOBODY)
    say(beside, b"the end", "10.99.7.1")
    assert b"forged" not in b"".join(listening.until(b"the end"))
    with net.on("h1"):
        fence.release()
    assert inject(net.name("h1"), UNDERLAY["h0"], 7, forged, user=NOBODY), "the agent has ended"
    assert b"forged" in listening.until(b"forged")[-1], "else it was not well made"


def test_an_agents_end_leaves_the_rules_to_the_jobs_that_are_here(net: Net) -> None:
    settled(net)
    forged = frame("10.99.7.2", "10.99.7.1", b"forged")
    with net.on("h1"):
        hold_fence()
        fence.release()
        assert not inject(net.name("h1"), UNDERLAY["h0"], 7, forged, user=NOBODY)
        network.lower_overlay(OVERLAY)
        tables = ["nft", "list", "tables"]
        done = subprocess.run(tables, check=True, capture_output=True, text=True)
    assert "liveshift" not in done.stdout


@pytest.mark.parametrize(
    ("host", "payload"),
    [
        ("h2", frame("10.99.7.2", "10.99.7.1", b"forged", mac_from="10.99.7.4")),
        ("h2", frame("10.99.7.2", "10.99.7.1", b"forged", mac_from=OVERLAY.gateway)),
        ("h2", frame("192.0.2.1", "10.99.7.1", b"forged", mac_from=OVERLAY.gateway)),
        ("h1", frame("10.99.7.2", "10.99.7.1", b"forged", arp=True)),
        (
            "h1",
            bytes.fromhex((mac("10.99.7.1") + mac("10.99.7.2")).replace(":", ""))
            + b"\x86\xdd"
            + frame("10.99.7.2", "10.99.7.1", b"forged")[14:],
        ),
    ],
    ids=["another's IP", "behind the gateway's MAC", "as the world", "ARP", "IPv6"],
)
def test_root_of_a_host_is_not_heard_for_a_capsule_elsewhere(
    net: Net, ear: Listen, host: str, payload: bytes
) -> None:
    """A MAC that is heard from there does not carry another's address."""
    zero, _, beside, visitor = settled(net)
    listening = ear(zero)
    with counted(net, "h0", "@th,96,24 7") as arrived:
        assert inject(net.name(host), UNDERLAY["h0"], 7, payload)
        assert arrived() == 1
    for rank in (beside, visitor):
        say(rank, b"the end of one", "10.99.7.1")
        assert b"forged" not in b"".join(listening.until(b"the end of one"))


def test_a_users_traffic_in_somebody_elses_vxlan_goes_on(net: Net, serve: Serve) -> None:
    """What the kernel has wrapped has the user's socket still."""
    settled(net)
    somebody_elses_vxlan(net, 4097)
    serve(net.name("h0"), "192.168.9.1", "theirs")
    with net.on("h1"):
        said = user_sends(
            "line = socket.create_connection(('192.168.9.1', 5000), 5)\n"
            "line.sendall(b'hello'); print(line.recv(100).decode())"
        )
    assert said.stdout == "theirs 192.168.9.2 hello\n", said.stderr


# ---- the ports of capsules ---------------------------------------------------------------------


def tcp_as_user(address: str, user: int = NOBODY) -> str:
    """What a user of a host gets who opens a TCP connection to port 5000."""
    done = user_sends(
        "line = socket.socket(); line.settimeout(5)\nprint(line.connect_ex((sys.argv[1], 5000)))",
        address,
        user=user,
    )
    return os.strerror(int(done.stdout))


def udp_as_user(address: str, words: str, user: int = NOBODY) -> None:
    """A datagram to port 6000, of whatever kind the address is."""
    user_sends(
        "kind, _, _, _, to = socket.getaddrinfo(sys.argv[1], 6000, type=socket.SOCK_DGRAM)[0]\n"
        "socket.socket(kind, socket.SOCK_DGRAM).sendto(sys.argv[2].encode(), to)",
        address,
        words,
        user=user,
    )


def test_users_of_hosts_do_not_reach_the_ports_of_capsules(
    net: Net, serve: Serve, ear: Listen
) -> None:
    zero, one, _, _ = settled(net)
    serve(zero, "10.99.7.1", "zero")
    listening = ear(zero)
    for host in ("h0", "h1"):  # over the bridge, and over the VXLAN
        with net.on(host):
            assert tcp_as_user("10.99.7.1") == "No route to host"
            udp_as_user("10.99.7.1", "from a user")
    with net.on("h0"), socket.create_connection(("10.99.7.1", 5000), 5) as line:
        line.sendall(b"root")
        assert line.recv(100) == f"zero {OVERLAY.gateway} root".encode()
    assert answer_from(one, "10.99.7.1") == "zero 10.99.7.2 hello"
    say(one, b"from a peer", "10.99.7.1")
    assert b"from a user" not in b"".join(listening.until(b"from a peer"))


def test_only_the_user_whose_job_it_is_reaches_a_capsule(
    net: Net, serve: Serve, ear: Listen
) -> None:
    """On its host, by TCP and UDP, also after somebody has flushed the host's rules."""
    owner, another = 4321, 4322
    net.raised("h0", overlay=OTHER)
    net.raised("h0", "h1")
    zero, one = net.plug("h0", 0, owner=owner), net.plug("h1", 1, owner=owner)
    theirs = net.plug("h0", 0, overlay=OTHER, owner=another)
    for index, host in enumerate(("h0", "h1")):
        net.located(index, host, ("h0", "h1"))
    serve(zero, "10.99.7.1", "zero")
    serve(theirs, "10.99.8.1", "theirs")
    for flushed in (False, True):
        listening = ear(zero)
        with net.on("h0"):
            if flushed:
                subprocess.run(["nft", "flush", "ruleset"], check=True)
                raise_overlay(OVERLAY, UNDERLAY["h0"])
                raise_overlay(OTHER, UNDERLAY["h0"])
            assert tcp_as_user("10.99.7.1", owner) == "Success"
            assert tcp_as_user("10.99.7.1", another) == "No route to host"
            assert tcp_as_user("10.99.7.2", owner) == "No route to host", "it is on h1"
            assert tcp_as_user("10.99.8.1", owner) == "No route to host"
            assert tcp_as_user("10.99.8.1", another) == "Success"
            udp_as_user("10.99.7.1", "from another", another)
            udp_as_user("10.99.7.1", "from the owner", owner)
        frames = b"".join(listening.until(b"from the owner"))
        assert b"from another" not in frames
        say(one, b"from a peer", "10.99.7.1")
        listening.until(b"from a peer")
    net.unplug("h0", 0)
    with net.on("h0"):
        assert tcp_as_user("10.99.7.1", owner) == "No route to host", "it has left"


@pytest.mark.parametrize("device", ["lsb7", "lsv7.0", "lsx7"])
def test_users_of_a_host_do_not_reach_a_capsule_by_ipv6(net: Net, device: str) -> None:
    """Whoever serves on ``::`` there is reached by IPv4, and by itself on ::1."""
    zero, one, *_ = settled(net)
    with inside(zero), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as service:
        service.settimeout(5)
        service.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        service.bind(("::", 6000))
        until(lambda: "tentative" not in ip("-6", "addr", "show", "dev", "eth0"), 5.0)
        with net.on("h0"):  # an address that there is comes into use after 1 to 2 s
            until(lambda: "tentative" not in ip("-6", "addr", "show", "dev", device), 5.0)
            udp_as_user(f"ff02::1%{device}", "from a user")
        say(one, b"from a peer", "10.99.7.1")
        assert service.recvfrom(100)[0] == b"from a peer"
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as line:
            line.sendto(b"from itself", ("::1", 6000))
        assert service.recvfrom(100)[0] == b"from itself"


@pytest.mark.parametrize("host", ["h0", "h1"], ids=["beside the capsule", "elsewhere"])
def test_services_of_users_answer_capsules(net: Net, host: str) -> None:
    zero, *_ = settled(net)
    address = UNDERLAY[host]
    with user_serves(net, host, address), inside(zero):
        with socket.create_connection((address, 5000), 5) as line:
            line.sendall(b"by TCP")
            assert line.recv(100) == b"by TCP"
        with socket.socket(type=socket.SOCK_DGRAM) as line:
            line.settimeout(5)
            line.sendto(b"by UDP", (address, 5000))
            assert line.recv(100) == b"by UDP"


def test_a_service_goes_on_whose_connection_the_host_has_forgotten(net: Net) -> None:
    """The fence may be laid, or the table of connections flushed, in the middle of one."""
    zero, *_ = settled(net)
    address = UNDERLAY["h0"]
    with net.on("h0"):
        server = subprocess.Popen(
            [
                "/usr/bin/python3",
                "-Sc",
                "import socket, sys\n"
                f"server = socket.create_server(({address!r}, 5000)); print('up', flush=True)\n"
                "line, _ = server.accept()\n"
                "for told in sys.stdin: line.sendall(told.encode())\n",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd="/",
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
        )
    with server:
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stdout.readline() == "up\n"
        with inside(zero), socket.create_connection((address, 5000), 5) as line:
            line.settimeout(5)
            server.stdin.write("before\n")
            assert line.recv(100) == b"before\n"
            with net.on("h0"):  # all that was known of connections goes with the rules
                subprocess.run(["nft", "flush", "ruleset"], check=True)
                raise_overlay(OVERLAY, UNDERLAY["h0"])
            server.stdin.write("after\n")
            assert line.recv(100) == b"after\n"
            server.stdin.close()


def test_nothing_is_forwarded_to_a_capsule_that_it_did_not_ask_for(net: Net, serve: Serve) -> None:
    """Neither from machines that take a host for their router, nor from its containers."""
    zero, *_ = settled(net)
    serve(zero, "10.99.7.1", "zero")
    serve(net.name("world"), UNDERLAY["world"], "world")
    with net.on("world"):
        ip("route", "add", OVERLAY.subnet, "via", UNDERLAY["h0"])
        with socket.socket() as line:
            line.settimeout(5)
            assert os.strerror(line.connect_ex(("10.99.7.1", 5000))) == "No route to host"
    assert answer_from(zero, UNDERLAY["world"]) == f"world {UNDERLAY['h0']} hello"
