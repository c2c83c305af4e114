# SPDX-License-Identifier: Apache-2.0
"""Reads the interposer's pages: what each process of a job reports about itself.

The job's own user may write to the directory of the pages. So this module trusts nothing there: it
follows no link, waits for no pipe and believes no size. It reads by pread, because a truncated file
would be a SIGBUS in a mapping.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import LiveshiftError
from . import layout
from .layout import text_of


class PageError(LiveshiftError):
    """A file is not a page, or is one whose layout this version of liveshift doesn't know."""


@dataclass(frozen=True, slots=True)
class Clock:
    """One clock's row; see struct liveshift_clock."""

    row: int
    id: int
    announced: int
    returned: int
    raised: int
    target: int
    communicator: int
    sender: int
    receiver: int
    owner: int
    kind: int
    blocking: int


@dataclass(frozen=True, slots=True)
class Communicator:
    """One communicator's row; see struct liveshift_communicator."""

    row: int
    state: layout.CommunicatorState
    library: layout.Library
    id: int
    parent: int
    size: int
    rank: int
    device: int | None
    made_by: str
    ordinal: int
    generation: int
    name: str
    unsafe: str
    fresh_id: bytes
    fresh_attempt: int
    operations: int


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream's row; see struct liveshift_stream. Handles 1 and 2 are default streams."""

    handle: int
    device: int
    flags: int
    priority: int
    use: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation's row; see struct liveshift_allocation. ``kind``: a layout.MemoryKind, or a
    number that only a later version of liveshift knows."""

    address: int
    size: int
    handle: int
    stream: int
    kind: int
    device: int
    flags: int
    serial: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """A thread at the gate. ``tid``: gettid() in the capsule. ``state``: armed, parked, pending,
    closed, or coming if the row has no state yet."""

    tid: int
    state: str
    clock: int
    wants: int
    kind: int


@dataclass(frozen=True)
class Page:
    """One process's page at the moment of reading: which process it is, and how far it has come.

    ``created_ns`` is CLOCK_MONOTONIC of the process's own time namespace. If it changes under the
    same ``pid``, a new program runs, whose counters began at 0. ``rank``, ``world_size`` and
    ``local_rank`` are None if the job's environment doesn't have them. ``begun``: how many
    operations have begun, by name.
    """

    pid: int
    rank: int | None
    world_size: int | None
    local_rank: int | None
    created_ns: int
    version: str
    command: str
    begun: dict[str, int]
    finished: int

    @property
    def started(self) -> int:
        """Operations begun, of all kinds."""
        return sum(self.begun.values())


_TABLES = {
    "clocks": (layout.CLOCKS_AT, layout.CLOCK, layout.CLOCKS),
    "communicators": (layout.COMMUNICATORS_AT, layout.COMMUNICATOR, layout.COMMUNICATORS),
    "streams": (layout.STREAMS_AT, layout.STREAM, layout.STREAMS),
}


_AT = layout.CLOCK.offsets["returned"] - 8
_RETURNED = struct.Struct(f"<Q{_AT}xQ{layout.CLOCK.size - _AT - 16}x")
"""A clock's id and ``returned``, without the rest of its row: the agent sums them at each
heartbeat."""


class PageFile:
    """An open page. Methods read the page as it is now, and raise PageError if it is damaged."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path
        raw = self.raw(0, layout.HEADER_SIZE)
        self.identity: dict[str, Any] = layout.IDENTITY.unpack(raw)
        self._check_identity()
        end = layout.COUNTERS_AT + self.identity["kinds"] * layout.COUNTER.size
        self.kinds = [text_of(k) for k, _ in layout.COUNTER.rows(raw[layout.COUNTERS_AT : end])]

    @property
    def pid(self) -> int:
        return int(self.identity["pid"])

    @property
    def rank(self) -> int | None:
        return _or_none(self.identity["rank"])

    def close(self) -> None:
        """Close the file. May be called again. Later reads raise PageError, and never read another
        file that gets the same descriptor number."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def raw(self, at: int, length: int) -> bytes:
        """Read exactly these bytes. Raises PageError if the file is shorter or can't be read."""
        try:
            raw = os.pread(self.fd, length, at)
        except OSError as error:
            raise PageError(f"cannot read the page {self.path}: {error.strerror}") from error
        if len(raw) < length:
            raise PageError(
                f"{self.path} is not a page of the interposer: "
                f"{at + len(raw)} of {at + length} bytes"
            )
        return raw

    def _check_identity(self) -> None:
        magic, number = self.identity["magic"], self.identity["layout"]
        if magic != layout.MAGIC:
            raise PageError(
                f"{self.path} is not a page of the interposer: it begins with {magic!r}"
            )
        if number != layout.LAYOUT:
            raise PageError(
                f"{self.path} has page layout {number}; "
                f"this version of liveshift reads {layout.LAYOUT}",
                hint="The job runs with the interposer of another version of liveshift, and keeps "
                "it until it ends.",
            )
        kinds = self.identity["kinds"]
        if kinds > layout.COUNTERS:
            raise PageError(
                f"{self.path} is damaged: {kinds} kinds of operations, "
                f"at most {layout.COUNTERS} fit"
            )

    def page(self) -> Page:
        """Which process this is, and how far it has come."""
        who, begun = self.identity, self._begun()
        tables = layout.TABLES.unpack(self.raw(layout.TABLES_AT, layout.TABLES.size))
        finished = int(tables["retired"]) + int(self.answer()["unidentified"])
        return Page(
            pid=who["pid"],
            rank=_or_none(who["rank"]),
            world_size=_or_none(who["world_size"]),
            local_rank=_or_none(who["local_rank"]),
            created_ns=who["created_ns"],
            version=text_of(who["version"]),
            command=text_of(who["command"]),
            begun=begun,
            finished=finished
            + sum(n for id_, n in _RETURNED.iter_unpack(self._table("clocks")) if id_),
        )

    def rows(self, name: str) -> int:
        """How many rows of a table have been used."""
        used = layout.TABLES.unpack(self.raw(layout.TABLES_AT, layout.TABLES.size))
        return int(used[name])

    def _begun(self) -> dict[str, int]:
        raw = self.raw(layout.COUNTERS_AT, len(self.kinds) * layout.COUNTER.size)
        return dict(zip(self.kinds, (n for _, n in layout.COUNTER.rows(raw)), strict=True))

    def nccl_unseen(self) -> bool:
        """Whether the process used NCCL although the page has no row for an NCCL communicator, not
        even for an ended or unfinished one."""
        library = layout.COMMUNICATOR.fields.index(("library", "I"))
        rows = layout.COMMUNICATOR.rows(self._table("communicators"))
        if any(row[library] == layout.Library.NCCL for row in rows):
            return False
        return any(count and kind.startswith("nccl.") for kind, count in self._begun().items())

    def answer(self) -> dict[str, Any]:
        """struct liveshift_answer."""
        return layout.ANSWER.unpack(self.raw(layout.ANSWER_AT, layout.ANSWER.size))

    def order(self) -> dict[str, Any]:
        """struct liveshift_order, as the agent wrote it last."""
        return layout.ORDER.unpack(self.raw(layout.ORDER_AT, layout.ORDER.size))

    def ledger(self) -> dict[str, Any]:
        """struct liveshift_ledger."""
        return layout.LEDGER.unpack(self.raw(layout.LEDGER_AT, layout.LEDGER.size))

    def clocks(self) -> list[Clock]:
        """The clocks in use."""
        rows = enumerate(layout.CLOCK.rows(self._table("clocks")))
        return [Clock(row, *fields) for row, fields in rows if fields[0]]

    def communicators(self) -> list[Communicator]:
        """All communicators that were made. Ended ones stay until their row is used again."""
        raw = self._table("communicators")
        found = []
        for row in range(len(raw) // layout.COMMUNICATOR.size):
            seen: dict[str, Any] = layout.COMMUNICATOR.unpack(raw, row * layout.COMMUNICATOR.size)
            if seen["state"] == layout.CommunicatorState.FREE:
                continue
            try:
                found.append(_communicator(row, seen))
            except ValueError as error:
                raise PageError(f"{self.path} is damaged: communicator {row}: {error}") from error
        return found

    def streams(self) -> list[Stream]:
        """The streams in the table, without those that are being destroyed."""
        raw = self._table("streams")
        none = (0, 0xFFFF_FFFF_FFFF_FFFF)
        return [Stream(*fields) for fields in layout.STREAM.rows(raw) if fields[0] not in none]

    def allocations(self) -> list[Allocation]:
        """The process's CUDA allocations. The list may or may not have those that are made or freed
        while we read."""
        rows = int(self.ledger()["rows"])
        if rows > layout.ALLOCATIONS:
            raise PageError(
                f"{self.path} is damaged: {rows} allocations, at most {layout.ALLOCATIONS} fit"
            )
        raw = self.raw(layout.ALLOCATIONS_AT, rows * layout.ALLOCATION.size)
        kind = layout.ALLOCATION.fields.index(("kind", "I"))
        return [Allocation(*fields[:-1]) for fields in layout.ALLOCATION.rows(raw) if fields[kind]]

    def waiting(self) -> list[Waiting]:
        """The threads at the gate."""
        raw = self.raw(layout.THREADS_AT, layout.THREADS * layout.THREAD.size)
        states = {ord("A"): "armed", ord("P"): "parked", ord("O"): "pending", ord("C"): "closed"}
        return [
            Waiting(int(tid), states.get(int(state), "coming"), int(clock), int(wants), int(kind))
            for tid, state, clock, wants, kind, _ in layout.THREAD.rows(raw)
            if tid
        ]

    def _table(self, name: str) -> bytes:
        """The bytes of those rows."""
        at, record, most = _TABLES[name]
        count = self.rows(name)
        if count > most:
            raise PageError(f"{self.path} is damaged: {count} {name}, at most {most} fit")
        return self.raw(at, count * record.size)


def _communicator(row: int, seen: dict[str, Any]) -> Communicator:
    return Communicator(
        row=row,
        state=layout.CommunicatorState(seen["state"]),
        library=layout.Library(seen["library"]),
        id=seen["id"],
        parent=seen["parent"],
        size=seen["size"],
        rank=seen["rank"],
        device=_or_none(seen["device"]),
        made_by=chr(seen["made_by"]) if 32 < seen["made_by"] < 127 else "?",
        ordinal=seen["ordinal"],
        generation=seen["generation"],
        name=text_of(seen["name"]),
        unsafe=text_of(seen["unsafe"]),
        fresh_id=seen["fresh_id"],
        fresh_attempt=seen["fresh_attempt"],
        operations=seen["operations"],
    )


def open_page(path: Path) -> PageFile:
    """Open a page; the caller closes it. Raises FileNotFoundError, PageError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise PageError(f"cannot open the page {path}: {error.strerror}") from error
    try:
        seen = os.fstat(fd)
        if not stat.S_ISREG(seen.st_mode):
            raise PageError(f"{path} is not a page of the interposer: not a regular file")
        if seen.st_nlink > 1:  # 0: an exec'ed program has just made its own page
            raise PageError(f"{path} is not a page of the interposer: it has another name too")
        return PageFile(fd, path)
    except BaseException:
        os.close(fd)
        raise


@contextmanager
def opened(path: Path) -> Iterator[PageFile]:
    """Open a page for a with block. Raises FileNotFoundError, PageError."""
    file = open_page(path)
    try:
        yield file
    finally:
        file.close()


def read(path: Path) -> Page:
    """Read one page.

    Raises FileNotFoundError when there is none, PageError when the file is something else, can't be
    read, or has a layout other than ours.
    """
    with opened(path) as file:
        return file.page()


def _or_none(number: int) -> int | None:
    return None if number < 0 else number
