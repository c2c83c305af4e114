# SPDX-License-Identifier: Apache-2.0
"""Device memory of a process under the interposer, through the real helper, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from arena_process import GPUS, Built, Holder
from cuda_process import doubles
from gpu_memory_helper import MIB, Helper, drained, fill, helper, helpers

from liveshift.cuda_snapshot.checkpoint import CudaState
from liveshift.cuda_snapshot.helper.blocks import Block
from liveshift.cuda_snapshot.helper.client import GpuHelper
from liveshift.cuda_snapshot.helper.session_client import DeviceSession
from liveshift.errors import StepFailed
from liveshift.interposer.layout import MemoryKind, WantedState
from liveshift.runtime.agent.gpu.device_state import SavedDevices, left_to_driver

__all__ = ["doubles", "helper", "helpers"]

KEY = "7/1000"
ONE, OTHER = (gpu.split(":")[0] for gpu in GPUS.split(","))
SIZES = (2 * MIB, 20 * MIB, 6 * MIB, 64 * MIB)


class Process(Holder):
    """Blocks on two GPUs, each with bytes of its own; some too small to be movable."""

    def fill(self) -> None:
        self.blocks: list[tuple[int, int, int]] = []
        for seed, size in enumerate((*SIZES, 4096, MIB), start=1):
            self("device", seed % 2)
            address = self("malloc", size)
            assert address > 0
            assert self("put", address, size, seed) == 0
            self.blocks.append((address, size, seed))

    def right(self) -> bool:
        """All bytes are as they were written."""
        return all(self("same", *block) == 0 for block in self.blocks)

    @contextmanager
    def with_helper(self, gpu: GpuHelper) -> Iterator[DeviceSession]:
        """A device session, as an agent holds one."""
        with gpu.session(self.pid, self.pages, self.pid) as session:
            self.order(WantedState.DEVICES)
            session.wait(30)
            yield session
        assert self.done() == (0, "")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Process]]:
    begun: list[Process] = []

    def start() -> Process:
        begun.append(Process(Built("plain"), tmp_path))
        begun[-1].fill()
        return begun[-1]

    yield start
    for holder in begun:
        with holder.process as process:  # closes its pipes
            process.kill()


def freeze(gpu: GpuHelper, process: Process) -> None:
    gpu.lock(process.pid, 20)
    gpu.checkpoint(process.pid)
    assert gpu.state(process.pid) is CudaState.CHECKPOINTED


def thaw(gpu: GpuHelper, process: Process, *gpus: tuple[str, str]) -> None:
    gpu.restore(process.pid, gpus)
    gpu.unlock(process.pid)


def test_memory_leaves_before_the_checkpoint_and_comes_back_after(
    helper: Helper, start: Callable[[], Process]
) -> None:
    gpu, process = helper(devices=GPUS), start()
    assert process.right()
    for _ in range(3):
        with process.with_helper(gpu) as session:
            sums, some = session.checksums(0), session.checksums(4)
            given = session.give_up(KEY)
            assert sorted(block.size for block in given) == sorted(SIZES)
            assert {block.kind for block in given} == {MemoryKind.ARENA}
            assert {block.gpu for block in given} == {ONE, OTHER}
            assert len(session.checksums(0)) == 2  # of what stays
        freeze(gpu, process)
        assert len(drained(gpu, KEY)) == sum(SIZES)  # as the wire takes it
        thaw(gpu, process)
        with process.with_helper(gpu) as session:
            session.take_back(KEY)
            assert (session.checksums(0), session.checksums(4)) == (sums, some)
        assert process.right()
    assert gpu.held() == {}


def test_memory_comes_from_another_hosts_helper(
    helper: Helper, start: Callable[[], Process]
) -> None:
    """What the wire does between two of them: drained here, filled there, by another key."""
    gpu, process = helper("3x1048576", devices=GPUS), start()
    with process.with_helper(gpu) as session:
        sums = session.checksums(0)
        given = session.give_up(KEY)
    freeze(gpu, process)
    gpu.create("8/1000", given)
    fill(gpu, "8/1000", drained(gpu, KEY))
    gpu.drop(KEY)
    thaw(gpu, process)
    with process.with_helper(gpu) as session:
        session.take_back("8/1000")
        assert session.checksums(0) == sums
    assert process.right()
    with process.with_helper(gpu) as session:  # and what came so can be given up in turn
        assert session.give_up(KEY) == given
        session.take_back(KEY)
    assert process.right()


def test_memory_follows_to_the_other_gpu(helper: Helper, start: Callable[[], Process]) -> None:
    gpu, process = helper(devices=GPUS), start()
    with process.with_helper(gpu) as session:
        sums = session.checksums(0)
        before = {block.address: block.gpu for block in session.blocks()}
        session.give_up(KEY)
    freeze(gpu, process)
    thaw(gpu, process, (ONE, OTHER), (OTHER, ONE))
    with process.with_helper(gpu) as session:
        after = {block.address: block.gpu for block in session.blocks()}
        assert all(before[address] != after[address] for address in before)
        session.take_back(KEY)
        assert session.checksums(0) == sums
    assert process.right()
    assert gpu.held() == {}


def test_what_was_handed_over_once_goes_by_the_drivers_checkpoint_later(
    helper: Helper, start: Callable[[], Process]
) -> None:
    gpu, process = helper(devices=GPUS), start()
    with process.with_helper(gpu) as session:
        session.give_up(KEY)
        session.take_back(KEY)
    gpu.lock(process.pid, 20)
    with pytest.raises(StepFailed, match="memory shared with another process"):
        gpu.checkpoint(process.pid)  # now it is imported, which driver 580 takes from nobody
    gpu.unlock(process.pid)
    with process.with_helper(gpu) as session:
        sums = session.checksums(0)
        session.own()
        assert session.checksums(0) == sums
    freeze(gpu, process)
    thaw(gpu, process)
    with process.with_helper(gpu) as session:
        session.own()  # nothing to do
        assert session.checksums(0) == sums
        assert len(session.give_up(KEY)) == len(SIZES)
        session.take_back(KEY)
    assert process.right()


def test_the_source_goes_on_with_what_it_gave_up(
    helper: Helper, start: Callable[[], Process]
) -> None:
    """A move that fails after the give-up, with a copy under way."""
    gpu, process = helper(devices=GPUS), start()
    with process.with_helper(gpu) as session:
        session.give_up(KEY)
    with gpu.drain(KEY) as drain:
        next(drain)
        with process.with_helper(gpu) as session:
            session.take_back(KEY)
    assert process.right()
    address, size, seed = process.blocks[0]
    assert process("put", address, size, seed + 50) == 0  # writable, and only its own
    assert process("same", address, size, seed + 50) == 0
    assert process("free", address) == 0
    del process.blocks[0]
    assert process.right()


def test_a_restore_needs_room_for_what_the_helper_does_not_have() -> None:
    blocks = [
        Block(1 << 30, 30 * MIB, ONE, MemoryKind.ARENA),
        Block(2 << 30, MIB, OTHER, MemoryKind.ARENA),
    ]
    saved = SavedDevices(1000, blocks, used={ONE: 100 * MIB, OTHER: 1})
    assert left_to_driver(saved, []) == {ONE: 70 * MIB, OTHER: 0}
    assert left_to_driver(saved, [(ONE, OTHER), (OTHER, ONE)]) == {OTHER: 70 * MIB, ONE: 0}
