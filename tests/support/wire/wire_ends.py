# SPDX-License-Identifier: Apache-2.0
"""Both ends of the wire for tests: keys, receivers, senders, and traffic that can be checked."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from free_ports import free_port

from liveshift.runtime.control import keys
from liveshift.runtime.wire import Receiver, Sender, lane, seal
from liveshift.runtime.wire.header import HEADER, PageHeader, read_answer, read_page_header
from liveshift.runtime.wire.page_lane import ANSWER

CHUNKS = 300
LIMIT = 1 << 30
PATIENCE_S = 10.0


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
    monkeypatch.setitem(globals(), "PATIENCE_S", 1.0)


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


def receiver(key_directory: Path, *, clear: bool = False) -> tuple[Receiver, str]:
    data, pages = (f"127.0.0.1:{free_port()}" for _ in range(2))
    made = Receiver(data, pages, key_directory, "h1", ["127.0.0.1"], clear=clear)
    made.start()
    _receivers.append(made)
    return made, f"tcp://{made.address}"


def arriving(key_directory: Path, limit: int = LIMIT) -> tuple[Receiver, str, Inbox]:
    """A receiver that expects m1 from h0 with so many bytes, its endpoint, and that inbox."""
    made, endpoint = receiver(key_directory)
    inbox = Inbox()
    made.expect("m1", "h0", inbox, limit)
    return made, endpoint, inbox


def sender_to(
    migration: str,
    endpoint: str,
    key_directory: Path,
    host: str = "h0",
    destination: str = "h1",
    patience: float | None = None,
) -> Sender:
    patience = PATIENCE_S if patience is None else patience
    return Sender(migration, endpoint, key_directory, host, destination, patience)


class Source:
    """Says to the port for pages what no source would, under a key that the destination took."""

    def __init__(self, here: Receiver, key_directory: Path, migration: str = "m1") -> None:
        self.key = seal.make_key()
        self.answers: list[int] = []
        """The numbers that those were sealed under."""
        self.sender = sender_to(migration, f"tcp://{here.address}", key_directory)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(f"tcp://{here.pages.address}")
        self.sender.seal(self.key)
        self.renew()

    def renew(self) -> None:
        """Begin with the key that there is now."""
        self.sealer = seal.Sealer(self.key, "pages")
        self.opener = seal.Opener(self.key, "answers")

    def chunk(self, header: PageHeader, data: bytes) -> list[bytes]:
        """As it is sealed for the lane and the number that the header says."""
        raw = msgspec.msgpack.encode(header)
        into = memoryview(bytearray(len(data) + seal.TAG))
        return [raw, bytes(self.sealer.seal(header.lane, header.number, raw, data, into))]

    def say(self, frames: list[bytes], wait_s: float = 10.0) -> tuple[str, object] | None:
        """Send them; the answer, None where none has come."""
        self._socket.send_multipart(frames)
        if not self._socket.poll(round(wait_s * 1000)):
            return None
        raw = memoryview(self._socket.recv())
        lane = read_page_header(frames[0]).lane
        (number,) = ANSWER.unpack_from(raw)
        self.answers.append(number)
        into = memoryview(bytearray(HEADER))
        return read_answer(self.opener.open(lane, number, b"", raw[ANSWER.size :], into))

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()
        self._context.term()
        self.sender.close()


@pytest.fixture
def senders() -> Iterator[Callable[..., Sender]]:
    made: list[Sender] = []

    def make(*args: object, **named: object) -> Sender:
        made.append(sender_to(*args, **named))  # type: ignore[arg-type]
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
