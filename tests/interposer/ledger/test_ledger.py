# SPDX-License-Identifier: Apache-2.0
"""The ledger: a C program on the simulated CUDA holds device state, its page is read meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sanitizers
from checkout import SUPPORT
from doubles.gpu import build
from doubles.gpu.build import kept
from sanitizers import BUILT

from liveshift.interposer import library
from liveshift.interposer.layout import MemoryKind
from liveshift.interposer.page import Allocation, opened

PATIENCE_S = 60
MIB = 1 << 20

Rows = dict[MemoryKind, list[Allocation]]


class Built:
    """The doubles, and the program ``holder`` on them; sanitized, with the interposer linked."""

    def __init__(self, name: str) -> None:
        flags = sanitizers.flags(name)
        doubles = build.build(BUILT, flags)
        self.linked = sanitizers.interposer(flags) if flags else None
        source = SUPPORT / "gpu" / "ledger" / "holder.c"
        own = [*flags, f"-Wl,-rpath,{doubles.folder}"]
        own += sanitizers.first(self.linked) if self.linked else []

        def make(part: Path) -> None:
            libraries = [doubles.libcudart, doubles.libcuda]
            build.program(source, part / "holder", libraries, own)

        sources = [source, *build.INCLUDE.glob("*.h")]
        self.program = kept(BUILT, "holder", sources, own, make) / "holder"


@pytest.fixture(scope="module", params=sanitizers.SANITIZERS)
def built(request: pytest.FixtureRequest) -> Built:
    return Built(request.param)


class Holder:
    """One run of the program under the interposer; :meth:`step` waits for its next words."""

    def __init__(self, built: Built, pages: Path, story: list[str]) -> None:
        self.pages = pages
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("LIVESHIFT_", "LD_"))}
        environment = kept | sanitizers.OPTIONS | {"LIVESHIFT_PAGES": str(pages)}
        if built.linked is None:
            environment["LD_PRELOAD"] = str(library.library_path())
        self.process = subprocess.Popen(
            [str(built.program), *story],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

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
                found.setdefault(MemoryKind(row.kind), []).append(row)
        return found

    def totals(self, pid: int | None = None) -> dict[str, int]:
        with opened(self.path(pid)) as page:
            return page.ledger()


Start = Callable[..., Holder]


@pytest.fixture
def start(built: Built, tmp_path: Path) -> Iterator[Start]:
    """Start the program with a story; it is ended with the test."""
    begun: list[Holder] = []

    def start(*story: str) -> Holder:
        begun.append(Holder(built, tmp_path, list(story)))
        return begun[-1]

    yield start
    for holder in begun:
        with holder.process as process:  # closes its pipes
            process.kill()


def sizes(rows: Rows) -> dict[MemoryKind, list[int]]:
    return {kind: sorted(row.size for row in of) for kind, of in rows.items()}


def test_what_is_allocated_is_known_by_kind_and_gone_when_freed(start: Start) -> None:
    holder = start("memory")
    address, pitched, stream = holder.step("held")
    rows = holder.rows()
    assert sizes(rows) == {
        MemoryKind.DEVICE: sorted([3 * MIB, int(pitched)]),
        MemoryKind.POOL: [2 * MIB],
        MemoryKind.MANAGED: [MIB],
        MemoryKind.PINNED: [MIB, 5 * MIB],
        MemoryKind.REGISTERED: [MIB],
    }
    assert int(address, 16) in {row.address for row in rows[MemoryKind.DEVICE]}
    assert rows[MemoryKind.POOL][0].stream == int(stream, 16)
    assert {row.device for of in rows.values() for row in of} == {0}
    assert {row.flags for row in rows[MemoryKind.PINNED]} == {0, 1}  # cudaHostAllocPortable
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
        MemoryKind.RESERVED: [64 * MIB],
        MemoryKind.PHYSICAL: [piece] * 4,
        MemoryKind.MAPPED: [piece] * 4,
    }
    handles = {row.address for row in rows[MemoryKind.PHYSICAL]}
    assert {row.handle for row in rows[MemoryKind.MAPPED]} == handles
    assert {row.device for row in [*rows[MemoryKind.PHYSICAL], *rows[MemoryKind.MAPPED]]} == {0}
    base = rows[MemoryKind.RESERVED][0].address
    assert sorted(row.address - base for row in rows[MemoryKind.MAPPED]) == [
        n * piece for n in range(4)
    ]
    holder.go_on()
    holder.step("released")  # one lives because it is mapped, one because it is held once more
    assert sizes(holder.rows()) == {
        MemoryKind.RESERVED: [64 * MIB],
        MemoryKind.PHYSICAL: [piece] * 4,
        MemoryKind.MAPPED: [piece] * 3,
    }
    holder.go_on()
    holder.step("shared")
    rows = holder.rows()
    assert [(row.size, row.flags) for row in rows[MemoryKind.EXPORTED]] == [(piece, 1)]
    assert rows[MemoryKind.EXPORTED][0].handle in handles
    assert len(rows[MemoryKind.IMPORTED]) == 1
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
        MemoryKind.DEVICE: [MIB, 2 * MIB, 3 * MIB],
        MemoryKind.PINNED: [4 * MIB],
    }
    holder.go_on()
    holder.step("freed")
    assert holder.rows() == {}
    assert (holder.totals()["made"], holder.totals()["freed"]) == (4, 4)
    holder.end()


def test_a_library_that_python_loads_for_itself_is_recorded(tmp_path: Path) -> None:
    """As torch is: RTLD_LOCAL, and linked with libcudart."""
    doubles = build.build(BUILT)
    source, user = tmp_path / "user.c", tmp_path / "user.so"
    source.write_text(
        "int cudaMalloc(void **, unsigned long);\n"
        "int get(void **p);\nint get(void **p) { return cudaMalloc(p, 4096); }\n"
    )
    sanitizers.compile_c(user, source, "-shared", "-fPIC", doubles.libcudart)
    code = f"import ctypes; assert ctypes.CDLL('{user}').get(ctypes.byref(ctypes.c_void_p())) == 0"
    pages = tmp_path / "pages"
    pages.mkdir()
    environment = {
        "LD_LIBRARY_PATH": str(doubles.folder),
        "LD_PRELOAD": str(library.library_path()),
        "LIVESHIFT_PAGES": str(pages),
    }
    subprocess.run([sys.executable, "-S", "-c", code], check=True, env=environment, timeout=60)
    (page,) = pages.iterdir()
    with opened(page) as file:
        assert [(row.kind, row.size) for row in file.allocations()] == [(MemoryKind.DEVICE, 4096)]


def test_memory_shared_by_ipc_is_known_on_both_sides(start: Start) -> None:
    holder = start("shared")
    child = int(holder.step("opened")[0])
    assert sizes(holder.rows()) == {MemoryKind.DEVICE: [MIB], MemoryKind.EXPORTED: [MIB]}
    opened_there = holder.rows(child)
    assert sizes(opened_there) == {MemoryKind.IMPORTED: [MIB]}
    holder.go_on()
    holder.step("closed")
    assert holder.rows() == {}
    assert holder.rows(child) == {}
    holder.end()


def test_streams_events_and_graphs_with_nccl(built: Built, start: Start) -> None:
    holder = start("work")
    # The installed interposer doesn't export what the story would tell it.
    with_nccl = 0 if built.linked is None else 2
    holder.step("capturing")
    with opened(holder.path()) as page:
        assert sorted(stream.use for stream in page.streams()) == [0, 2]
    holder.go_on()
    holder.step("captured")
    with opened(holder.path()) as page:
        assert [stream.use for stream in page.streams()] == [0, 0]
    totals = holder.totals()
    assert (totals["events"], totals["graphs"], totals["graph_execs"]) == (4, 2, 1)
    assert totals["graphs_with_nccl"] == with_nccl  # the captured one, and what was made of it
    holder.go_on()
    holder.step("half-destroyed")
    assert holder.totals()["graphs_with_nccl"] == with_nccl // 2
    holder.go_on()
    holder.step("destroyed")
    totals = holder.totals()
    assert [totals[n] for n in ("events", "graphs", "graph_execs", "graphs_with_nccl")] == [0] * 4
    holder.end()


def test_a_device_that_is_reset_holds_nothing(start: Start) -> None:
    holder = start("reset")
    holder.step("held")
    assert sizes(holder.rows()) == {MemoryKind.DEVICE: [MIB], MemoryKind.PINNED: [MIB]}
    with opened(holder.path()) as page:
        assert len(page.streams()) == 1
    holder.go_on()
    holder.step("reset")
    assert holder.rows() == {}
    with opened(holder.path()) as page:
        assert page.streams() == []
    holder.end()


def test_a_million_pairs_in_four_threads_lose_nothing(built: Built, start: Start) -> None:
    pairs = 20_000 if built.linked else 250_000
    holder = start("threads", "4", str(pairs))
    holder.step("ns_per_pair")
    assert holder.rows() == {}
    totals = holder.totals()
    assert (totals["made"], totals["freed"], totals["missed"]) == (4 * pairs, 4 * pairs, 0)
    assert totals["rows"] <= 4 * 8 + 4  # rows are used again
    holder.end()


def test_a_child_begins_empty_and_a_program_anew(start: Start) -> None:
    holder = start("family")
    child = holder.step("forked")[0]
    assert sizes(holder.rows()) == {MemoryKind.PINNED: [MIB]}
    assert not holder.path(int(child)).exists()
    holder.go_on()  # it becomes another program, which holds other things
    holder.step("held")
    assert len(holder.rows()[MemoryKind.PINNED]) == 2
    assert holder.totals()["made"] == 7
    holder.go_on()
    holder.step("freed")
    holder.end()


def test_a_program_that_only_could_has_no_page(start: Start) -> None:
    holder = start("idle")
    holder.step("idle")
    assert not holder.path().exists()
    holder.end()
