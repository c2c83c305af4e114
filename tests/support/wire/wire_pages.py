# SPDX-License-Identifier: Apache-2.0
"""Both ends of lanes for pages: chunks to send, lanes for them, and a store that keeps them."""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from waits import until
from wire_ends import LIMIT, Inbox, receiver, sender_to

from liveshift.runtime.wire import Lanes, PageStreams, Receiver, Sender

STREAMS = 4


class Store:
    """Keeps chunks by the number in their first bytes; may be told to wait or to fail."""

    def __init__(self) -> None:
        self.chunks: dict[int, bytes] = {}
        self.writes = 0
        self.threads: set[str] = set()
        """Those that have written."""
        self.both: threading.Barrier | None = None
        """Where two threads wait for each other, before they write."""
        self.open = threading.Event()
        self.open.set()
        self.fails: OSError | None = None
        self._lock = threading.Lock()

    def __call__(self, chunk: memoryview) -> None:
        self.open.wait(20)
        if self.fails is not None:
            raise self.fails
        if self.both is not None:
            self.both.wait(20)
        with self._lock:
            self.threads.add(threading.current_thread().name)
            self.writes += 1
            self.chunks[struct.unpack_from("<Q", chunk)[0]] = bytes(chunk)


class Slots:
    """Chunks to send, and how often each was given back. ``arrived`` says what the store has."""

    def __init__(self, store: Store, count: int, largest: int = 20_000, seed: int = 1) -> None:
        rng = random.Random(seed)
        self.data = [
            struct.pack("<Q", n) + rng.randbytes(rng.randint(1, largest)) for n in range(count)
        ]
        self.released = [0] * count
        self._store = store

    def release(self, n: int) -> Callable[[], None]:
        def released() -> None:
            self.released[n] += 1

        return released

    def send(self, lanes: Lanes, among: Sequence[int] | None = None) -> None:
        for n in among or range(len(self.data)):
            lanes.pages(memoryview(self.data[n]), self.release(n))

    def all_over(self) -> bool:
        return (
            self.released == [1] * len(self.data)
            and [self._store.chunks[n] for n in range(len(self.data))] == self.data
        )


def send_all(slots: Slots, lanes: Lanes, among: Sequence[int] | None = None) -> None:
    slots.send(lanes, among)
    lanes.finish()


def wire_bytes(lanes: Lanes) -> int:
    """Bytes of pages as they went over the wire, once all are acknowledged. Each lane has sent a
    greeting of one byte besides."""
    until(lambda: lanes._greeted == len(lanes._lanes))
    return sum(lane.acknowledged - 1 for lane in lanes._lanes)


@pytest.fixture
def lanes_to(key_directory: Path) -> Iterator[Callable[..., Lanes]]:
    made: list[tuple[Sender, Lanes]] = []

    def make(here: Receiver, streams: int = STREAMS, pages: str = "", **named: object) -> Lanes:
        beside = sender_to("m1", f"tcp://{here.address}", key_directory)
        pages = pages or f"tcp://{here.pages.address}"
        made.append((beside, Lanes(beside, pages, streams, **named)))  # type: ignore[arg-type]
        return made[-1][1]

    yield make
    for beside, lanes in made:
        lanes.close()
        beside.close()


def expecting(
    key_directory: Path, lanes: int = STREAMS, limit: int = LIMIT, *, clear: bool = False
) -> tuple[Receiver, Store, PageStreams]:
    here, _ = receiver(key_directory, clear=clear)
    store = Store()
    pages = PageStreams(store)
    here.expect("m1", "h0", Inbox(), limit, pages, lanes)
    return here, store, pages
