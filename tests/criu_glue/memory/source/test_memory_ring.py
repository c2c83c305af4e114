# SPDX-License-Identifier: Apache-2.0
"""The memory for chunks on their way goes back to the kernel when its move is over."""

from __future__ import annotations

from pathlib import Path

from liveshift.criu_glue.memory.engine import CHUNK
from liveshift.criu_glue.memory.source.ring import ChunkRing

SLOTS = 64


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def never() -> bool:
    return False


def test_a_closed_ring_gives_its_memory_back_though_something_refers_to_it() -> None:
    before = resident()
    ring = ChunkRing(SLOTS)
    on_its_way = ring.next_slot(never)
    assert on_its_way is not None
    assert resident() > before + SLOTS * CHUNK // 2
    ring.close()
    on_its_way.memory[:1] = b"x"  # still there for who has it
    assert ring.next_slot(never) is None
    assert not ring.wait_all_free(never)
    on_its_way.release()
    del on_its_way
    assert resident() < before + SLOTS * CHUNK // 2
