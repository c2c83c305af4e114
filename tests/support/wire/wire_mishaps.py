# SPDX-License-Identifier: Apache-2.0
"""What may stand between the two ends of a wire: a TCP proxy that breaks connections, and a middle
man who holds both keys and so can lose, repeat, swap and damage chunks."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from liveshift.runtime.control import keys
from liveshift.runtime.wire import lane


class Proxy:
    """Forwards TCP connections to the receiver."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.passed = 0
        self.connections = 0
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                near.close()
                return
            self.connections += 1
            self._pairs.append((near, far))
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(a, b), daemon=True).start()

    def _pump(self, a: socket.socket, b: socket.socket) -> None:
        try:
            while data := a.recv(65536):
                b.sendall(data)
                self.passed += len(data)
        except OSError:
            pass

    def cut(self, count: int | None = None) -> None:
        """Break the connections there are, or as many of them."""
        pairs, self._pairs = self._pairs[:count], self._pairs[len(self._pairs[:count]) :]
        for pair in pairs:
            for one in pair:
                one.shutdown(socket.SHUT_RDWR)
                one.close()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._accepting.join()  # it may just have accepted one that is to be closed, too
        self._server.close()
        self.cut()


Fate = Callable[[int, random.Random], str]
"""What becomes of the n-th chunk that passes; of an answer where n is -1."""


class MiddleMan(threading.Thread):
    """Speaks CURVE, or without ``curve`` nothing of it, to both sides, for any number of
    connections."""

    def __init__(self, key_directory: Path, target: str, fate: Fate, curve: bool = True) -> None:
        super().__init__(daemon=True)
        self._curve = curve
        self._fate = fate
        self._target = target
        self.seen = self.mishaps = 0
        self._over = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._theirs, self._ours = (keys.load_private(key_directory, h) for h in ("h1", "h0"))
        self._front = self._context.socket(zmq.ROUTER)
        if curve:
            self._front.curve_server = True
            self._front.curve_secretkey = self._theirs.secret
            self._front.curve_publickey = self._theirs.public
        self.endpoint = f"tcp://127.0.0.1:{self._front.bind_to_random_port('tcp://127.0.0.1')}"
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._kept: dict[bytes, list[bytes]] = {}
        self._rng = random.Random(7)
        self.start()

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._over.is_set():
            ready = dict(poller.poll(20))
            for who, back in list(self._backs.items()):
                if back in ready:
                    self._answer(who, back.recv())
            while self._front.poll(0):
                who, header, data = self._front.recv_multipart()
                if who not in self._backs:
                    self._backs[who] = self._connect()
                    poller.register(self._backs[who], zmq.POLLIN)
                self._pass(who, self._backs[who], [header, data])
        for end in (self._front, *self._backs.values()):
            end.close(0)
        self._context.term()

    def _connect(self) -> zmq.Socket[bytes]:
        back = self._context.socket(zmq.DEALER)
        if self._curve:
            back.curve_serverkey = self._theirs.public
            back.curve_secretkey, back.curve_publickey = self._ours.secret, self._ours.public
        back.connect(self._target)
        return back

    def _answer(self, who: bytes, answer: bytes) -> None:
        if self._fate(-1, self._rng) == "pass":
            self._front.send_multipart([who, answer])
        else:
            self.mishaps += 1

    def _pass(self, who: bytes, back: zmq.Socket[bytes], chunk: list[bytes]) -> None:
        header, data = chunk
        fate = self._fate(self.seen, self._rng)
        self.seen += 1
        self.mishaps += fate != "pass"
        if fate == "lose":
            return
        if fate == "swap" and who not in self._kept:
            self._kept[who] = chunk
            return
        if fate == "damage":
            data = bytes([data[0] ^ 4]) + data[1:] if data else b"x"
        for _ in range(2 if fate == "repeat" else 1):
            back.send_multipart([header, data])
        if who in self._kept:
            back.send_multipart(self._kept.pop(who))

    def close(self) -> None:
        self._over.set()
        self.join()


def sometimes(what: str, chance: float = 0.01) -> Fate:
    return lambda n, rng: what if n >= 0 and rng.random() < chance else "pass"


def losing_answers(share: float) -> Fate:
    return lambda n, rng: "lose" if n < 0 and rng.random() < share else "pass"


FATES = [
    pytest.param(sometimes("lose"), id="lost"),
    pytest.param(sometimes("repeat", 0.2), id="repeated"),
    pytest.param(sometimes("swap"), id="swapped"),
    pytest.param(sometimes("damage"), id="damaged"),
    pytest.param(losing_answers(0.3), id="answers lost"),
]
"""For a parameter ``fate``: what a bad way does, one of them at a time."""


@pytest.fixture
def unanswered(monkeypatch: pytest.MonkeyPatch) -> list[lane.Lane]:
    """A list. A lane is added to it each time that it sends a window again because no answer came.
    On a loaded machine that happens without a mishap."""
    found: list[lane.Lane] = []
    check = lane.Lane.check

    def counted(self: lane.Lane, until: float) -> bool:
        if due := check(self, until):
            found.append(self)
        return due

    monkeypatch.setattr(lane.Lane, "check", counted)
    return found
