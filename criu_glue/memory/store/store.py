# SPDX-License-Identifier: Apache-2.0
"""The pages that have come for one migration, in a file in memory, beside CRIU's images.

The source sends pages while the job runs, again when they were written again, and at last, at
standstill, the table of what exists: only what is in both makes up the image. All that is
proportional to the size of memory happens in C (store.h); a chunk's form is told in chunk.h.
"""

from __future__ import annotations

import os
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ....errors import StepFailed
from ..engine import CHUNK, PAGE
from . import store_library

PAGES_FILE = "memory"
INDEX_FILE = "memory.index"

PROCESSES_MOST = 32768  # store.h

TABLE_LIMIT = 256 << 20
"""Bytes of a table: 16 for each run, of which the most torn memory has millions."""

_MAGIC = b"LSMI\0\0\0\1"
_INDEX_HEAD = struct.Struct("<8sQI4x")
_IMAGE_HEAD = struct.Struct("<III4x")
_BUFFERS = 8

Sink = Callable[[memoryview, Callable[[], None]], None]
"""Takes a chunk, which is its own until it calls the second argument."""


class ProcessTable(msgspec.Struct, forbid_unknown_fields=True):
    """The pages of one process that exist: ``runs`` of (address, pages), ordered, two little-endian
    64-bit numbers each."""

    incarnation: int
    runs: bytes


Table = Mapping[int, ProcessTable]
"""By inner pid."""


class Want(NamedTuple):
    """Pages that the source thought to be here already: they have to come after all."""

    pid: int
    address: int
    pages: int


def read_table(raw: bytes | memoryview) -> dict[int, ProcessTable]:
    """The table as it comes over the wire (MessagePack); raises StepFailed."""
    if (count := _entries(bytes(raw[:5]))) > PROCESSES_MOST:
        raise StepFailed("ship", f"the table of memory names {count} processes: too many")
    try:
        return msgspec.msgpack.decode(raw, type=dict[int, ProcessTable])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise StepFailed("ship", f"the table of memory is not understood: {error}") from error


def _entries(head: bytes) -> int:
    """How many a map of MessagePack says that it has, before any of them is made; 0: it is none.
    What comes from another host is not to take more memory than it has bytes, or not much."""
    kind = head[0] if head else 0
    if kind >> 4 == 8:
        return kind & 15
    size = {0xDE: 2, 0xDF: 4}.get(kind, 0)
    return int.from_bytes(head[1 : 1 + size], "big")


class MemoryStore:
    """``directory`` holds it, and belongs to one migration. Methods block; raise StepFailed."""

    def __init__(self, directory: Path, limit: int, *, fresh: bool) -> None:
        """``limit``: bytes of memory that the source has announced. See create and load."""
        self._ffi, self._calls = store_library.load()
        self._directory = directory
        self.limit = limit
        self._open = threading.Lock()
        self._users = 0
        self._closed = False
        self._loaded = not fresh
        self.written = 0.0  # when a chunk last began to be written, or was; monotonic seconds
        self._why = f"the memory store in {directory}"
        if not 0 <= limit < 1 << 44:
            raise StepFailed("ship", f"{limit} bytes of memory were announced: no store holds that")
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            if fresh:
                (directory / PAGES_FILE).unlink(missing_ok=True)
                (directory / INDEX_FILE).unlink(missing_ok=True)
                flags |= os.O_CREAT | os.O_EXCL
            fd = os.open(directory / PAGES_FILE, flags, 0o600)
        except OSError as error:
            raise StepFailed("ship", f"{self._why} cannot be opened: {error}") from error
        why = self._ffi.new("char[]", store_library.WHY)
        self._store = self._calls.store_open(fd, -(-limit // PAGE), why)
        if not self._store:
            os.close(fd)
            raise StepFailed("ship", self._said(why))

    @classmethod
    def create(cls, directory: Path, limit: int) -> MemoryStore:
        """An empty one; what another has left there is gone."""
        return cls(directory, limit, fresh=True)

    @classmethod
    def load(cls, directory: Path) -> MemoryStore:
        """What :meth:`save` has written, for an agent that was started anew. It is complete:
        nothing more is taken."""
        path = directory / INDEX_FILE
        try:
            raw = path.read_bytes()
            magic, limit, count = _INDEX_HEAD.unpack_from(raw)
            if magic != _MAGIC:
                raise ValueError(f"it begins with {magic!r}")
            store = cls(directory, limit, fresh=False)
        except (OSError, ValueError, struct.error) as error:
            raise StepFailed("restore", f"{path} cannot be read: {error}") from error
        try:
            store._load(memoryview(raw)[_INDEX_HEAD.size :], count)
        except BaseException as error:
            store.close()
            if isinstance(error, (ValueError, struct.error)):
                raise StepFailed("restore", f"{path} is damaged: {error}") from error
            raise
        return store

    def close(self) -> None:
        """Let go of it, once nobody uses it any more; the files stay. May be called again."""
        with self._open:
            self._closed = True
            self._let_go()

    def write(self, chunk: bytes | memoryview) -> None:
        """Take one chunk; raises StepFailed for one that is none, or more than was announced."""
        if self._loaded:
            raise StepFailed("ship", "nothing more is taken for this memory: it is complete")
        self.written = time.monotonic()
        with self.in_use() as store:
            self._do("ship", self._calls.store_write, store, self._bytes(chunk), len(chunk))
        self.written = time.monotonic()  # not before it can be found

    def reserve(self, size: int) -> None:
        """Have so many bytes more in memory before they are needed; raises StepFailed when there
        is no room for them."""
        with self.in_use() as store:
            self._do("ship", self._calls.store_reserve, store, max(0, size))

    def end(self, table: Table) -> None:
        """These are the pages that exist. Raises StepFailed for one that has not come.

        May be called again after more has come.
        """
        with self.in_use() as store:
            self._wanted(store)  # what a reference meant may have come later than that
            self._calls.store_images_clear(store)
            for pid, process in table.items():
                if len(process.runs) % 16 or len(process.runs) > TABLE_LIMIT:
                    size = len(process.runs)
                    raise StepFailed("ship", f"the table of memory has invalid runs ({size} bytes)")
                if not (0 < pid < 1 << 32 and 0 <= process.incarnation < 1 << 32):
                    who = f"process {pid}, {process.incarnation}"
                    raise StepFailed("ship", f"the table of memory names an invalid {who}")
                self._do(
                    "ship", self._calls.store_image, store, pid, process.incarnation,
                    self._ffi.cast("uint64_t *", self._bytes(process.runs)),
                    len(process.runs) // 16,
                )  # fmt: skip

    def wants(self) -> list[Want]:
        """The pages that were to be found here by their content and were not, even now."""
        found: list[Want] = []
        with self.in_use() as store:
            for pid, address in sorted((w.pid, w.address) for w in self._wanted(store)):
                if found and found[-1][:2] == (pid, address - found[-1].pages * PAGE):
                    found[-1] = Want(pid, found[-1].address, found[-1].pages + 1)
                else:
                    found.append(Want(pid, address, 1))
        return found

    @property
    def absent(self) -> int:
        """Bytes of the image that lie only where they were put in place (Prefill); after
        :meth:`end`. Of such a store no agent's next life restores, and nobody else either."""
        with self.in_use() as store:
            return int(self._calls.store_absent(store, self._ffi.NULL)) * PAGE

    @property
    def spent(self) -> bool:
        """Whether a fill was given what it holds."""
        with self.in_use() as store:
            return bool(self._calls.store_spent(store))

    def spend(self) -> None:
        """What a fill puts in its place is no longer kept here from now on: for a host that has no
        memory for it twice. There can be no fill after that one; raises StepFailed then."""
        with self.in_use() as store:
            if self._calls.store_spent(store):
                raise StepFailed("restore", f"{self._why} was used up by an attempt that failed")
            (self._directory / INDEX_FILE).unlink(missing_ok=True)  # first: nobody loads it now
            self._calls.store_spend(store)

    def save(self) -> None:
        """Write down what :meth:`load` needs, beside the pages; after :meth:`end`. Nothing where
        part of it lies elsewhere."""
        path = self._directory / INDEX_FILE
        path.unlink(missing_ok=True)
        if self.absent:
            return
        fresh = path.with_suffix(".new")
        with self.in_use() as store, fresh.open("wb") as file:
            images = self._images(store)
            file.write(_INDEX_HEAD.pack(_MAGIC, self.limit, len(images)))
            for image in images:
                file.write(_IMAGE_HEAD.pack(image.pid, image.incarnation, image.extents))
                if image.extents:
                    file.write(self._ffi.buffer(image.extent, image.extents * 16))
        fresh.rename(path)

    def forward(self, sink: Sink) -> None:
        """All of the image again as chunks, for another host; after :meth:`end`. Raises StepFailed
        where not all of it is here any more."""
        if self.spent or self.absent:
            raise StepFailed(
                "ship", f"{self._why} is not whole: this host had no memory for all of it twice"
            )
        free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(_BUFFERS):
            free.put(memoryview(bytearray(CHUNK)))
        at = self._ffi.new("struct forwarding *")
        with self.in_use() as store:
            while True:
                buffer = free.get()
                chunk = self._ffi.from_buffer("uint8_t[]", buffer, require_writable=True)
                length = self._calls.store_forward(store, at, chunk)
                if not length:
                    return
                sink(buffer[:length], lambda buffer=buffer: free.put(buffer))  # type: ignore[misc]

    @property
    def table(self) -> dict[int, ProcessTable]:
        """What :meth:`end` was told, for who takes the image over."""
        found = {}
        with self.in_use() as store:
            for image in self._images(store):
                packed = self._ffi.new("uint64_t[]", 2 * image.extents + 1)
                runs = self._calls.store_runs(self._ffi.addressof(image), packed)
                found[image.pid] = ProcessTable(
                    image.incarnation, bytes(self._ffi.buffer(packed, 16 * runs))
                )
        return found

    def incarnations(self) -> dict[int, int]:
        """Of each process in the table, by inner pid."""
        with self.in_use() as store:
            return {image.pid: image.incarnation for image in self._images(store)}

    def pages_file(self) -> int:
        """A descriptor of the file with the pages; the caller's."""
        return os.open(self._directory / PAGES_FILE, os.O_RDWR | os.O_CLOEXEC)

    @property
    def size(self) -> int:
        """Of memory that the image consists of; after :meth:`end`."""
        with self.in_use() as store:
            return sum(int(image.pages) for image in self._images(store)) * PAGE

    @contextmanager
    def in_use(self) -> Iterator[Any]:
        """The C object, which is not closed meanwhile. Raises StepFailed for a closed one."""
        with self._open:
            if self._closed:
                raise StepFailed("ship", f"{self._why} was closed")
            store = self._store
            self._users += 1
        try:
            yield store
        finally:
            with self._open:
                self._users -= 1
                self._let_go()

    def _let_go(self) -> None:
        if self._closed and self._users == 0 and self._store:
            store, self._store = self._store, self._ffi.NULL
            self._calls.store_close(store)

    def _load(self, rest: memoryview, count: int) -> None:
        with self.in_use() as store:
            for _ in range(count):
                pid, incarnation, extents = _IMAGE_HEAD.unpack_from(rest)
                rest = rest[_IMAGE_HEAD.size :]
                if len(rest) < extents * 16:
                    raise ValueError(f"process {pid} is cut off")
                self._do(
                    "restore", self._calls.store_image_again, store, pid, incarnation,
                    self._ffi.cast("struct extent *", self._bytes(rest)), extents,
                )  # fmt: skip
                rest = rest[extents * 16 :]
        if rest:
            raise ValueError(f"{len(rest)} bytes too many")

    def _wanted(self, store: Any) -> Sequence[Any]:
        count = self._ffi.new("uint32_t *")
        why = self._ffi.new("char[]", store_library.WHY)
        found = self._calls.store_wants(store, count, why)
        if not found:
            raise StepFailed("ship", self._said(why))
        return [found[i] for i in range(count[0])]

    def _images(self, store: Any) -> Sequence[Any]:
        count = self._ffi.new("uint32_t *")
        images = self._calls.store_images(store, count)
        return [images[i] for i in range(count[0])]

    def _bytes(self, data: bytes | memoryview) -> Any:
        return self._ffi.from_buffer("uint8_t[]", data)

    def _do(self, step: str, call: Callable[..., int], *arguments: Any) -> None:
        why = self._ffi.new("char[]", store_library.WHY)
        if call(*arguments, why) != 0:
            raise StepFailed(step, self._said(why))

    def _said(self, why: Any) -> str:
        said: bytes = self._ffi.string(why)
        return said.decode("utf-8", "replace")
