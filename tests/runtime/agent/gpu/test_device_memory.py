# SPDX-License-Identifier: Apache-2.0
"""Device memory from one GPU helper over real lanes into another's inbox: every byte once, whatever
overtakes what, or an error in words and the memory still at its source."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from cuda_process import doubles
from gpu_memory_helper import ARENA, MIB, UA, UB, Helper, drained, fill, helper, helpers
from inbox_scene import Host, host
from wire_ends import LIMIT, Source, impatient, key_directory, quick, receiver
from wire_mishaps import Proxy
from wire_pages import STREAMS, lanes_to

from liveshift.cuda_snapshot.helper.blocks import Block
from liveshift.cuda_snapshot.helper.client import GpuHelper
from liveshift.errors import StepFailed
from liveshift.runtime.agent.gpu import device_memory
from liveshift.runtime.agent.gpu.device_memory import DeviceInlet, Pump
from liveshift.runtime.agent.gpu.device_state import SavedDevices
from liveshift.runtime.wire import CHUNK, Lanes, Receiver, Sender, page_port
from liveshift.runtime.wire.header import PageHeader

__all__ = [
    "doubles",
    "helper",
    "helpers",
    "host",
    "impatient",
    "key_directory",
    "lanes_to",
    "quick",
]

SIZES = {101: 14 * MIB, 102: 4 * MIB}
"""Bytes of each process, on GPU a at the source and on GPU b at the destination."""

Write = Callable[[int, int, memoryview], None]
Change = Callable[[int, int, memoryview], list[tuple[int, int, memoryview]]]
"""What goes over the lanes in place of a chunk."""


class Move:
    """Both ends of a move of two processes' device memory. ``took``: the chunks that have come."""

    def __init__(self, gpu: GpuHelper, host: Host, here: Receiver) -> None:
        self.gpu, self.host, self.here = gpu, host, here
        self.data = {pid: Random(pid).randbytes(size) for pid, size in SIZES.items()}
        saved = []
        for pid, size in SIZES.items():
            start = 0x7F0000000000 + (pid << 24)
            blocks = [
                Block(start, 2 * MIB, UA, ARENA),
                Block(start + size, size - 2 * MIB, UA, ARENA),
            ]
            gpu.create(f"from/{pid}", blocks)
            fill(gpu, f"from/{pid}", self.data[pid])
            saved.append(SavedDevices(pid, blocks))
        self.source: Any = SimpleNamespace(saved=saved, helper=gpu, key=lambda pid: f"from/{pid}")
        there: Any = SimpleNamespace(helper=gpu, key=lambda pid: f"to/{pid}")
        self.inlet = DeviceInlet(there, {UA: UB})
        self.took: list[tuple[int, int]] = []
        inner = self.inlet.write_at

        def write_at(pid: int, at: int, data: memoryview) -> None:
            self.before(pid, at, data)
            inner(pid, at, data)
            self.took.append((pid, at))

        self.before: Write = lambda *_: None
        self.inlet.write_at = write_at  # type: ignore[method-assign]
        host.inbox.devices = self.inlet
        here.expect("m1", "h0", host.inbox, LIMIT, host.inbox.pages, STREAMS)

    def send(self, sender: Sender, lanes: Lanes | None) -> None:
        pump = Pump(self.source, sender, lanes)
        try:
            assert pump.finish() == sum(SIZES.values())
            self.said = pump.describe()
        finally:
            pump.stop()
        sender.finish()

    def assert_here(self) -> None:
        assert {pid: drained(self.gpu, f"to/{pid}") for pid in SIZES} == self.data

    def assert_still_there(self) -> None:
        """The source has all of it, and its two rings."""
        with ThreadPoolExecutor(2) as pool:
            for _ in pool.map(lambda pid: drained(self.gpu, f"from/{pid}"), [*SIZES] * 2):
                pass
        assert {pid: drained(self.gpu, f"from/{pid}") for pid in SIZES} == self.data


@pytest.fixture
def move(
    helper: Helper, host: Host, key_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Move]:
    for module in (page_port, device_memory):  # as on a machine of many cores
        monkeypatch.setattr(module, "threads", lambda most: most)
    here, _ = receiver(key_directory)
    yield Move(helper("4x2097152"), host, here)
    host.inbox.close()


@pytest.fixture
def lanes(move: Move, lanes_to: Callable[..., Lanes]) -> Lanes:
    """All of them are connected."""
    lanes = lanes_to(move.here)
    lanes.measure()
    return lanes


def changed(lanes: Lanes, change: Change) -> None:
    """Let something else go over the lanes."""
    inner = lanes.device

    def device(process: int, at: int, chunk: memoryview) -> None:
        for each in change(process, at, chunk):
            inner(*each)

    lanes.device = device  # type: ignore[method-assign]


# ---- all that arrives --------------------------------------------------------------------------


def test_chunks_that_overtake_each_other_over_all_lanes_give_the_same_bytes(
    move: Move, lanes: Lanes
) -> None:
    dice, overtaken = Random(1), Event()

    def before(pid: int, at: int, _: memoryview) -> None:
        if at == 0:
            assert overtaken.wait(20)
        elif at == 2 * CHUNK:
            overtaken.set()
        time.sleep(dice.random() / 200)

    move.before = before
    sender = lanes._beside
    move.send(sender, lanes)
    move.assert_here()
    each = [(pid, at) for pid, size in SIZES.items() for at in range(0, size, CHUNK)]
    assert sorted(move.took) == each
    assert move.took != each
    assert min(lanes.device_bytes) > 0
    assert sum(lanes.device_bytes) == sum(SIZES.values())
    assert {sender.streams[f"device:{pid}"] for pid in SIZES} == {0}
    assert lanes.bytes == 0  # of host memory
    assert move.said == f"what was not sent yet; all went over {STREAMS} lanes at once"
    sender.send_manifest("gpt/1", 0, {}, {}, lanes.end())
    sender.finish()
    assert move.host.inbox.complete


def test_no_chunk_comes_before_the_memory_is_allocated(
    move: Move, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = move.inlet.end_table

    def end_table() -> None:
        time.sleep(0.3)
        assert not move.took
        inner()

    monkeypatch.setattr(move.inlet, "end_table", end_table)
    move.send(lanes._beside, lanes)
    move.assert_here()


def test_the_next_process_begins_when_the_ring_of_the_last_one_is_free(
    move: Move, lanes: Lanes
) -> None:
    """A host's helper has two rings for all its moves, so a move may use only one of them."""
    used: list[int] = []

    def before(pid: int, at: int, _: memoryview) -> None:
        open_ = [f for f in move.inlet._fillers.values() if f.figures is None]
        used.append(len(open_))

    move.before = before
    move.send(lanes._beside, lanes)
    assert max(used) == 1
    move.assert_here()


def test_without_lanes_the_bytes_go_in_order_on_lane_0(move: Move, lanes: Lanes) -> None:
    sender = lanes._beside
    move.send(sender, None)
    move.assert_here()
    assert {pid: sender.streams[f"device:{pid}"] for pid in SIZES} == SIZES
    assert not move.took
    assert move.said == "what was not sent yet; all went over lane 0"


# ---- what does not arrive, or should not -------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda pid, at, data: [(pid, at, data)] * 2, "bytes of device memory came twice"),
        (lambda pid, at, data: [(pid, at, data[:-1]), (pid, at + 9, data[9:])], "came twice"),
        (lambda pid, at, data: [(pid, at + SIZES[pid], data)], "are outside of 14680064 bytes"),
        (lambda pid, at, data: [(pid, (1 << 63) - 1, data)], "are outside of 14680064 bytes"),
        (lambda pid, at, data: [(pid, at + 8 * MIB, data)], "further ahead than the 6291456 bytes"),
        (lambda pid, at, data: [(pid + 2, at, data)], "process '103' came unannounced"),
    ],
)
def test_a_chunk_that_does_not_belong_there_is_refused(
    move: Move, lanes: Lanes, change: Change, why: str
) -> None:
    changed(lanes, lambda *each: change(*each) if each[1] == 0 else [each])
    with pytest.raises(StepFailed, match=f"h1 refused the image: .*{why}"):
        move.send(lanes._beside, lanes)
    move.assert_still_there()


@pytest.mark.parametrize(("cut", "missing"), [(CHUNK, CHUNK), (1, 1)])
def test_a_chunk_that_is_missing_at_the_end_is_an_error(
    move: Move, lanes: Lanes, cut: int, missing: int
) -> None:
    last = SIZES[102] - CHUNK

    def change(pid: int, at: int, data: memoryview) -> list[tuple[int, int, memoryview]]:
        left = data[: len(data) - cut] if (pid, at) == (102, last) else data
        return [(pid, at, left)] if left else []

    changed(lanes, change)
    why = f"h1 refused the image: {missing} of {4 * MIB} bytes of device memory are missing"
    with pytest.raises(StepFailed, match=why):
        move.send(lanes._beside, lanes)
    move.assert_still_there()


def test_a_lane_that_fails_halfway_ends_the_move_and_the_source_keeps_the_memory(
    move: Move, lanes_to: Callable[..., Lanes], impatient: None
) -> None:
    proxy = Proxy(int(move.here.pages.address.rpartition(":")[2]))
    lanes = lanes_to(move.here, pages=proxy.endpoint)
    lanes.measure()

    def before(pid: int, at: int, _: memoryview) -> None:
        if at == 5 * CHUNK:
            proxy.close()

    move.before = before
    with pytest.raises(StepFailed, match="h1 has taken no image bytes for 1 s"):
        move.send(lanes._beside, lanes)
    assert 0 < len(move.took) < SIZES[101] // CHUNK
    move.assert_still_there()


def test_the_helper_at_the_destination_fails(move: Move, lanes: Lanes) -> None:
    move.before = lambda pid, at, _: move.gpu.drop("to/101") if at == 5 * CHUNK else None
    with pytest.raises(StepFailed, match=r"h1 refused the image: .*was dropped during its copy"):
        move.send(lanes._beside, lanes)
    move.assert_still_there()


def test_an_image_that_is_closed_takes_no_more(move: Move, lanes: Lanes) -> None:
    move.before = lambda pid, at, _: move.host.inbox.close() if at == 5 * CHUNK else None
    with pytest.raises(StepFailed, match=r"h1 refused the image: .*(closed|takes no|has ended)"):
        move.send(lanes._beside, lanes)
    move.assert_still_there()


def test_an_image_without_device_memory_takes_none(
    move: Move, key_directory: Path, host: Host
) -> None:
    host.inbox.devices = None
    with Source(move.here, key_directory) as source:
        header = PageHeader("m1", 1, 0, "device", 0, 101, 0)
        assert source.say(source.chunk(header, b"x")) == (
            "refused",
            "ship: this image takes no device memory",
        )


def test_an_empty_chunk_of_device_memory_ends_no_lane(move: Move, key_directory: Path) -> None:
    with Source(move.here, key_directory) as source:
        header = PageHeader("m1", 1, 0, "device", 0, 101, 0)
        said = source.say(source.chunk(header, b""))
    assert said is not None
    assert "an empty chunk of device memory of process 101 came" in str(said[1])
