# SPDX-License-Identifier: Apache-2.0
"""Both ends of the wire for tests: keys, receivers, senders, and traffic that can be checked."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from liveshift.runtime import keys
from liveshift.runtime.wire import Receiver, Sender, lane

CHUNKS = 300
LIMIT = 1 << 30


_receivers: list[Receiver] = []


@pytest.fixture
def key_directory(tmp_path: Path) -> Iterator[Path]:
    """Receivers of these hosts end with it."""
    directory = tmp_path / "keys"
    keys.init(directory, ["h0", "h1", "h2"])
    yield directory
    while _receivers:  # an inbox that still waits does so for 20 s at most
        _receivers.pop().close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "SEND_AGAIN_S", 0.2)


@pytest.fixture
def impatient(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "GIVE_UP_S", 1.0)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Inbox:
    """What has come, by stream; may be told to fail or to wait."""

    def __init__(self) -> None:
        self.streams: dict[str, bytearray] = {}
        self.ended: list[str] = []
        self.writes = 0
        self.fails: OSError | None = None
        self.open = threading.Event()
        self.open.set()
        self.complete = False

    def write(self, stream: str, data: memoryview) -> None:
        self.writes += 1
        self.open.wait(20)
        if self.fails:
            raise self.fails
        self.streams.setdefault(stream, bytearray()).extend(data)
        if not data:
            self.ended.append(stream)


def receiver(key_directory: Path) -> tuple[Receiver, str]:
    made = Receiver(f"127.0.0.1:{free_port()}", key_directory, "h1")
    made.start()
    _receivers.append(made)
    return made, f"tcp://{made.address}"


@pytest.fixture
def senders() -> Iterator[Callable[..., Sender]]:
    made: list[Sender] = []

    def make(*args: object, **named: object) -> Sender:
        made.append(Sender(*args, **named))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for sender in made:
        sender.close()


def traffic(seed: int, count: int = CHUNKS, largest: int = 4096) -> list[tuple[str, bytes]]:
    """Chunks of three interleaved streams, each ended by an empty one."""
    rng = random.Random(seed)
    names = ["image:pages-1.img", "tree:2:tmp", "output"]
    chunks = [(rng.choice(names), rng.randbytes(rng.randint(1, largest))) for _ in range(count)]
    return [*chunks, *((name, b"") for name in names)]


def expected(chunks: list[tuple[str, bytes]]) -> dict[str, bytes]:
    joined: dict[str, bytes] = {}
    for stream, data in chunks:
        joined[stream] = joined.get(stream, b"") + data
    return joined


def send_all(sender: Sender, chunks: list[tuple[str, bytes]]) -> None:
    for stream, data in chunks:
        sender.send(stream, data)
    sender.finish()
