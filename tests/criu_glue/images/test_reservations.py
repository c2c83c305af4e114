# SPDX-License-Identifier: Apache-2.0
"""Large reservations of addresses are marked, and nothing else of an image changes.

That a move needs the mark shows only where the fill brings the memory (kernel objects in
integration/moves/test_bit_exact.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from captured import Sink, sink
from sandbox_trees import COUNTER, SandboxMaker, criu, dumped, goes_on, new_sandboxes, place

from liveshift.criu_glue.criu.restore import RestoringTree
from liveshift.criu_glue.criu.tool import Criu
from liveshift.criu_glue.images import reservations
from liveshift.criu_glue.images.image_kinds import ImageFile
from liveshift.criu_glue.images.protobuf import ProtobufMessage
from liveshift.errors import StepFailed

__all__ = ["criu", "new_sandboxes", "place", "sink"]

RESERVE = """
import mmap
private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
large = mmap.mmap(-1, 1 << 40, flags=private, prot=0)
small = mmap.mmap(-1, 1 << 20, flags=private, prot=0)
used = mmap.mmap(-1, 1 << 20, flags=private)
used[:4] = b"here"
"""


def flags(images: Path) -> dict[int, int]:
    """The flags of all mappings, by their starts."""
    (path,) = images.glob("mm-*.img")
    (entry,) = ImageFile(path).entries
    found = [ProtobufMessage(raw) for raw in ProtobufMessage(entry).raws(14)]
    return {mapping.long(1): mapping.uint(6) for mapping in found}


@pytest.mark.root
def test_a_tree_comes_back_that_reserves_more_than_there_is(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    here, there = new_sandboxes.counting(RESERVE + COUNTER), new_sandboxes.empty()
    left = dumped(criu, here, there, place, sink)
    before = flags(left.images)
    reservations.mark(left.images)
    after = flags(left.images)
    reservations.mark(left.images)
    assert flags(left.images) == after
    assert before.keys() == after.keys()
    changed = [before[start] ^ after[start] for start in before if before[start] != after[start]]
    assert changed == [0x4000], "one mapping has MAP_NORESERVE now"
    left.end()
    tree = RestoringTree(there, left.images)
    tree.bring_up(criu, left.pipes, 60)
    tree.let_run(60)
    assert goes_on(there)


def test_a_damaged_image_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mm-1001.img"
    path.write_bytes(b"")
    with pytest.raises(StepFailed):
        reservations.mark(tmp_path)
