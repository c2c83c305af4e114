# SPDX-License-Identifier: Apache-2.0
"""Files on shared paths may be written to while a tree is between two hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
from captured import Sink, sink
from one_sandbox import said
from sandbox_trees import COUNTER, SandboxMaker, criu, dumped, goes_on, new_sandboxes, place

from liveshift.criu_glue.capsule import output
from liveshift.criu_glue.capsule.mounts import Placement
from liveshift.criu_glue.criu.restore import RestoringTree
from liveshift.criu_glue.criu.tool import Criu
from liveshift.criu_glue.files.rights import User
from liveshift.criu_glue.images import image_check, shared_sizes
from liveshift.errors import StepFailed

__all__ = ["criu", "new_sandboxes", "place", "sink"]


@pytest.mark.parametrize("mode", ["r", "r+", "a+"])
@pytest.mark.root
def test_a_file_on_a_shared_path_may_grow_between_dump_and_restore(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink, mode: str
) -> None:
    """Whether it is mapped as well or not; one that is not shared must be as it was."""
    data, other = place.parent / "data.bin", place.parent / "other"
    other.mkdir()
    for path in (data, other / "data.bin"):
        path.write_bytes(b"0123456789")
    opened = f"import mmap; data = open('{data}', '{mode}')\n"
    opened += "m = mmap.mmap(data.fileno(), 10, prot=mmap.PROT_READ)\n"
    opened += f"other = open('{other}/data.bin')\n"
    checked = "data.seek(0); assert len(data.read()) % 10 == 0 and m[9:] == b'9'\n    os.write"
    here, there = (
        new_sandboxes.counting(opened + COUNTER.replace("os.write", checked)),
        new_sandboxes.empty(),
    )
    left = dumped(criu, here, there, place, sink)
    data.write_bytes(b"0123456789" * 2)
    placement = Placement((str(place.parent),), (str(other),))
    files = left.images / "files.img"
    before = files.read_bytes()
    shared_sizes.forget(left.images, placement, there.init)
    assert (after := files.read_bytes()) != before
    shared_sizes.forget(left.images, placement, there.init)
    assert files.read_bytes() == after
    image_check.prepare(left.images, User(0, 0), there.root)
    for content in (b"0123456789" * 2, b"0123456789"):
        (other / "data.bin").write_bytes(content)
        tree = RestoringTree(there, left.images)
        if len(content) > 10:
            with pytest.raises(StepFailed, match=f"{other}/data.bin has 20 bytes on the dest"):
                tree.bring_up(criu, left.pipes, 60)
    left.end()
    tree.bring_up(criu, left.pipes, 60)
    tree.let_run(60)
    assert goes_on(there)
    assert said(there, output.STDERR) == ""


@pytest.mark.root
def test_a_file_that_is_only_read_may_have_grown_since_the_snapshot(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    data = place.parent / "data.bin"
    data.write_bytes(b"0123456789")
    here, there = new_sandboxes.counting(f"data = open('{data}')\n{COUNTER}"), new_sandboxes.empty()
    left = dumped(criu, here, there, place, sink)
    left.end()
    data.write_bytes(b"0123456789" * 2)
    shared_sizes.forget(left.images, Placement((), ()), there.init, {bytes(data)})
    image_check.prepare(left.images, User(0, 0), there.root)
    tree = RestoringTree(there, left.images)
    tree.bring_up(criu, left.pipes, 60)
    tree.let_run(60)
    assert goes_on(there)
