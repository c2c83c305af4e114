# SPDX-License-Identifier: Apache-2.0
"""The ledger: a C program on the simulated CUDA holds device state, its page is read meanwhile."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from doubles.gpu import build

from liveshift.interposer import layout, library
from liveshift.interposer.layout import Memory
from liveshift.interposer.page import Allocation, opened

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parent / "interposer"
PATIENCE_S = 60
MIB = 1 << 20

Rows = dict[Memory, list[Allocation]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> build.Doubles:
    """The doubles, and beside them the program ``holder``."""
    doubles = build.build(tmp_path_factory.mktemp("cuda"))
    _compile(
        [HERE / "ledger" / "holder.c"], doubles.folder / "holder", f"-I{build.INCLUDE}",
        f"-L{doubles.folder}", "-l:libcudart.so.13", "-l:libcuda.so.1",
        f"-Wl,-rpath,{doubles.folder}", "-pthread", "-ldl",
    )  # fmt: skip
    return doubles


def _compile(sources: list[Path], to: Path, *flags: str) -> Path:
    compiler = [*shlex.split(os.environ.get("CC", "cc")), "-std=gnu11", "-D_GNU_SOURCE", "-O2"]
    command = [*compiler, *map(str, sources), "-o", str(to), *flags]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    return to


class Holder:
    """One run of the program under the interposer; :meth:`step` waits for its next words."""

    def __init__(
        self, built: build.Doubles, pages: Path, story: list[str], extra: dict[str, str]
    ) -> None:
        self.pages = pages
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("LIVESHIFT_", "LD_"))}
        environment = kept | {
            "LD_LIBRARY_PATH": str(built.folder),
            "LD_PRELOAD": str(library.library_path()),
            "LIVESHIFT_PAGES": str(pages),
        }
        self.process = subprocess.Popen(
            [str(built.folder / "holder"), *story], env=environment | extra, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def step(self, word: str) -> list[str]:
        """Wait for that step; the words that come with it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().split()
        assert line[:2] == ["step", word], line
        return line[2:]

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.go_on()
        assert self.process.wait(PATIENCE_S) == 0

    def path(self, pid: int | None = None) -> Path:
        return self.pages / str(pid or self.process.pid)

    def rows(self, pid: int | None = None) -> Rows:
        found: Rows = {}
        with opened(self.path(pid)) as page:
            for row in page.allocations():
                found.setdefault(Memory(row.kind), []).append(row)
        return found

    def totals(self, pid: int | None = None) -> dict[str, int]:
        with opened(self.path(pid)) as page:
            return page.ledger()


Start = Callable[..., Holder]


@pytest.fixture
def start(built: build.Doubles, tmp_path: Path) -> Iterator[Start]:
    """Start the program with a story; it is ended with the test."""
    begun: list[Holder] = []

    def start(*story: str, **extra: str) -> Holder:
        begun.append(Holder(built, tmp_path, list(story), extra))
        return begun[-1]

    yield start
    for holder in begun:
        with holder.process as process:  # closes its pipes
            process.kill()


def sizes(rows: Rows) -> dict[Memory, list[int]]:
    return {kind: sorted(row.size for row in of) for kind, of in rows.items()}


def test_what_is_allocated_is_known_by_kind_and_gone_when_freed(start: Start) -> None:
    holder = start("memory")
    address, pitched, stream = holder.step("held")
    rows = holder.rows()
    assert sizes(rows) == {
        Memory.DEVICE: sorted([3 * MIB, int(pitched)]),
        Memory.POOL: [2 * MIB],
        Memory.MANAGED: [MIB],
        Memory.PINNED: [MIB, 5 * MIB],
        Memory.REGISTERED: [MIB],
    }
    assert int(address, 16) in {row.address for row in rows[Memory.DEVICE]}
    assert rows[Memory.POOL][0].stream == int(stream, 16)
    assert {row.device for of in rows.values() for row in of} == {0}
    assert {row.flags for row in rows[Memory.PINNED]} == {0, 1}  # cudaHostAllocPortable
    assert sorted(row.serial for of in rows.values() for row in of) == [1, 2, 3, 4, 5, 6, 7]
    totals = holder.totals()
    assert (totals["made"], totals["freed"], totals["missed"]) == (7, 0, 0)
    assert totals["driver"] == 13000
    with opened(holder.path()) as page:
        assert [(s.handle, s.device, s.flags, s.priority) for s in page.streams()] == [
            (int(stream, 16), 0, 1, -1)
        ]
    holder.go_on()
    holder.step("freed")
    assert holder.rows() == {}
    assert holder.totals()["freed"] == 7
    with opened(holder.path()) as page:
        assert page.streams() == []
    holder.end()


def test_expandable_segments_are_seen_through_the_resolver(start: Start) -> None:
    piece = 2 * MIB
    holder = start("segments")
    holder.step("mapped")
    rows = holder.rows()
    assert sizes(rows) == {
        Memory.RESERVED: [64 * MIB],
        Memory.PHYSICAL: [piece] * 4,
        Memory.MAPPED: [piece] * 4,
    }
    handles = {row.address for row in rows[Memory.PHYSICAL]}
    assert {row.handle for row in rows[Memory.MAPPED]} == handles
    assert {row.device for row in [*rows[Memory.PHYSICAL], *rows[Memory.MAPPED]]} == {0}
    base = rows[Memory.RESERVED][0].address
    assert sorted(row.address - base for row in rows[Memory.MAPPED]) == [
        n * piece for n in range(4)
    ]
    holder.go_on()
    holder.step("released")  # one lives because it is mapped, one because it is held once more
    assert sizes(holder.rows()) == {
        Memory.RESERVED: [64 * MIB],
        Memory.PHYSICAL: [piece] * 4,
        Memory.MAPPED: [piece] * 3,
    }
    holder.go_on()
    holder.step("shared")
    rows = holder.rows()
    assert [(row.size, row.flags) for row in rows[Memory.EXPORTED]] == [(piece, 1)]
    assert rows[Memory.EXPORTED][0].handle in handles
    assert len(rows[Memory.IMPORTED]) == 1
    holder.go_on()
    holder.step("freed")
    assert holder.rows() == {}
    totals = holder.totals()
    assert totals["made"] == totals["freed"] > 0
    holder.end()


def test_the_driver_is_recorded_however_its_functions_were_found(start: Start) -> None:
    holder = start("driver")
    holder.step("held")
    assert sizes(holder.rows()) == {
        Memory.DEVICE: [MIB, 2 * MIB, 3 * MIB],
        Memory.PINNED: [4 * MIB],
    }
    holder.go_on()
    holder.step("freed")
    assert holder.rows() == {}
    assert (holder.totals()["made"], holder.totals()["freed"]) == (4, 4)
    holder.end()


def test_a_library_that_python_loads_for_itself_is_recorded(
    built: build.Doubles, tmp_path: Path
) -> None:
    """As torch is: RTLD_LOCAL, and linked with libcudart."""
    source = tmp_path / "user.c"
    source.write_text(
        "int cudaMalloc(void **, unsigned long);\nint get(void **p) { return cudaMalloc(p, 4096); }"
    )
    user = _compile(
        [source], tmp_path / "user.so", "-shared", "-fPIC", f"-L{built.folder}",
        "-l:libcudart.so.13",
    )  # fmt: skip
    code = f"import ctypes; assert ctypes.CDLL('{user}').get(ctypes.byref(ctypes.c_void_p())) == 0"
    pages = tmp_path / "pages"
    pages.mkdir()
    environment = {
        "LD_LIBRARY_PATH": str(built.folder), "LD_PRELOAD": str(library.library_path()),
        "LIVESHIFT_PAGES": str(pages),
    }  # fmt: skip
    subprocess.run([sys.executable, "-S", "-c", code], check=True, env=environment, timeout=60)
    (page,) = pages.iterdir()
    with opened(page) as file:
        assert [(row.kind, row.size) for row in file.allocations()] == [(Memory.DEVICE, 4096)]


def test_memory_shared_by_ipc_is_known_on_both_sides(start: Start) -> None:
    holder = start("shared")
    child = int(holder.step("opened")[0])
    assert sizes(holder.rows()) == {Memory.DEVICE: [MIB], Memory.EXPORTED: [MIB]}
    opened_there = holder.rows(child)
    assert sizes(opened_there) == {Memory.IMPORTED: [MIB]}
    holder.go_on()
    holder.step("closed")
    assert holder.rows() == {}
    assert holder.rows(child) == {}
    holder.end()


def _interposer(folder: Path, sources: Path, *more: str) -> Path:
    """The interposer with all of its functions exported, for what its parts ask of each other."""
    flags = ['-DLIVESHIFT_VERSION="test"', "-fexceptions", "-fPIC", "-shared", "-pthread", *more]
    return _compile(sorted(sources.glob("*.c")), folder / "interposer.so", *flags)


@pytest.fixture(scope="module")
def open_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _interposer(tmp_path_factory.mktemp("open"), SOURCES)


def test_streams_events_and_graphs_with_nccl(start: Start, open_library: Path) -> None:
    holder = start("work", LD_PRELOAD=str(open_library))
    holder.step("capturing")
    with opened(holder.path()) as page:
        assert sorted(stream.use for stream in page.streams()) == [0, 2]
    holder.go_on()
    holder.step("captured")
    with opened(holder.path()) as page:
        assert [stream.use for stream in page.streams()] == [0, 0]
    totals = holder.totals()
    assert (totals["events"], totals["graphs"], totals["graph_execs"]) == (4, 2, 1)
    assert totals["graphs_with_nccl"] == 2  # the captured one, and what was instantiated of it
    holder.go_on()
    holder.step("half-destroyed")
    assert holder.totals()["graphs_with_nccl"] == 1
    holder.go_on()
    holder.step("destroyed")
    totals = holder.totals()
    assert [totals[n] for n in ("events", "graphs", "graph_execs", "graphs_with_nccl")] == [0] * 4
    holder.end()


def test_a_device_that_is_reset_holds_nothing(start: Start) -> None:
    holder = start("reset")
    holder.step("held")
    assert sizes(holder.rows()) == {Memory.DEVICE: [MIB], Memory.PINNED: [MIB]}
    with opened(holder.path()) as page:
        assert len(page.streams()) == 1
    holder.go_on()
    holder.step("reset")
    assert holder.rows() == {}
    with opened(holder.path()) as page:
        assert page.streams() == []
    holder.end()


def test_a_million_pairs_in_four_threads_lose_nothing(start: Start) -> None:
    holder = start("threads", "4", "250000")
    holder.step("ns_per_pair")
    assert holder.rows() == {}
    totals = holder.totals()
    assert (totals["made"], totals["freed"], totals["missed"]) == (1_000_000, 1_000_000, 0)
    assert totals["rows"] <= 4 * 8 + 4  # rows are used again
    holder.end()


def test_more_than_the_table_holds_is_counted_as_missed(start: Start, tmp_path: Path) -> None:
    small = tmp_path / "small"  # the same with fewer rows: the double is slow with many
    shutil.copytree(SOURCES, small)
    text = (small / "page.h").read_text()
    (small / "page.h").write_text(
        text.replace(f"ALLOCATIONS {layout.ALLOCATIONS}", "ALLOCATIONS 1024")
    )
    holder = start("full", "1100", LD_PRELOAD=str(_interposer(small, small)))
    holder.step("full")
    totals = holder.totals()
    assert (totals["made"], totals["missed"], totals["rows"]) == (1100, 76, 1024)
    rows = holder.rows()[Memory.DEVICE]
    assert Counter(row.size for row in rows) == {256: 1024}
    assert len({row.address for row in rows}) == 1024
    holder.go_on()
    holder.step("freed")
    assert holder.rows() == {}
    totals = holder.totals()
    assert totals["made"] - totals["missed"] == totals["freed"]
    holder.end()


def test_a_child_begins_empty_and_a_program_anew(start: Start) -> None:
    holder = start("family")
    child = holder.step("forked")[0]
    assert sizes(holder.rows()) == {Memory.PINNED: [MIB]}
    assert not holder.path(int(child)).exists()
    holder.go_on()  # it becomes another program, which holds other things
    holder.step("held")
    assert len(holder.rows()[Memory.PINNED]) == 2
    assert holder.totals()["made"] == 7
    holder.go_on()
    holder.step("freed")
    holder.end()


def test_a_program_that_only_could_has_no_page(start: Start) -> None:
    holder = start("idle")
    holder.step("idle")
    assert not holder.path().exists()
    holder.end()
