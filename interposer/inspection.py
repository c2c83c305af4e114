# SPDX-License-Identifier: Apache-2.0
"""Reads from a running process's page what it holds of its GPUs and which communicators it has.

The driver's checkpoint refuses some of that, or fails on it and the process is lost (see NVIDIA's
cuda-checkpoint, README; its issues 44 and 56). So liveshift must know it, in words, before anything
is frozen. Sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .. import units
from .layout import CommunicatorState, MemoryKind
from .page import Allocation, Communicator, PageFile

CHECKPOINTS = 12080
"""The CUDA version of the first driver (570) whose API can take a checkpoint."""

KINDS: dict[int, str] = {
    MemoryKind.DEVICE: "device",
    MemoryKind.ARENA: "device, movable",
    MemoryKind.POOL: "device, pool",
    MemoryKind.NCCL: "device, NCCL",
    MemoryKind.MANAGED: "managed",
    MemoryKind.PHYSICAL: "physical",
    MemoryKind.MAPPED: "mapped",
    MemoryKind.RESERVED: "reserved addresses",
    MemoryKind.IMPORTED: "imported",
    MemoryKind.EXPORTED: "exported",
    MemoryKind.MULTICAST: "multicast",
    MemoryKind.PINNED: "host, pinned",
    MemoryKind.REGISTERED: "host, registered",
    MemoryKind.EVENT: "IPC events",
}
"""Words for the kinds of memory, in the order in which a table lists them."""

TAKES_ROOM = frozenset(
    {
        MemoryKind.DEVICE,
        MemoryKind.ARENA,
        MemoryKind.POOL,
        MemoryKind.MANAGED,
        MemoryKind.PHYSICAL,
        MemoryKind.NCCL,
    }
)
"""Kinds that take space in a GPU's memory and belong to this process. Physical memory counts once,
and not again for each mapping."""

ON_HOST = frozenset({MemoryKind.PINNED, MemoryKind.REGISTERED})
COMM_STATES = {
    CommunicatorState.LIVE: "live",
    CommunicatorState.DOWN: "down",
    CommunicatorState.ENDED: "ended",
}


@dataclass(frozen=True)
class AllocationsHeld:
    """Allocations of one kind on one device; ``device`` None: on no device, or host memory."""

    device: int | None
    kind: str
    count: int
    bytes: int


@dataclass(frozen=True)
class DeviceUse:
    """A process's use of a device. ``bytes``: the device memory that the interposer saw it
    allocate."""

    device: int
    bytes: int
    streams: int
    carried: int
    """Streams on which communication was enqueued since their last drain."""
    capturing: int


@dataclass(frozen=True)
class Peers:
    """A communicator. ``id`` is the same number, in hex, on all members; "" if they have none."""

    library: str
    name: str
    id: str
    parent: str
    state: str
    size: int
    rank: int
    device: int | None
    made_by: str
    ordinal: int
    generation: int
    operations: int


@dataclass(frozen=True)
class ProcessObstacle:
    """Why the process's device state can't be taken away and given back, and what to do."""

    what: str
    hint: str


@dataclass(frozen=True)
class ProcessState:
    """One process. ``driver``: the driver's CUDA version (13000); 0: it has allocated nothing.

    ``missed``: how many allocations and streams the other fields lack, since the page was full.
    """

    pid: int
    rank: int | None
    local_rank: int | None
    command: str
    version: str
    driver: int
    begun: dict[str, int]
    finished: int
    memory: list[AllocationsHeld]
    devices: list[DeviceUse]
    communicators: list[Peers]
    events: int
    graphs: int
    graph_execs: int
    graphs_with_nccl: int
    made: int
    freed: int
    missed: int
    obstacles: list[ProcessObstacle]


def inspect(page: PageFile) -> ProcessState:
    """Everything that a page says about its process. Raises PageError if the page is damaged."""
    seen, ledger = page.page(), page.ledger()
    allocations, communicators = page.allocations(), page.communicators()
    return ProcessState(
        pid=seen.pid,
        rank=seen.rank,
        local_rank=seen.local_rank,
        command=seen.command,
        version=seen.version,
        driver=ledger["driver"],
        begun={kind: count for kind, count in seen.begun.items() if count},
        finished=seen.finished,
        memory=_memory(allocations),
        devices=_devices(page, allocations),
        communicators=[_peers(row) for row in communicators],
        events=ledger["events"],
        graphs=ledger["graphs"],
        graph_execs=ledger["graph_execs"],
        graphs_with_nccl=ledger["graphs_with_nccl"],
        made=ledger["made"],
        freed=ledger["freed"],
        missed=ledger["missed"],
        obstacles=list(obstacles(ledger, allocations, communicators)),
    )


def obstacles(
    ledger: dict[str, int], allocations: list[Allocation], communicators: list[Communicator]
) -> Iterator[ProcessObstacle]:
    """The reasons why the driver can't checkpoint the process's device state."""
    if allocations and 0 < ledger["driver"] < CHECKPOINTS:
        yield ProcessObstacle(
            f"its driver is of CUDA {_dotted(ledger['driver'])}, which cannot take a checkpoint",
            "install a driver of CUDA 12.8 (570) or later; moving to another GPU needs 13.0 (580)",
        )
    for kind, what, hint in _REFUSED:
        rows = [row for row in allocations if row.kind == kind and _is(what, row)]
        if rows:
            yield ProcessObstacle(
                f"it holds {_several(rows, what)}, which the driver cannot checkpoint", hint
            )
    if count := ledger["graphs_with_nccl"]:
        yield ProcessObstacle(
            f"{count} CUDA graphs (with those instantiated from them) hold NCCL operations",
            "a communicator cannot be taken down while they exist: capture computation only, or"
            " destroy them before a move (torch.cuda.CUDAGraph.reset)",
        )
    if count := ledger["missed"]:
        yield ProcessObstacle(
            f"{count} allocations or streams did not fit into the process's page",
            "their kinds are unknown: let the job allocate in larger pieces (PyTorch does), and"
            " give its /dev/shm more space",
        )
    for row in communicators:
        if row.state is not CommunicatorState.ENDED and row.unsafe:
            label = row.name or f"number {row.ordinal}"
            yield ProcessObstacle(
                f"the communicator {label} cannot be taken down: {row.unsafe}",
                "undo in the program what the message names, or leave it out",
            )


IPC, SHAREABLE = "memory shared by CUDA IPC", "memory with shareable handles"
_PROCESSES = (
    "no driver before 610 can restore what processes share: turn off what does it"
    " (torch.multiprocessing with CUDA tensors, custom all-reduce kernels, symmetric memory)"
)
_REFUSED = (
    (
        MemoryKind.MANAGED,
        "managed memory",
        "the driver cannot take a checkpoint of it: allocate with cudaMalloc, not cudaMallocManaged"
        " (turn off unified-memory options of the libraries in use)",
    ),
    (MemoryKind.IMPORTED, f"{IPC}, opened here", _PROCESSES),
    (MemoryKind.EXPORTED, f"{IPC}, given away", _PROCESSES),
    (MemoryKind.IMPORTED, f"{SHAREABLE}, imported", _PROCESSES),
    (MemoryKind.EXPORTED, f"{SHAREABLE}, exported", _PROCESSES),
    (MemoryKind.EVENT, "events with IPC handles", _PROCESSES),
    (
        MemoryKind.MULTICAST,
        "multicast memory",
        "it cannot be restored: turn off symmetric memory and NVLS (NCCL_NVLS_ENABLE=0)",
    ),
)


def _is(what: str, row: Allocation) -> bool:
    """Whether the row is memory of this sort. Imports and exports are of two sorts, IPC and
    shareable; only the shareable ones have a handle (page.h)."""
    if row.kind not in (MemoryKind.IMPORTED, MemoryKind.EXPORTED):
        return True
    return what.startswith(SHAREABLE if row.handle else IPC)


def _several(rows: list[Allocation], what: str) -> str:
    size = sum(row.size for row in rows)
    number = "1 piece" if len(rows) == 1 else f"{len(rows)} pieces"
    what += "," if "," in what else ""  # "memory …, opened here, in 1 piece"
    return f"{units.size(size)} of {what} in {number}" if size else f"{number} of {what}"


def _memory(allocations: Iterable[Allocation]) -> list[AllocationsHeld]:
    sums: dict[tuple[int, int], tuple[int, int]] = {}
    for row in allocations:
        device = -1 if row.kind in ON_HOST else row.device
        count, size = sums.get((device, row.kind), (0, 0))
        sums[device, row.kind] = (count + 1, size + row.size)
    order: dict[int, int] = {kind: place for place, kind in enumerate(KINDS)}
    keys = sorted(sums, key=lambda key: (key[0] < 0, key[0], order.get(key[1], 99)))
    return [
        AllocationsHeld(None if device < 0 else device, _kind(kind), *sums[device, kind])
        for device, kind in keys
    ]


def _kind(kind: int) -> str:
    return KINDS.get(kind, f"kind {kind}")


def _devices(page: PageFile, allocations: Iterable[Allocation]) -> list[DeviceUse]:
    sizes: dict[int, int] = {}
    for row in allocations:
        if row.device >= 0:
            own = row.size if row.kind in TAKES_ROOM else 0
            sizes[row.device] = sizes.get(row.device, 0) + own
    streams = page.streams()
    numbers = sorted({*sizes, *(s.device for s in streams if s.device >= 0)})
    return [
        DeviceUse(
            device=number,
            bytes=sizes.get(number, 0),
            streams=sum(s.device == number for s in streams),
            carried=sum(s.device == number and bool(s.use & 1) for s in streams),
            capturing=sum(s.device == number and bool(s.use & 2) for s in streams),
        )
        for number in numbers
    ]


MADE_BY = {
    "I": "init",
    "A": "initAll",
    "S": "scalable",
    "s": "split",
    "k": "shrink",
    "g": "grow",
    "G": "full mesh",
}


def _peers(row: Communicator) -> Peers:
    return Peers(
        library=row.library.name.lower(),
        name=row.name,
        id=f"{row.id:016x}" if row.id else "",
        parent=f"{row.parent:016x}" if row.parent else "",
        state=COMM_STATES.get(row.state, str(row.state)),
        size=row.size,
        rank=row.rank,
        device=row.device,
        made_by=MADE_BY.get(row.made_by, row.made_by),
        ordinal=row.ordinal,
        generation=row.generation,
        operations=row.operations,
    )


def _dotted(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
