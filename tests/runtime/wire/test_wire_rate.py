# SPDX-License-Identifier: Apache-2.0
"""What goes over lanes compressed, and the rate that they are measured to carry."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import zstandard
from wire_ends import key_directory
from wire_pages import Slots, expecting, lanes_to, wire_bytes

from liveshift.errors import LiveshiftError
from liveshift.runtime.config.cluster import Compress
from liveshift.runtime.wire import CHUNK, Lanes, meter
from liveshift.runtime.wire import lanes as wire_lanes
from liveshift.runtime.wire.compression import restore
from liveshift.runtime.wire.meter import Meter, burst_sizes

__all__ = ["key_directory", "lanes_to"]


def test_compressed_pages_arrive_as_they_were(
    key_directory: Path, lanes_to: Callable[..., Lanes]
) -> None:
    here, store, _ = expecting(key_directory)
    lanes = lanes_to(here, compress=Compress.ALWAYS)
    slots = Slots(store, 100)
    slots.data[::2] = [data[:8] + bytes(100_000) for data in slots.data[::2]]
    slots.send(lanes)
    lanes.finish()
    assert slots.all_over()
    assert wire_bytes(lanes) < lanes.bytes / 4


def test_on_a_slow_link_only_what_waits_for_it_is_compressed(
    key_directory: Path, lanes_to: Callable[..., Lanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Meter, "note", lambda *_: None)
    here, store, pages = expecting(key_directory)
    lanes = lanes_to(here, compress=Compress.AUTO)
    lanes._meter.saw(1 << 20, 1.0)
    slots = Slots(store, 100)
    slots.data = [bytes(len(data)) for data in slots.data]
    for number in range(8):  # as a pace sends them
        slots.send(lanes, [number])
        lanes.finish()
    assert wire_bytes(lanes) == lanes.bytes > 0
    store.open.clear()  # so that chunks wait
    slots.send(lanes, range(8, 64))
    store.open.set()
    slots.send(lanes, range(64, 100))
    lanes.finish()
    assert wire_bytes(lanes) < lanes.bytes / 2
    lanes.until = 1e18  # the job is frozen
    monkeypatch.setattr(meter, "BURST_S", 0.0)
    for slow, compressed in ((float("inf"), True), (0.0, False)):
        monkeypatch.setattr(wire_lanes, "SLOW_LINK", slow)
        lanes.measure()
        lanes._meter.saw(1 << 20, 1.0)
        sent, all_sent = wire_bytes(lanes), lanes.bytes
        slots.send(lanes, [0])
        lanes.finish()
        small = wire_bytes(lanes) - sent < (lanes.bytes - all_sent) / 2
        assert small is compressed
    assert lanes.end() == pages.streams()


def test_nothing_is_compressed_where_that_was_not_wanted(
    key_directory: Path, lanes_to: Callable[..., Lanes]
) -> None:
    here, _, _ = expecting(key_directory)
    lanes = lanes_to(here, compress=Compress.NEVER)
    lanes.pages(memoryview(bytes(100_000)), lambda: None)
    lanes.finish()
    assert wire_bytes(lanes) == lanes.bytes == 100_000


@pytest.mark.parametrize("raw", [0, 1, CHUNK, CHUNK + 1])
def test_a_chunk_that_compression_has_made_larger_is_refused(raw: int) -> None:
    small = zstandard.ZstdCompressor().compress(b"x" * raw)
    if len(small) < raw <= CHUNK:
        assert restore(memoryview(small), raw) == b"x" * raw
    else:
        with pytest.raises(LiveshiftError, match="decompressed"):
            restore(memoryview(small), raw)


@pytest.mark.parametrize(
    ("rate", "first", "bursts", "largest"),
    [
        (1e9, 1.0, 8, 16 << 20),
        (1e9, 0.0, 8, 16 << 20),
        (1e12, 0.0, 10, 64 << 20),
        (1e6, 0.0, 2, 256 << 10),
    ],
)
def test_bursts_grow_as_long_as_there_is_time(
    rate: float, first: float, bursts: int, largest: int
) -> None:
    sizes = burst_sizes(4)
    chunks, seen = next(sizes), [0]
    with suppress(StopIteration):
        for n in range(100):
            assert max(chunks) <= CHUNK
            seen.append(sum(chunks))
            chunks = sizes.send(seen[-1] / rate + (0 if n else first))
    assert len(seen) - 1 == bursts
    assert seen[-1] == max(seen) == largest


def test_the_rate_is_measured_on_the_lanes(
    key_directory: Path, lanes_to: Callable[..., Lanes]
) -> None:
    here, store, _ = expecting(key_directory)
    lanes = lanes_to(here)
    assert lanes.rate == 0.0
    assert lanes.measure() > 1e6
    assert lanes.bytes == 0
    assert not store.chunks
    assert lanes.end() == {}
