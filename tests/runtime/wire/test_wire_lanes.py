# SPDX-License-Identifier: Apache-2.0
"""Pages over several lanes at once: each slot sent once it is due, given back once, and no bytes
taken that were not announced; also where the way is bad."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zstandard
from wire_ends import Source, arriving, impatient, key_directory, quick
from wire_mishaps import FATES, Fate, MiddleMan, Proxy, unanswered
from wire_pages import STREAMS, Slots, expecting, lanes_to, send_all, wire_bytes

from liveshift.errors import StepFailed
from liveshift.runtime.config.cluster import Compress
from liveshift.runtime.wire import CHUNK, Lanes, lane, page_port
from liveshift.runtime.wire.compression import Compressor
from liveshift.runtime.wire.header import RATE_LIMIT, PageHeader
from liveshift.runtime.wire.page_lane import LANE_WINDOW

__all__ = ["impatient", "key_directory", "lanes_to", "quick", "unanswered"]


# ---- the plain way -----------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [1, 4, 8])
def test_pages_arrive_over_all_lanes(
    key_directory: Path, lanes_to: Callable[..., Lanes], streams: int
) -> None:
    here, store, pages = expecting(key_directory, streams)
    lanes = lanes_to(here, streams)
    lanes.measure()  # they connect one after the other
    slots = Slots(store, 400)
    slots.send(lanes)
    lanes.finish()
    assert slots.all_over()
    size = sum(map(len, slots.data))
    assert lanes.bytes == here.received("m1") == size
    assert pages.not_ended() == [f"memory:{k}" for k in range(1, streams + 1)]
    ended = lanes.end()
    assert not pages.not_ended()
    assert ended == pages.streams()
    assert sum(n for n, _ in ended.values()) == size


def test_pages_go_in_clear_between_hosts_that_both_trust_the_network(
    key_directory: Path, lanes_to: Callable[..., Lanes]
) -> None:
    here, store, pages = expecting(key_directory, clear=True)
    lanes = lanes_to(here, clear=True)
    slots = Slots(store, 100)
    slots.send(lanes)
    ended = lanes.end()
    assert slots.all_over()
    assert ended == pages.streams()


def test_pages_in_clear_are_refused_by_a_host_that_wants_them_sealed(
    key_directory: Path, lanes_to: Callable[..., Lanes]
) -> None:
    here, store, _ = expecting(key_directory)
    lanes = lanes_to(here, clear=True)
    with pytest.raises(StepFailed, match=r"sends memory in clear.*make both files equal"):
        send_all(Slots(store, 100), lanes)
    assert not store.chunks


def test_a_lane_that_was_not_used_has_no_stream(
    key_directory: Path, lanes_to: Callable[..., Lanes]
) -> None:
    here, store, pages = expecting(key_directory)
    lanes = lanes_to(here)
    assert lanes.end() == {} == pages.streams()
    Slots(store, 1).send(lanes)
    assert len(lanes.end()) == 1


def test_several_threads_send_at_once(key_directory: Path, lanes_to: Callable[..., Lanes]) -> None:
    here, store, _ = expecting(key_directory)
    lanes = lanes_to(here)
    slots = Slots(store, 800)
    threads = [
        threading.Thread(target=slots.send, args=(lanes, range(k, 800, 4))) for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    lanes.finish()
    assert slots.all_over()


def test_two_threads_seal_at_the_same_time(
    key_directory: Path, lanes_to: Callable[..., Lanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits in the middle of its first chunk until the other one is there, too."""
    here, store, _ = expecting(key_directory)
    lanes = lanes_to(here)
    lanes.measure()
    both, squeeze = threading.Barrier(2), Compressor.squeeze
    first = threading.local()

    def waiting(self: Compressor, data: memoryview, rate: float) -> Any:
        if not hasattr(first, "over"):
            first.over = both.wait(20)
        return squeeze(self, data, rate)

    monkeypatch.setattr(Compressor, "squeeze", waiting)
    slots = Slots(store, 100)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda k: slots.send(lanes, range(k, 100, 2)), range(2)))
    lanes.finish()
    assert slots.all_over()


def test_two_lanes_are_stored_at_the_same_time(
    key_directory: Path, lanes_to: Callable[..., Lanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread of the destination waits in the store for another, with a chunk of its own."""
    monkeypatch.setattr(page_port, "threads", lambda most: 2)
    here, store, _ = expecting(key_directory)
    lanes = lanes_to(here)
    lanes.measure()
    store.both = threading.Barrier(2)
    slots = Slots(store, 100)
    slots.send(lanes, range(2))
    lanes.finish()
    assert len(store.threads) == 2
    store.both = None
    slots.send(lanes, range(2, 100))
    lanes.finish()
    assert slots.all_over()
    assert len(store.threads) == 2


def test_finish_is_a_barrier_and_credit_is_kept(
    key_directory: Path, lanes_to: Callable[..., Lanes], quick: None
) -> None:
    here, store, _ = expecting(key_directory)
    lanes = lanes_to(here)
    lanes.measure()
    store.open.clear()
    slots = Slots(store, 2 * STREAMS * LANE_WINDOW, largest=500)
    over = threading.Event()

    def send() -> None:
        slots.send(lanes)
        lanes.finish()
        over.set()

    thread = threading.Thread(target=send)
    thread.start()
    assert not over.wait(0.8)  # several SEND_AGAIN_S: what is on its way is sent again meanwhile
    assert lanes.bytes <= sum(map(len, slots.data[: STREAMS * LANE_WINDOW]))
    assert sum(slots.released) <= STREAMS * LANE_WINDOW
    assert max(slots.released) == 1
    store.open.set()
    thread.join(20)
    assert over.is_set()
    assert slots.all_over()
    assert store.writes == len(slots.data)  # what came twice was written once


def test_the_largest_chunk_is_taken(key_directory: Path, lanes_to: Callable[..., Lanes]) -> None:
    here, store, _ = expecting(key_directory)
    lanes = lanes_to(here)
    data = struct.pack("<Q", 0) + os.urandom(CHUNK - 8)
    lanes.pages(memoryview(data), lambda: None)
    lanes.finish()
    assert store.chunks == {0: data}


# ---- when the way between them is bad ----------------------------------------------------------


def test_lanes_whose_connections_break_come_back(
    key_directory: Path, lanes_to: Callable[..., Lanes], quick: None
) -> None:
    here, store, pages = expecting(key_directory)
    proxy = Proxy(int(here.pages.address.rpartition(":")[2]))
    lanes = lanes_to(here, pages=proxy.endpoint)
    slots = Slots(store, 600, largest=60_000)
    for part in range(6):
        slots.send(lanes, range(100 * part, 100 * part + 100))
        proxy.cut(1 if part % 2 else None)
    lanes.finish()
    assert proxy.connections > STREAMS
    assert slots.all_over()
    assert store.writes == len(slots.data)
    assert lanes.end() == pages.streams()
    proxy.close()


@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("compress", [Compress.NEVER, Compress.ALWAYS])
def test_a_bad_way_is_mended_on_every_lane(
    key_directory: Path,
    lanes_to: Callable[..., Lanes],
    quick: None,
    unanswered: list[lane.Lane],
    fate: Fate,
    compress: Compress,
) -> None:
    here, store, pages = expecting(key_directory)
    middle = MiddleMan(key_directory, f"tcp://{here.pages.address}", fate, curve=False)
    began = time.monotonic()
    lanes = lanes_to(here, pages=middle.endpoint, compress=compress)
    slots = Slots(store, 600)
    slots.data = [data[:8] + data[8:] * 3 for data in slots.data]  # for the compressor
    slots.send(lanes)
    lanes.finish()
    assert slots.all_over()
    assert store.writes == len(slots.data)
    assert lanes.end() == pages.streams()
    assert (wire_bytes(lanes) < lanes.bytes) == (compress is Compress.ALWAYS)
    middle.close()
    assert middle.mishaps
    again = middle.mishaps + len(unanswered)
    assert middle.seen < len(slots.data) + (again + 8) * LANE_WINDOW
    assert len(unanswered) * lane.SEND_AGAIN_S <= STREAMS * (time.monotonic() - began)


def test_a_destination_that_has_gone_is_given_up(
    key_directory: Path, lanes_to: Callable[..., Lanes], impatient: None
) -> None:
    here, store, _ = expecting(key_directory)
    proxy = Proxy(int(here.pages.address.rpartition(":")[2]))
    lanes = lanes_to(here, pages=proxy.endpoint)
    slots = Slots(store, 100)
    slots.send(lanes, range(10))
    lanes.finish()
    proxy.close()
    slots.send(lanes, range(10, 20))
    with pytest.raises(StepFailed, match="h1 has taken no image bytes for 1 s"):
        lanes.finish()
    with pytest.raises(StepFailed, match="h1 has taken no image bytes for 1 s"):
        slots.send(lanes, range(20, 21))
    lanes.close()
    assert slots.released == [1] * 21 + [0] * 79


def test_what_is_not_acknowledged_in_time_fails(
    key_directory: Path, lanes_to: Callable[..., Lanes]
) -> None:
    here, store, _ = expecting(key_directory)
    store.open.clear()
    lanes = lanes_to(here)
    lanes.until = 0.0
    Slots(store, 1).send(lanes)
    with pytest.raises(StepFailed, match=r"h1 has not acknowledged the last \d+ chunks in time"):
        lanes.finish()
    store.open.set()


def test_closing_gives_every_slot_back_once(
    key_directory: Path, lanes_to: Callable[..., Lanes]
) -> None:
    here, store, _ = expecting(key_directory)
    lanes = lanes_to(here)
    lanes.measure()
    store.open.clear()
    slots = Slots(store, 2 * STREAMS * LANE_WINDOW)
    stuck: list[BaseException] = []

    def send() -> None:
        try:
            slots.send(lanes)
        except StepFailed as error:
            stuck.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()  # no credit is left
    lanes.close()
    thread.join(10)
    assert "the lanes to h1 are closed" in str(stuck[0])
    taken = STREAMS * LANE_WINDOW
    assert slots.released == [1] * (taken + 1) + [0] * (len(slots.data) - taken - 1)
    store.open.set()
    with pytest.raises(StepFailed, match="the lanes to h1 are closed"):
        lanes.finish()


def test_lanes_that_break_give_every_slot_back_once(
    key_directory: Path, lanes_to: Callable[..., Lanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, store, _ = expecting(key_directory)
    lanes = lanes_to(here)
    lanes.measure()

    def broken(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Compressor, "squeeze", broken)
    slots = Slots(store, 1)
    with pytest.raises(StepFailed, match="the lanes to h1 broke: MemoryError"):
        send_all(slots, lanes)
    lanes.close()
    assert slots.released == [1]


# ---- what is not taken -------------------------------------------------------------------------


def test_a_refusal_ends_every_lane(key_directory: Path, lanes_to: Callable[..., Lanes]) -> None:
    here, store, _ = expecting(key_directory)
    lanes = lanes_to(here)
    slots = Slots(store, 40)
    slots.send(lanes, range(20))
    lanes.finish()
    store.fails = OSError(28, "No space left on device")
    with pytest.raises(StepFailed, match=r"ship: h1 refused the image: .*No space left on device"):
        send_all(slots, lanes, range(20, 40))
    store.fails = None
    lanes.close()
    assert sum(slots.released) <= 40
    assert max(slots.released) == 1
    slots = Slots(store, 1)  # and so it stays, whoever tries
    with pytest.raises(StepFailed, match=r"h1 refused the image: .*No space left on device"):
        send_all(slots, lanes_to(here))
    assert not store.chunks.keys() - set(range(20))


def test_no_lane_is_taken_that_was_not_announced(
    key_directory: Path, lanes_to: Callable[..., Lanes]
) -> None:
    here, _, inbox = arriving(key_directory)
    with pytest.raises(StepFailed, match="no pages of memory were announced"):
        lanes_to(here).measure()
    assert not inbox.streams
    here, store, _ = expecting(key_directory, lanes=2)
    with pytest.raises(StepFailed, match=r"lane 3 of m1 was not announced"):
        lanes_to(here).measure()
    assert not store.chunks


def test_pages_come_again_and_again_whatever_was_announced_for_the_ordered_lane(
    key_directory: Path, lanes_to: Callable[..., Lanes]
) -> None:
    here, store, _ = expecting(key_directory, limit=20_000)
    slots = Slots(store, 12)
    send_all(slots, lanes_to(here))
    assert here.received("m1") == sum(map(len, slots.data)) > 20_000
    assert len(store.chunks) == 12


BOMB = zstandard.ZstdCompressor().compress(bytes(CHUNK * 512))
SMALL = zstandard.ZstdCompressor().compress(bytes(1000))
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
LYING = SMALL[:5] + (500 - 256).to_bytes(2, "little") + SMALL[7:]

assert zstandard.frame_content_size(LYING) == 500


@pytest.mark.parametrize(
    ("data", "raw", "words"),
    [
        (BOMB, CHUNK, "holds 536870912, not 1048576"),
        (SMALL, 999, "holds 1000, not 999"),
        (SMALL, 1001, "holds 1000, not 1001"),
        (UNSIZED, 1000, "holds -1, not 1000"),
        (LYING, 500, "cannot be decompressed"),
        (SMALL + b"more", 1000, "cannot be decompressed"),
        (SMALL[:-1], 1000, "cannot be decompressed"),
        (b"no frame", 1000, "cannot be decompressed"),
        (b"", 1000, "cannot be decompressed"),
    ],
)
def test_what_no_source_sends_is_refused(
    key_directory: Path, data: bytes, raw: int, words: str
) -> None:
    here, store, _ = expecting(key_directory)
    with Source(here, key_directory) as source:
        said = source.say(source.chunk(PageHeader("m1", 1, 0, "memory", raw), data))
    assert said is not None
    kind, text = said
    assert kind == "refused"
    assert words in str(text)
    assert not store.chunks
    assert here.received("m1") == 0


def test_bytes_to_measure_with_are_written_nowhere_and_have_an_end(key_directory: Path) -> None:
    here, store, pages = expecting(key_directory)
    block = bytes(CHUNK)
    with Source(here, key_directory) as source:
        answers = [
            source.say(source.chunk(PageHeader("m1", 3, n, "rate", 0), block))
            for n in range(RATE_LIMIT // CHUNK + 1)
        ]
    refused = [n for n, answer in enumerate(answers) if answer is None or answer[0] == "refused"]
    assert refused == [RATE_LIMIT // CHUNK]
    assert not store.chunks
    assert not pages.streams()
    assert here.received("m1") == 0
