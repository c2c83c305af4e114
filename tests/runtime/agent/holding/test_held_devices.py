# SPDX-License-Identifier: Apache-2.0
"""An image of a capsule with GPUs at a holder, which has none itself: the table of its CUDA
processes is kept and sent on, and device memory comes in no other way than in the image."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from gpu_scenes import GIB, gpu_survey, process
from held_scene import CORE, LOG, Holder, Source, holder, note, some_memory
from inbox_scene import Host
from memory_parts import content, digest
from preflight_scene import NOTHING
from wire_ends import LIMIT, key_directory, receiver, senders

from liveshift.cuda_snapshot.helper.blocks import Block
from liveshift.errors import StepFailed
from liveshift.runtime.agent.gpu.device_memory import TABLE, TableInlet, decode
from liveshift.runtime.agent.gpu.device_state import SavedDevices
from liveshift.runtime.model.snapshots import image_bytes
from liveshift.runtime.wire import LANES, Lanes, Sender

__all__ = ["holder", "key_directory", "senders"]

MEMORY = some_memory()
USED = gpu_survey(process({"GPU-a": GIB}))
SAVED = [SavedDevices(7, used={"GPU-a": GIB}, sums={4096: 9}, samples=4, stopped=True, parents=[1])]
WITH_BLOCKS = [SavedDevices(7, [Block(1 << 40, 2 << 20, "GPU-a", 0)])]


def hold(holder: Holder, saved: list[SavedDevices] = SAVED) -> None:
    """Take s17.1 of a capsule that uses a GPU."""
    gpu_note = msgspec.structs.replace(note(17), gpu=USED)
    source = Source(holder.images.expect(gpu_note))
    source.send(TABLE, msgspec.msgpack.encode(saved))
    source.send_pages(MEMORY)
    source.send(CORE, b"registers")
    source.send(LOG, b"lines")
    source.end_memory(MEMORY)
    source.finish()
    holder.capsule.held(17, digest(MEMORY))


@pytest.mark.parametrize("restarted", [False, True])
def test_the_table_goes_to_the_host_that_restores(
    holder: Holder,
    tmp_path: Path,
    key_directory: Path,
    senders: Callable[..., Sender],
    restarted: bool,
) -> None:
    hold(holder)
    if restarted:
        holder.again()
    (held,) = holder.images.generations()
    assert held.note.gpu == USED, "a rewind asks for GPUs like these"
    there = Host(tmp_path / "there")
    there.inbox.memory_limit = 1 << 30
    there.inbox.devices = TableInlet()
    here, endpoint = receiver(key_directory)
    here.expect("m1", "h0", there.inbox, LIMIT, there.inbox.pages, LANES)
    sender = senders("m1", endpoint, key_directory)
    lanes = Lanes(sender, f"tcp://{here.pages.address}", 2)
    try:
        holder.capsule.forward(17, sender, lanes)
    finally:
        lanes.close()
    assert there.inbox.complete
    assert TABLE in there.inbox.manifest.streams
    assert decode((there.images / TABLE).read_bytes()) == SAVED
    assert there.inbox.memory is not None
    assert content(there.inbox.memory) == MEMORY
    there.inbox.forget_memory()


def test_a_capsule_without_gpus_has_no_table(holder: Holder) -> None:
    source = Source(holder.images.expect(note(17)))
    with pytest.raises(StepFailed, match="a stream that no destination takes: 'devices'"):
        source.send(TABLE, msgspec.msgpack.encode(SAVED))


def test_a_holder_takes_no_device_memory_beside_the_image(holder: Holder) -> None:
    with pytest.raises(StepFailed, match="device memory of process '7' came beside an image"):
        hold(holder, WITH_BLOCKS)
    inlet = TableInlet()
    with pytest.raises(StepFailed, match="came beside an image that is held for others"):
        inlet.write_at(7, 0, memoryview(b"x"))
    with pytest.raises(StepFailed, match="came beside an image that is held for others"):
        inlet.filler("7")
    inlet.close()


def test_device_memory_counts_in_the_size_of_an_image() -> None:
    assert image_bytes(NOTHING, USED) - image_bytes(NOTHING, None) == GIB
