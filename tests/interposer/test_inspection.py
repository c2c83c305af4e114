# SPDX-License-Identifier: Apache-2.0
"""`liveshift inspect`: what a page's tables amount to, in words, and how a person sees it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_harness import Call
from page_bytes import page_bytes

from liveshift.interposer import layout
from liveshift.interposer.inspection import AllocationsHeld, ProcessState, inspect
from liveshift.interposer.layout import MemoryKind
from liveshift.interposer.page import PageError, opened

MIB = 1 << 20
LEDGER = {
    "made": 9,
    "freed": 2,
    "missed": 0,
    "events": 3,
    "graphs": 1,
    "graph_execs": 1,
    "graphs_with_nccl": 0,
    "driver": 13000,
}


Row = tuple[MemoryKind | int, int, int, int]


def write(
    path: Path,
    allocations: list[Row],
    streams: Sequence[tuple[int, int, int]] = (),
    communicators: Sequence[dict[str, Any]] = (),
    **ledger: int,
) -> Path:
    """A page with rows of (kind, device, size, handle), of (handle, device, use), and others."""
    raw = bytearray(page_bytes()) + bytes(layout.ALLOCATION.size * len(allocations))
    totals = {**LEDGER, "rows": len(allocations)} | ledger
    layout.LEDGER.struct.pack_into(
        raw, layout.LEDGER_AT, *(totals[name] for name, _ in layout.LEDGER.fields)
    )
    layout.TABLES.struct.pack_into(raw, layout.TABLES_AT, 2, len(communicators), len(streams), 0, 0)
    for n, (kind, device, size, handle) in enumerate(allocations):
        at = layout.ALLOCATIONS_AT + n * layout.ALLOCATION.size
        layout.ALLOCATION.struct.pack_into(
            raw, at, 4096 * (n + 1), size, handle, 0, kind, device, 0, n + 1, 0
        )
    for n, (handle, device, use) in enumerate(streams):
        at = layout.STREAMS_AT + n * layout.STREAM.size
        layout.STREAM.struct.pack_into(raw, at, handle, device, 0, 0, use)
    for n, given in enumerate(communicators):
        empty = layout.COMMUNICATOR.unpack(bytes(layout.COMMUNICATOR.size))
        fields = empty | {"state": 1, "library": 2, "made_by": ord("I"), "ordinal": n + 1} | given
        layout.COMMUNICATOR.struct.pack_into(
            raw, layout.COMMUNICATORS_AT + n * layout.COMMUNICATOR.size, *fields.values()
        )
    path.write_bytes(raw)
    return path


def look(path: Path) -> ProcessState:
    with opened(path) as page:
        return inspect(page)


def test_bytes_by_kind_and_device(tmp_path: Path) -> None:
    state = look(
        write(
            tmp_path / "1234",
            [
                (MemoryKind.DEVICE, 1, MIB, 0),
                (MemoryKind.DEVICE, 0, MIB, 0),
                (MemoryKind.DEVICE, 0, 2 * MIB, 0),
                (MemoryKind.FREE, 0, 7, 0),
                (MemoryKind.PHYSICAL, 0, 4 * MIB, 5),
                (MemoryKind.MAPPED, 0, 4 * MIB, 5),
                (MemoryKind.RESERVED, -1, 64 * MIB, 0),
                (MemoryKind.PINNED, 0, 3 * MIB, 0),
                (77, 1, 5, 0),
            ],
            [(16, 0, 0), (0, 0, 0), (17, 0, 3), (1, 1, 1)],
        )
    )
    assert state.memory == [
        AllocationsHeld(0, "device", 2, 3 * MIB),
        AllocationsHeld(0, "physical", 1, 4 * MIB),
        AllocationsHeld(0, "mapped", 1, 4 * MIB),
        AllocationsHeld(1, "device", 1, MIB),
        AllocationsHeld(1, "kind 77", 1, 5),
        AllocationsHeld(None, "reserved addresses", 1, 64 * MIB),
        AllocationsHeld(None, "host, pinned", 1, 3 * MIB),
    ]
    assert [(u.device, u.bytes, u.streams, u.carried, u.capturing) for u in state.devices] == [
        (0, 7 * MIB, 2, 1, 1),
        (1, MIB, 1, 1, 0),
    ]
    assert (state.events, state.graphs, state.graph_execs) == (3, 1, 1)
    assert state.obstacles == []


NO_CHECKPOINT = ", which the driver cannot checkpoint"


@pytest.mark.parametrize(
    ("rows", "ledger", "what"),
    [
        (
            [(MemoryKind.MANAGED, 0, MIB, 0)] * 2,
            {},
            f"it holds 2.10 MB of managed memory in 2 pieces{NO_CHECKPOINT}",
        ),
        (
            [(MemoryKind.IMPORTED, 0, 9, 0)],
            {},
            f"it holds 9 B of memory shared by CUDA IPC, opened here, in 1 piece{NO_CHECKPOINT}",
        ),
        (
            [(MemoryKind.EXPORTED, 0, 9, 0)],
            {},
            f"it holds 9 B of memory shared by CUDA IPC, given away, in 1 piece{NO_CHECKPOINT}",
        ),
        (
            [(MemoryKind.IMPORTED, 0, 9, 3)],
            {},
            f"it holds 9 B of memory with shareable handles, imported, in 1 piece{NO_CHECKPOINT}",
        ),
        (
            [(MemoryKind.EXPORTED, 0, 9, 3)],
            {},
            f"it holds 9 B of memory with shareable handles, exported, in 1 piece{NO_CHECKPOINT}",
        ),
        (
            [(MemoryKind.EVENT, 0, 0, 0)],
            {},
            f"it holds 1 piece of events with IPC handles{NO_CHECKPOINT}",
        ),
        (
            [(MemoryKind.MULTICAST, -1, 9, 3)],
            {},
            f"it holds 9 B of multicast memory in 1 piece{NO_CHECKPOINT}",
        ),
        ([], {"graphs_with_nccl": 2}, "2 CUDA graphs (with those instantiated from them) hold NCC"),
        ([], {"missed": 4}, "4 allocations or streams did not fit into the process's page"),
        (
            [(MemoryKind.DEVICE, 0, 9, 0)],
            {"driver": 12040},
            "its driver is of CUDA 12.4, which cannot",
        ),
    ],
)
def test_what_cannot_be_restored_is_said_with_what_to_do(
    tmp_path: Path, rows: list[Row], ledger: dict[str, Any], what: str
) -> None:
    obstacles = look(write(tmp_path / "1234", rows, **ledger)).obstacles
    assert len(obstacles) == 1
    assert obstacles[0].what.startswith(what)
    assert len(obstacles[0].hint) > 40


def test_communicators_with_what_stands_in_their_way(tmp_path: Path) -> None:
    state = look(
        write(
            tmp_path / "1234",
            [],
            [],
            [
                {
                    "id": 0xAB,
                    "parent": 0xCD,
                    "size": 8,
                    "rank": 3,
                    "name": b"tp",
                    "made_by": 115,
                    "unsafe": b"windows were exported",
                    "operations": 12,
                    "generation": 2,
                },
                {"state": 3, "unsafe": b"an ended one is in nobody's way", "device": -1},
            ],
        )
    )
    first, second = state.communicators
    assert (first.id, first.parent, first.made_by) == ("00000000000000ab", f"{0xCD:016x}", "split")
    assert (first.size, first.rank, first.operations, first.generation) == (8, 3, 12, 2)
    assert (second.id, second.state, second.device) == ("", "ended", None)
    assert [o.what for o in state.obstacles] == [
        "the communicator tp cannot be taken down: windows were exported"
    ]


def test_a_damaged_table_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "1234", [], rows=layout.ALLOCATIONS + 1)
    with pytest.raises(PageError, match="is damaged: 65537 allocations, at most 65536 fit"):
        look(path)
    path = write(tmp_path / "1234", [], rows=3)
    with pytest.raises(PageError, match=r"is not a page of the interposer: .* bytes"):
        look(path)


# ---- the command --------------------------------------------------------------------------------


@pytest.fixture
def seen(tmp_path: Path, gpt: Any) -> ProcessState:
    """gpt/1's only process, which holds managed memory."""
    (tmp_path / "pages").mkdir()
    path = write(
        tmp_path / "pages" / "1234",
        [(MemoryKind.DEVICE, 0, 3_000_000, 0), (MemoryKind.MANAGED, 0, 1_000_000, 0)],
        [(16, 0, 1)],
        [{"id": 0xAB, "size": 8, "rank": 3, "name": b"[tp]", "operations": 12}],
    )
    state = look(path)
    gpt.processes["gpt/1"] = [state]
    return state


def test_a_capsule_is_shown(gpt: Any, seen: ProcessState, call: Call) -> None:
    code, out, err = call("inspect", "gpt/1")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0].startswith("gpt/1 on h1: rank 3, pid 1234 (py")
    assert lines[0].endswith(", CUDA driver 13.0")
    assert "GPU 0: 4.00 MB, 1 stream, 1 with communication" in lines
    assert "3 events, 2 graphs; 9 allocations so far, 2 freed" in lines
    assert "GPU 0 device 1 3.00 MB" in lines
    assert "[tp] nccl live 3 of 8 0 12" in lines
    managed = "it holds 1.00 MB of managed memory in 1 piece, which the driver cannot checkpoint"
    assert f"in the way: {managed}" in lines
    assert lines[-1].startswith("hint: the driver cannot take a checkpoint of it")
    assert "00000000000000ab" not in out
    code, out, _ = call("inspect", "gpt/1", "-o", "wide")
    assert "00000000000000ab" in out
    assert "gloo.allreduce 7" in [" ".join(line.split()) for line in out.splitlines()]


def test_a_job_is_all_of_its_capsules(gpt: Any, seen: ProcessState, call: Call) -> None:
    code, out, err = call("inspect", "gpt")
    assert (code, err) == (0, "")
    assert "gpt/0 on h0: no process of it has called a collective or CUDA yet" in out
    assert "gpt/1 on h1: rank 3" in out


def test_a_script_gets_all_of_it(gpt: Any, seen: ProcessState, call: Call) -> None:
    code, out, _ = call("inspect", "gpt", "-o", "json")
    assert code == 0
    first, second = json.loads(out)["capsules"]
    assert first == {"capsule": "gpt/0", "host": "h0", "processes": []}
    (process,) = second["processes"]
    assert process["rank"] == seen.rank
    assert process["memory"][1] == {
        "device": 0,
        "kind": "managed",
        "count": 1,
        "bytes": 1_000_000,
    }
    assert [o["what"] for o in process["obstacles"]] == [seen.obstacles[0].what]


def test_nothing_of_that_name(gpt: Any, call: Call) -> None:
    code, out, err = call("inspect", "gtp")
    assert (code, out) == (4, "")
    assert err == 'error: no job "gtp"\nhint: did you mean gpt? there are: gpt\n'
    code, out, err = call("inspect", "gpt/7")
    assert (code, out) == (4, "")
    assert err.startswith('error: no capsule "gpt/7"\n')
