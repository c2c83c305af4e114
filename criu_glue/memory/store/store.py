# SPDX-License-Identifier: Apache-2.0
"""The store keeps the pages of one migration in a file on the tmpfs, beside CRIU's images.

The source sends pages while the job runs, and sends them again when the job has written them. At
the freeze it sends the table of the pages that exist. Each page of the table must have come. Pages
that are not in the table do not belong to the image. All work that grows with the size of memory is
done in C (store.h). chunk.h describes the form of a chunk.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

from ....errors import StepFailed
from ..engine import PAGE
from . import store_library
from .image_view import ImageView, Sink, read_images
from .page_table import TABLE_LIMIT as TABLE_LIMIT
from .page_table import ProcessTable as ProcessTable
from .page_table import Table
from .page_table import read_table as read_table

PAGES_FILE = "memory"
INDEX_FILE = "memory.index"

_MAGIC = b"LSMI\0\0\0\1"
_INDEX_HEAD = struct.Struct("<8sQI4x")


class WantedPages(NamedTuple):
    """Pages that the source only named and that the store does not have. The source must send
    them."""

    pid: int
    address: int
    pages: int


class MemoryStore:
    """The store in ``directory``, which belongs to one migration. Its methods block, and raise
    StepFailed."""

    _keeps = False  # whether the store has room for generations

    def __init__(self, directory: Path, limit: int, *, fresh: bool) -> None:
        """Use :meth:`create` or :meth:`load` instead. ``limit``: the bytes of memory that the
        source has announced."""
        self._ffi, self._calls = store_library.load()
        self._directory = directory
        self.limit = limit
        self._open = threading.Lock()
        self._users = 0
        self._closed = False
        self._loaded = not fresh
        self.written = 0.0  # when the last write of a chunk began or ended; monotonic seconds
        self.frees_after_copy = False
        """Whether a fill uses the store up (:meth:`free_after_copy`)."""
        self._why = f"the memory store in {directory}"
        if not 0 <= limit < 1 << 44:
            raise StepFailed(
                "ship", f"{limit} bytes of memory were announced, more than a store can hold"
            )
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            if fresh:
                for old in (*directory.glob(INDEX_FILE + "*"), directory / PAGES_FILE):
                    old.unlink(missing_ok=True)  # the indexes first, so no agent loads them
                flags |= os.O_CREAT | os.O_EXCL
            fd = os.open(directory / PAGES_FILE, flags, 0o600)
        except OSError as error:
            raise StepFailed("ship", f"{self._why} cannot be opened: {error}") from error
        why = self._ffi.new("char[]", store_library.WHY)
        self._store = self._calls.store_open(fd, -(-limit // PAGE), self._keeps, why)
        if not self._store:
            os.close(fd)
            raise StepFailed("ship", self._said(why))

    @classmethod
    def create(cls, directory: Path, limit: int) -> Self:
        """Make an empty store. It removes a store that an earlier migration left there."""
        return cls(directory, limit, fresh=True)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Load the store that :meth:`save` has written, after the agent was restarted. It is
        complete, so it takes no more chunks."""
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
        """Close the store once no thread uses it any more. The files stay. A second call is
        allowed."""
        with self._open:
            self._closed = True
            self._let_go()

    def write(self, chunk: bytes | memoryview) -> None:
        """Take one chunk. Raises StepFailed for an invalid one, or for more than was announced."""
        if self._loaded:
            raise StepFailed("ship", "the image of memory is complete and takes no more pages")
        self.written = time.monotonic()
        with self.in_use() as store:
            self._do("ship", self._calls.store_write, store, self._bytes(chunk), len(chunk))
        self.written = time.monotonic()  # set it again only once the pages can be found

    def reserve(self, size: int) -> None:
        """Allocate this many more bytes of memory before they are needed. Raises StepFailed when
        they do not fit."""
        with self.in_use() as store:
            self._do("ship", self._calls.store_reserve, store, max(0, size))

    def end(self, table: Table) -> None:
        """Take the table. Raises StepFailed if a page of it has not come.

        The caller may call it again after more chunks have come.
        """
        with self.in_use() as store:
            self._wanted(store)  # a named page may have come later than its reference
            self._calls.store_images_clear(store)
            for pid, process in table.items():
                if len(process.runs) % 16 or len(process.runs) > TABLE_LIMIT:
                    size = len(process.runs)
                    raise StepFailed("ship", f"the table of memory has invalid runs ({size} bytes)")
                if not (0 < pid < 1 << 32 and 0 <= process.incarnation < 1 << 32):
                    who = f"process {pid}, {process.incarnation}"
                    raise StepFailed("ship", f"the table of memory names an invalid {who}")
                self._do(
                    "ship",
                    self._calls.store_image,
                    store,
                    pid,
                    process.incarnation,
                    self._ffi.cast("uint64_t *", self._bytes(process.runs)),
                    len(process.runs) // 16,
                )

    def wants(self) -> list[WantedPages]:
        """Return the pages that references named and that the store still does not have."""
        found: list[WantedPages] = []
        with self.in_use() as store:
            for pid, address in sorted((w.pid, w.address) for w in self._wanted(store)):
                if found and found[-1][:2] == (pid, address - found[-1].pages * PAGE):
                    found[-1] = WantedPages(pid, found[-1].address, found[-1].pages + 1)
                else:
                    found.append(WantedPages(pid, address, 1))
        return found

    @property
    def lost(self) -> int:
        """Bytes of the image that lie only in an early CRIU (Prefill); after :meth:`end`. If it is
        not 0, the store cannot be saved or forwarded, so no other agent can restore from it."""
        with self.in_use() as store:
            return int(self._calls.store_lost(store)) * PAGE

    @property
    def lent(self) -> bool:
        """Whether a holder has the same pages (lent_store.py). Then they must stay as they are."""
        with contextlib.suppress(FileNotFoundError):
            return (self._directory / PAGES_FILE).stat().st_nlink > 1
        return False

    def free_after_copy(self) -> None:
        """From now on the store frees each page that a fill has put in its place. This is for a
        host that has no memory for the pages twice. No other fill is possible after that one: a
        second call raises StepFailed, as does a call for pages that are lent."""
        with self.in_use() as store:
            if self.lent:
                raise StepFailed("restore", f"{self._why} is lent by a holder, which needs it")
            if self.frees_after_copy:
                raise StepFailed("restore", f"{self._why} was used up by an attempt that failed")
            (self._directory / INDEX_FILE).unlink(missing_ok=True)  # first, so no agent loads it
            self._calls.store_free_after_copy(store)
            self.frees_after_copy = True

    def save(self) -> None:
        """Write the index that :meth:`load` needs, beside the pages; after :meth:`end`. It writes
        no index if a part of the image lies only in an early CRIU."""
        (self._directory / INDEX_FILE).unlink(missing_ok=True)
        if self.lost:
            return
        with self._newest() as view:
            write_index(self._directory, self.limit, view)

    def forward(self, sink: Sink) -> None:
        """Give the whole image to ``sink`` as chunks, for another host; after :meth:`end`. Raises
        StepFailed if a part of the image is not in the store any more."""
        if self.frees_after_copy or self.lost:
            raise StepFailed(
                "ship", f"{self._why} is not whole: this host had no memory for all of it twice"
            )
        with self._newest() as view:
            view.forward(sink)

    @property
    def table(self) -> dict[int, ProcessTable]:
        """The table that :meth:`end` took, for another host that gets the image."""
        with self._newest() as view:
            return view.table

    def incarnations(self) -> dict[int, int]:
        """Return the incarnation of each process in the table, by inner pid."""
        with self._newest() as view:
            return view.incarnations()

    def pages_file(self) -> int:
        """Open the file with the pages. The caller owns the descriptor."""
        return os.open(self._directory / PAGES_FILE, os.O_RDWR | os.O_CLOEXEC)

    @property
    def size(self) -> int:
        """Bytes of memory in the image; after :meth:`end`."""
        with self._newest() as view:
            return view.size

    @contextmanager
    def in_use(self) -> Iterator[Any]:
        """Yield the C object, which stays open meanwhile. Raises StepFailed if it is closed."""
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

    @contextmanager
    def _newest(self) -> Iterator[ImageView]:
        """Yield the image of the table that :meth:`end` took."""
        with self.in_use() as store:
            count = self._ffi.new("uint32_t *")
            image = self._calls.store_images(store, count)
            yield ImageView(store, image, count[0])

    def _load(self, rest: memoryview, count: int) -> None:
        with self.in_use() as store:
            call = self._calls.store_load_image
            read_images(rest, count, lambda *image: self._do("restore", call, store, *image))

    def _wanted(self, store: Any) -> Sequence[Any]:
        count = self._ffi.new("uint32_t *")
        why = self._ffi.new("char[]", store_library.WHY)
        found = self._calls.store_wants(store, count, why)
        if not found:
            raise StepFailed("ship", self._said(why))
        return [found[i] for i in range(count[0])]

    def _bytes(self, data: bytes | memoryview) -> Any:
        return self._ffi.from_buffer("uint8_t[]", data)

    def _do(self, step: str, call: Callable[..., int], *arguments: Any) -> None:
        why = self._ffi.new("char[]", store_library.WHY)
        if call(*arguments, why) != 0:
            raise StepFailed(step, self._said(why))

    def _said(self, why: Any) -> str:
        said: bytes = self._ffi.string(why)
        return said.decode("utf-8", "replace")


def write_index(directory: Path, limit: int, view: ImageView) -> None:
    """Write the index that :meth:`MemoryStore.load` needs, for this image. Raises OSError."""
    path = directory / INDEX_FILE
    fresh = path.with_suffix(".new")
    with fresh.open("wb") as file:
        file.write(_INDEX_HEAD.pack(_MAGIC, limit, len(view.images)))
        view.write(file)
    fresh.rename(path)
