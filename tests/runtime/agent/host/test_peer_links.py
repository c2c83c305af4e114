# SPDX-License-Identifier: Apache-2.0
"""Whether a capsule's peers are cut off from it: a real overlay of real kernels, and stand-ins for
what a lossy link shows."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from descriptors import no_descriptor_left
from frames import settled
from three_hosts import OVERLAY, Net, asked, connected, ip

from liveshift.criu_glue.network.echoes import Echoes
from liveshift.runtime.agent.host import peer_links
from liveshift.runtime.agent.host.peer_links import MOST_PEERS, PeerLinks

HEARTBEAT_S = 0.1
PEER = "10.99.7.2"


@pytest.fixture
def links() -> Iterator[PeerLinks]:
    made = PeerLinks()
    yield made
    made.end()


@pytest.mark.root
def test_a_peer_that_is_cut_off_is_noticed_until_it_is_back(
    net: Net, serve: Callable[..., None], links: PeerLinks
) -> None:
    zero, one, *_ = settled(net)
    serve(one, PEER, "one")
    init = net.pid_in(zero)

    def heartbeat() -> dict[str, float]:
        time.sleep(HEARTBEAT_S)
        return links.heartbeat(init, OVERLAY.subnet, locked=False)

    with connected(zero, PEER) as line:
        line.settimeout(100)  # after a cut the kernel waits twice as long before it sends again
        assert "one" in asked(line)
        assert not any(heartbeat() for _ in range(3))
        with net.on("h1"):
            ip("link", "set", "cable", "down")
        cut = time.monotonic()
        line.sendall(b"hello")
        while not (found := heartbeat()):
            assert time.monotonic() - cut < 20
        noticed = time.monotonic() - cut
        assert found.keys() == {PEER}
        assert 0.1 < found[PEER] <= noticed
        assert links.heartbeat(init, OVERLAY.subnet, locked=True) == {}, "its own network is locked"
        while not (later := heartbeat()):
            assert time.monotonic() - cut < 20
        assert later[PEER] > found[PEER]
        with net.on("h1"):
            ip("link", "set", "cable", "up")
        assert "one" in line.recv(100).decode()
        assert heartbeat() == {}


@pytest.mark.root
def test_a_peer_that_reads_nothing_is_not_cut_off(
    net: Net, serve: Callable[..., None], links: PeerLinks
) -> None:
    zero, one, *_ = settled(net)
    serve(one, PEER, "one")
    init = net.pid_in(zero)
    with connected(zero, PEER) as line:
        line.setblocking(False)
        sent = 0
        with contextlib.suppress(BlockingIOError):  # nobody reads the answers of the server
            while True:
                sent += line.send(bytes(1 << 16))
        for _ in range(8):
            time.sleep(HEARTBEAT_S)
            assert links.heartbeat(init, OVERLAY.subnet, locked=False) == {}
    assert sent > 1 << 16


class Scene:
    """``waiting`` is what the connections show, and ``answers`` who answers the next echo. The
    clock is a stand-in; a heartbeat comes each second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting: dict[str, float] = {}
        self.answers: set[str] = set()
        self.missed, self.looks, self.now = 0, 0, 100.0
        self.asked: list[set[str]] = []
        self.open = 0
        self.fails: Exception | None = None
        monkeypatch.setattr(peer_links, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(peer_links, "missed_answers", lambda _pid: self.missed)
        monkeypatch.setattr(peer_links, "unanswered", self._look)
        monkeypatch.setattr(peer_links, "Echoes", self._echoes)
        self.links = PeerLinks()

    def _look(self, _pid: int, _subnet: str) -> dict[str, float]:
        self.looks += 1
        if self.fails is not None:
            raise self.fails
        return self.waiting

    def _echoes(self, _pid: int) -> SimpleNamespace:
        self.open += 1

        def close() -> None:
            self.open -= 1

        return SimpleNamespace(
            send=lambda whom: self.asked.append(set(whom)),
            answered=lambda: self.answers,
            close=close,
        )

    def heartbeat(
        self, waiting: dict[str, float] | None = None, *, locked: bool = False
    ) -> dict[str, float]:
        if waiting is not None:
            self.missed += 1
            self.waiting = waiting
        self.now += 1.0
        return self.links.heartbeat(os.getpid(), OVERLAY.subnet, locked=locked)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_two_echoes_must_be_unanswered_before_a_peer_counts_as_cut_off(scene: Scene) -> None:
    assert scene.heartbeat({PEER: 0.5}) == {}
    assert scene.heartbeat({PEER: 1.5}) == {}
    assert scene.heartbeat({PEER: 2.5}) == {PEER: 2.5}
    assert scene.asked == [{PEER}] * 3


def test_a_peer_that_answers_an_echo_begins_anew(scene: Scene) -> None:
    """Packets were lost, but the link is there."""
    for seconds in (0.5, 1.5):
        scene.heartbeat({PEER: seconds})
    scene.answers = {PEER}
    assert scene.heartbeat({PEER: 2.5}) == {}
    scene.answers = set()
    assert scene.heartbeat({PEER: 3.5}) == {}
    assert scene.heartbeat({PEER: 4.5}) == {PEER: 4.5}, "cut since"


def test_a_full_window_is_silent_since_it_was_first_seen(scene: Scene) -> None:
    """The kernel does not say for how long its probes have had no answer."""
    scene.heartbeat({PEER: 0.0})
    scene.heartbeat()
    assert scene.heartbeat() == {PEER: 2.0}
    assert scene.heartbeat() == {PEER: 3.0}


def test_nobody_looks_at_connections_that_are_answered_in_time(scene: Scene) -> None:
    scene.heartbeat()
    for _ in range(10):
        assert scene.heartbeat() == {}
    assert scene.looks == 1, "the first time, as nothing was known"
    scene.heartbeat({PEER: 0.5})
    scene.waiting = {PEER: 1.5}
    scene.heartbeat()  # the kernel waits longer each time before it sends again
    assert scene.heartbeat() == {PEER: 2.0}
    assert scene.looks == 4


def test_what_began_while_the_own_network_was_locked_is_found_after_it(scene: Scene) -> None:
    scene.heartbeat()
    scene.missed += 1
    assert scene.heartbeat(locked=True) == {}
    scene.waiting = {PEER: 1.0}
    scene.heartbeat()
    assert scene.asked == [{PEER}]


def test_of_many_silent_peers_those_are_told_that_are_silent_for_longest(scene: Scene) -> None:
    """The same ones each time, though the kernel's own numbers leap."""
    first = {f"10.99.7.{number}": 1.0 for number in range(150, 150 + MOST_PEERS)}
    scene.heartbeat(first)
    many = {f"10.99.7.{number}": 300.0 - number for number in range(2, 200)}
    for _ in range(2):
        scene.heartbeat(many)
    assert scene.heartbeat(many).keys() == first.keys()


@pytest.mark.parametrize("error", [ProcessLookupError(), ValueError("what is that?")])
def test_whatever_fails_the_heartbeat_goes_on(scene: Scene, error: Exception) -> None:
    scene.fails = error
    assert scene.heartbeat({PEER: 0.5}) == {}
    scene.fails = None
    for _ in range(2):
        scene.heartbeat()
    assert scene.heartbeat() == {PEER: 2.0}


def test_nothing_stays_open_in_the_namespace(scene: Scene) -> None:
    scene.heartbeat({PEER: 0.5})
    assert scene.open == 1
    scene.heartbeat({})
    assert scene.open == 0, "the peer answers"
    scene.heartbeat({PEER: 0.5})
    scene.heartbeat(locked=True)
    assert scene.open == 0, "it is about to be dumped"
    scene.heartbeat({PEER: 0.5})
    scene.links.end()
    assert scene.open == 0
    assert scene.heartbeat({PEER: 0.5}) == {}
    assert scene.open == 0, "a heartbeat that comes late opens nothing"


@pytest.mark.root
def test_real_echoes_leave_nothing_open(net: Net) -> None:
    zero, *_ = settled(net)
    init = net.pid_in(zero)
    with no_descriptor_left():
        echoes = Echoes(init)
        echoes.send([PEER, "10.99.7.3", "203.0.113.9"])
        until = time.monotonic() + 10
        found: set[str] = set()
        while not found and time.monotonic() < until:
            found |= echoes.answered()
        assert found <= {PEER, "10.99.7.3"}
        assert found
        echoes.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            echoes.answered()
