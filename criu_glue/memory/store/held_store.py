# SPDX-License-Identifier: Apache-2.0
"""A store that keeps generations: the images of several freezes of one capsule.

The pages of the next freeze come as in any store, while kept generations stay as they are and can
be sent on. Pages that are equal in several generations take memory once. The order for a holder:

1. :meth:`HeldStore.revert` to the newest generation, 0 if there is none, before anything comes
2. ``write`` for all chunks, and ``end`` with the table
3. :meth:`HeldStore.keep` under the next number, with the digest that the source has sent
4. :meth:`HeldStore.drop` for the generation before, once nothing needs it any more

If a step fails, the holder begins again at 1, and the source forgets what it has sent (sent.h).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

from ....errors import StepFailed
from .image_view import ImageView
from .page_table import Table
from .store import INDEX_FILE, PAGES_FILE, MemoryStore

GENERATIONS = 2  # store.h

WHOLE_EACH = 8
"""The store reads every eighth generation as a whole when it compares it with the source. Of the
other generations it reads only the pages that changed since the generation before. So if a bit
flips in a page that has not changed, the store finds that at the next whole read."""

_MAGIC = b"LSMG\0\0\0\1"
_HEAD = struct.Struct("<8sQQI4x")  # magic, limit, number of the generation, number of processes
_INDEX = re.compile(re.escape(INDEX_FILE) + r"\.(\d{1,20})")
_NEW = ".new"  # at the end of the name of an index that is not complete yet


class HeldStore(MemoryStore):
    """The store in ``directory``, which belongs to one capsule. Methods raise StepFailed.

    ``limit``: the most bytes of memory that may be known at one time. These are a generation's, and
    what comes for the next one at other addresses. The file is sparse, so a large limit takes no
    memory. Only one thread at a time may call ``end``, ``keep`` and ``revert``. Meanwhile others
    may write chunks, and read and drop generations.
    """

    _keeps = True

    def __init__(self, directory: Path, limit: int, *, fresh: bool) -> None:
        """Use :meth:`create` or :meth:`load` instead. ``limit``: bytes of memory."""
        super().__init__(directory, limit, fresh=fresh)
        self._inherited = False  # whether an earlier agent may have lent a generation
        self._late: set[int] = set()  # dropped as soon as none is lent
        self._loaded = False  # it takes chunks also after a load
        self._tabled = False  # whether the table of the next generation has come
        self._digests = dict[int, bytes]()  # of kept generations, by number, as they were compared
        self._compared = 0  # generations that were kept since one was read as a whole

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Load all generations that :meth:`keep` has kept, after the agent was restarted. The store
        is then as after :meth:`revert` to the newest one, so the next one may come."""
        found = [_Index.read(path) for path in directory.glob(INDEX_FILE + ".*") if _number(path)]
        if not found:
            raise StepFailed("restore", f"the memory store in {directory} keeps no generation")
        if len(limits := {index.limit for index in found}) > 1:
            raise StepFailed("restore", f"the indexes in {directory} differ in limits: {limits}")
        store = cls(directory, limits.pop(), fresh=False)
        try:
            for index in found:
                store._load_generation(index)
            with store.in_use() as opened:
                store._calls.store_end_load(opened)
            store.revert(max(index.number for index in found))
            store._inherited = store.lent
        except BaseException:
            store.close()
            raise
        return store

    @staticmethod
    def files(directory: Path, number: int) -> list[Path]:
        """The files of a store that has generation ``number``. A copy of just these can be loaded,
        and has that generation only."""
        return [directory / PAGES_FILE, directory / f"{INDEX_FILE}.{number}"]

    @classmethod
    def renumber(cls, directory: Path, old: int, new: int) -> None:
        """Give a kept generation another number. No store may be open in ``directory``."""
        path = directory / f"{INDEX_FILE}.{old}"
        index = _Index.read(path)
        fresh = path.with_name(f"{INDEX_FILE}.{new}{_NEW}")
        try:
            with fresh.open("wb") as file:
                file.write(_HEAD.pack(_MAGIC, index.limit, new, index.processes))
                file.write(index.images)
            path.unlink()
            fresh.rename(directory / f"{INDEX_FILE}.{new}")
        except OSError as error:
            raise StepFailed("restore", f"{fresh} cannot be written: {error}") from error

    @property
    def directory(self) -> Path:
        return self._directory

    @property
    def kept(self) -> list[int]:
        """The numbers of the generations, the newest one last."""
        numbers = self._ffi.new("uint64_t[]", GENERATIONS)
        with self.in_use() as store:
            count = self._calls.store_kept(store, numbers)
        return sorted(int(numbers[i]) for i in range(count))

    def end(self, table: Table) -> None:
        """Take the table of the next generation. Raises StepFailed if a page of it has not come."""
        self._tabled = False
        super().end(table)
        self._tabled = True

    def keep(self, number: int, digest: bytes) -> None:
        """Keep the memory of the table as a generation, which :meth:`load` finds from now on.

        ``number`` is 1 or more. ``digest`` is what the source has computed (digest.h). Raises
        StepFailed if the store has other pages than the source, or no place for the generation.
        Then nothing is kept. A failed digest needs :meth:`revert`.
        """
        if not self._tabled:
            raise StepFailed("ship", f"generation {number} has no complete table of memory")
        with self.in_use() as store:
            self._do("ship", self._calls.store_keep, store, number)
        self._tabled = False
        try:
            with self.view(number) as view:
                if (
                    self._digest_after(view, number) != digest
                    and (found := view.digest()) != digest
                ):
                    raise StepFailed(
                        "ship",
                        f"the memory of generation {number} is not what its source has sent:"
                        f" its digest is {found.hex()}, the source's is {digest.hex()}",
                        hint="the next snapshot must send all memory again",
                    )
                self._write_index(number, view)
        except BaseException:
            self.drop(number)
            raise
        self._digests[number] = digest

    def _digest_after(self, view: ImageView, number: int) -> bytes:
        """Compute the digest of generation ``number`` from the digest of the generation before it.
        Return b"" if this store has compared no generation before it, and each time that the
        generation must be read as a whole (WHOLE_EACH)."""
        self._compared = (self._compared + 1) % WHOLE_EACH
        last = max(self._digests.copy().keys() - {number}, default=0)
        known = self._digests.get(last)
        if known is not None and self._compared:
            # Another thread may drop that generation. Then the view raises StepFailed.
            with suppress(StepFailed), self.view(last) as before:
                return view.digest_after(before, known)
        return b""

    def drop(self, number: int) -> None:
        """Forget a generation. It does nothing if there is none. The memory that only this one had
        goes back to the host, at once or at the end of the last :meth:`view`. Raises OSError if the
        index cannot be removed; the generation then stays."""
        # The index goes first: as soon as the slots are free, other pages come into them.
        self._index(number).unlink(missing_ok=True)
        self._digests.pop(number, None)
        self._late.add(number)
        if self._inherited and self.lent:  # no reader is known
            return
        self._inherited = False
        with self.in_use() as store:
            while self._late:
                self._calls.store_drop(store, self._late.pop())

    def revert(self, number: int) -> None:
        """Forget all memory but that of generation ``number``; 0: all but the generations.

        After that chunks may come from a source that sends all memory, or from one whose record of
        what it has sent is exactly this generation. Raises StepFailed if it is not kept.
        """
        self._tabled = False
        with self.in_use() as store:
            self._do("ship", self._calls.store_revert, store, number)

    @contextmanager
    def view(self, number: int) -> Iterator[ImageView]:
        """Yield a generation, which stays as it is until the end of the ``with``, also when it is
        dropped. Raises StepFailed if it is not kept."""
        with self.in_use() as store:
            generation = self._calls.store_use(store, number)
            if not generation:
                names = ", ".join(map(str, self.kept)) or "none"
                raise StepFailed(
                    "ship", f"{self._why} has no generation {number}; it keeps {names}"
                )
            try:
                yield ImageView(store, generation.image, generation.images)
            finally:
                self._calls.store_unuse(store, generation)

    def save(self) -> None:
        """Do nothing: :meth:`keep` writes an index for each generation."""

    def free_after_copy(self) -> None:
        """Raise StepFailed: a kept generation must stay complete."""
        raise StepFailed("restore", f"{self._why} keeps generations and cannot be used up")

    def _index(self, number: int) -> Path:
        return self._directory / f"{INDEX_FILE}.{number}"

    def _write_index(self, number: int, view: ImageView) -> None:
        path = self._index(number)
        fresh = path.with_name(path.name + _NEW)
        try:
            with fresh.open("wb") as file:
                file.write(_HEAD.pack(_MAGIC, self.limit, number, len(view.images)))
                view.write(file)
            fresh.rename(path)
        except OSError as error:
            raise StepFailed("ship", f"{path} cannot be written: {error}") from error

    def _load_generation(self, index: _Index) -> None:
        try:
            self._load(index.images, index.processes)
        except (ValueError, struct.error) as error:
            raise StepFailed("restore", f"{index.path} is damaged: {error}") from error
        with self.in_use() as store:
            self._do("restore", self._calls.store_load_generation, store, index.number)


class _Index(NamedTuple):
    """The index of one generation, as :meth:`HeldStore.keep` has written it."""

    path: Path
    number: int
    limit: int
    processes: int
    images: memoryview

    @classmethod
    def read(cls, path: Path) -> _Index:
        try:
            raw = path.read_bytes()
            magic, limit, number, processes = _HEAD.unpack_from(raw)
            if magic != _MAGIC or number != _number(path):
                raise ValueError(f"it begins with {magic!r} and the number {number}")
        except (OSError, ValueError, struct.error) as error:
            raise StepFailed("restore", f"{path} cannot be read: {error}") from error
        return cls(path, number, limit, processes, memoryview(raw)[_HEAD.size :])


def _number(path: Path) -> int:
    """Return the generation whose index this is; 0: it is no complete index."""
    found = _INDEX.fullmatch(path.name)
    return int(found[1]) if found else 0
