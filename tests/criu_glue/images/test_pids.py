# SPDX-License-Identifier: Apache-2.0
"""Ids of a tree's tasks come back at a restore, wherever they lie, and CRIU's own are others."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

import pytest
from captured import ROOT_PID, Sink, sink
from hypothesis import given
from hypothesis import strategies as st
from image_edits import encode
from sandbox_trees import SandboxMaker, count, criu, dumped, goes_on, new_sandboxes, place
from waits import until

from liveshift.criu_glue.capsule.sandboxes import Sandbox
from liveshift.criu_glue.criu.restore import RestoringTree
from liveshift.criu_glue.criu.tool import Criu
from liveshift.criu_glue.images import pids
from liveshift.criu_glue.images.image_kinds import COMMON_MAGIC, KINDS
from liveshift.criu_glue.images.pids import LARGEST, LEAST, RESERVED, WINDOW, within_reach

__all__ = ["criu", "new_sandboxes", "place", "sink"]

SMALL = 1 << 15


def handed_out(last: int, end: int, number: int) -> set[int]:
    """What the kernel hands out after ``last`` in an empty namespace."""
    found = set()
    for _ in range(number):
        last = last + 1 if last + 1 < end else RESERVED
        found.add(last)
    return found


@given(
    st.sets(st.integers(1, SMALL - 1), max_size=200),
    st.lists(st.tuples(st.integers(1, SMALL - 1), st.integers(1, 5000)), max_size=5),
)
def test_criu_gets_none_of_the_ids_that_are_in_use(
    single: set[int], rows: list[tuple[int, int]]
) -> None:
    taken = single.union(*(range(at, min(at + size, SMALL)) for at, size in rows))
    last = pids.place(taken, SMALL)
    if last is None:
        free = sorted(set(range(RESERVED, SMALL)) - taken)
        ring = [*free, *(i + SMALL - RESERVED for i in free)]
        rows_ = [b - a == LEAST - 1 for a, b in zip(ring, ring[LEAST - 1 :], strict=False)]
        assert not any(rows_), "there was room"
        return
    assert not handed_out(last, SMALL, LEAST) & taken
    near = within_reach(last, SMALL, taken)
    assert set(near) == handed_out(last, SMALL, WINDOW) & taken


@pytest.mark.parametrize(
    ("taken", "end", "last"),
    [
        (range(1001, 2502), SMALL, RESERVED),  # threads, wherever the highest of them is
        ([1001, *range(20_000, 20_013)], SMALL, RESERVED),
        ([1001, SMALL - 1], SMALL, RESERVED),
        ([301, 1001, 2000], SMALL, SMALL - WINDOW),  # wrapped: before 301, the last to be used
        ([302, 1001, 2000], LARGEST, LARGEST - WINDOW + 1),
        ([*range(301, 1002), *range(2000, SMALL)], SMALL, 2000 - WINDOW - 1),
        ([1001, SMALL], SMALL, None),  # an id that cannot be given here
        (range(300, SMALL - LEAST + 1), SMALL, None),
        (range(300, SMALL - LEAST), SMALL, SMALL - LEAST - 1),
        ([], SMALL, RESERVED),
    ],
)
def test_where_criu_has_its_ids(taken: Iterable[int], end: int, last: int | None) -> None:
    assert pids.place(taken, end) == last


@pytest.mark.parametrize("number", [2**32 - 1, 0, 1])
def test_what_is_no_id_is_left_out(place: Path, number: int) -> None:
    """A zombie that CRIU saw end has neither group nor session."""
    words = struct.pack("<II", COMMON_MAGIC, KINDS["pstree"].magic)
    entry = encode([(1, 1002), (2, 1001), (3, number), (4, 1001), (5, 1003)])
    raw = words + struct.pack("<I", len(entry)) + entry
    (place / "pstree.img").write_bytes(raw)
    assert pids.of_image(place) == {1001, 1002, 1003}


THREADS = """
import ctypes
threading.stack_size(65536)
def wait(): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
def several(number):
    for _ in range(number): wait()
def skip_to(number):
    while not (pid := os.fork()) or os.waitpid(pid, 0)[0] < number:
        if not pid: os._exit(0)
"""
COUNT = """
for n in range(10**9):
    os.write(1, b"%d\\n" % n); time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("program", "threads"),
    [
        ("several(1500)", 1501),
        ("for _ in range(7):\n    if not os.fork(): break\nseveral(180)", 8 * 181),
        ("several(20); skip_to(2000); several(13)", 34),  # above where CRIU's ids once began
        pytest.param("several(5000)", 5001, marks=pytest.mark.long),
    ],
    ids=["one process", "eight processes", "a few, far apart", "five thousand"],
)
@pytest.mark.root
def test_a_tree_of_many_threads_comes_back_with_all_its_ids(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink, program: str, threads: int
) -> None:
    here = new_sandboxes.start(THREADS + program + COUNT)
    until(lambda: count(here) > 3 and len(pids.in_use(here)) >= threads, 30)
    before = pids.in_use(here)
    assert len(before) == threads
    there = moved(criu, here, new_sandboxes, place, sink)
    assert pids.in_use(there) == before
    assert goes_on(there)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.root
def test_ids_go_on_where_they_were_and_criu_gets_its_own(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink, wrapped: bool
) -> None:
    here = new_sandboxes.start(THREADS + COUNT.replace("os.write", "n % 20 or wait(); os.write"))
    first = ROOT_PID
    if wrapped:
        until(lambda: count(here) > 3)
        first = RESERVED + 10
        pids.set_last(here, first - 1)
    until(lambda: sum(i >= first for i in pids.in_use(here)) > 3)
    there = moved(criu, here, new_sandboxes, place, sink)
    began = len(pids.in_use(there))
    until(lambda: len(pids.in_use(there)) > began + 3)
    new = set(pids.in_use(there)[began:])
    assert max(new) < ROOT_PID + 60
    assert goes_on(there)


@pytest.mark.root
def test_ids_next_to_the_limit_and_across_it_come_back(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    """pid_max is nearly used up: half of the threads have the last ids there are."""
    program = "while not os.path.exists('/tmp/go'): time.sleep(0.01)\nseveral(40)"
    here, end = new_sandboxes.start(THREADS + program + COUNT), pids.limit()
    until(lambda: (here.root / "tmp").is_dir() and ROOT_PID in pids.in_use(here))
    pids.set_last(here, end - 21)
    (here.root / "tmp/go").touch()
    until(lambda: count(here) > 3)
    before = pids.in_use(here)
    assert set(range(end - 20, end)) <= set(before), "up to the last one"
    assert set(range(RESERVED, RESERVED + 20)) <= set(before), "and from the first again"
    there = moved(criu, here, new_sandboxes, place, sink)
    assert pids.in_use(there) == before
    assert goes_on(there)


def moved(
    criu: Criu, here: Sandbox, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> Sandbox:
    """The sandbox that a tree is in once it was dumped and restored."""
    there = new_sandboxes.empty()
    left = dumped(criu, here, there, place, sink)
    left.end()
    tree = RestoringTree(there, left.images)
    tree.bring_up(criu, left.pipes, 60)
    needed = pids.of_image(left.images)
    last = pids.place(needed, pids.limit())
    assert last is not None
    own = set(pids.in_use(there)) - needed
    assert own <= set(pids.within_reach(last, pids.limit(), own))
    assert len(own) < 30, "CRIU has more tasks than was thought"
    assert max(own) - last < 60, "CRIU takes more ids than was thought"
    tree.let_run(60)
    return there
