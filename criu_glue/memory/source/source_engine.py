# SPDX-License-Identifier: Apache-2.0
"""The part of ``memory.so`` that the source uses (scan.h, sent.h, pull.h), without cffi objects.

Addresses and lengths are in bytes; they are whole pages. Methods raise OSError with the kernel's
errno.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Iterable
from typing import Any

from ..engine import load

DECLARATIONS = """
struct region { uint64_t start, end, categories; };
struct regions { struct region *at; size_t count, room; uint64_t bytes; };
struct regions *regions_new(void);
void regions_clear(struct regions *);
void regions_runs(const struct regions *, uint64_t *out);
void regions_free(struct regions *);

struct sent;
struct sent *sent_new(void);
void sent_clear(struct sent *);
void sent_free(struct sent *);
void sent_invalidate_all(struct sent *);
int sent_forget(struct sent *, uint64_t start, uint64_t end, struct regions *sent_of_them);
int sent_keep(struct sent *, const struct regions *present);
int sent_digest(const struct sent *, const struct regions *present, uint32_t inner,
                uint64_t out[2]);

int scan_enable(int uffd);
uint64_t scan_categories(int pagemap);
int scan_written(int pagemap, int uffd, const uint64_t *ranges, size_t count, uint64_t known,
                 bool whole, struct sent *, struct regions *written);
int scan_present(int pagemap, const uint64_t *ranges, size_t count, uint64_t known,
                 struct regions *found);
int scan_classify(const struct regions *found, bool all_stale, struct sent *,
               struct regions *present, struct regions *stale);

struct pull;
struct pull_chunk;
struct pull_state { uint64_t unreadable, first_unreadable; int error; };
struct pull *pull_new(int pid, int memory, int pagemap, uint32_t inner, uint32_t incarnation,
                      uint32_t round, uint32_t pass, const struct regions *, struct sent *);
void pull_refer_to(struct pull *, const struct sent *parent, uint32_t parent_pid);
void pull_free(struct pull *);
int pull_fill(struct pull *, struct pull_chunk *, uint64_t budget, uint64_t *read);
struct pull_state pull_state(struct pull *);
struct pull_chunk *pull_chunk_new(void);
void pull_chunk_free(struct pull_chunk *);
void pull_chunk_begin(struct pull_chunk *, void *at);
size_t pull_chunk_end(struct pull_chunk *, const struct pull *);
"""

_ffi, _lib = load(DECLARATIONS)

Ranges = list[tuple[int, int]]
"""Parts of an address space, [start, end), sorted."""


def prepare(uffd: int) -> None:
    """Make a userfaultfd track writes. EINVAL: this kernel has no WP_ASYNC."""
    _check(_lib.scan_enable(uffd), "userfaultfd")


@functools.cache
def known_categories() -> int:
    """Return the categories that this kernel's PAGEMAP_SCAN knows; 0: it has no PAGEMAP_SCAN."""
    pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(_lib.scan_categories(pagemap))
    finally:
        os.close(pagemap)


class Regions:
    """A list of parts of an address space."""

    def __init__(self) -> None:
        self.list = _ffi.gc(_new(_lib.regions_new()), _lib.regions_free)

    @property
    def size(self) -> int:
        """The total size in bytes."""
        return int(self.list.bytes)

    def clear(self) -> None:
        _lib.regions_clear(self.list)

    def runs(self) -> bytes:
        """Return pairs of address and pages, each a little-endian number of 64 bits."""
        packed = bytearray(16 * self.list.count)
        _lib.regions_runs(self.list, _ffi.from_buffer("uint64_t[]", packed, require_writable=True))
        return bytes(packed)


class Sent:
    """What the source has sent of one process (sent.h)."""

    def __init__(self) -> None:
        self.pages = _ffi.gc(_new(_lib.sent_new()), _lib.sent_free)

    def clear(self) -> None:
        _lib.sent_clear(self.pages)

    def invalidate_all(self) -> None:
        """Mark all pages as not current: any of them may have been written since it was sent."""
        _lib.sent_invalidate_all(self.pages)

    def forget(self, start: int, end: int, forgotten: Regions) -> None:
        """Record that the destination has nothing of these pages. Those of them that were sent are
        added to ``forgotten``."""
        _check(_lib.sent_forget(self.pages, start, end, forgotten.list), "sent")

    def keep(self, present: Regions) -> None:
        """Record that the destination has nothing of any page that is not in ``present``."""
        _check(_lib.sent_keep(self.pages, present.list), "sent")


def digest(parts: Iterable[tuple[int, Sent, Regions]]) -> bytes:
    """Return the digest (digest.h) of an image, given as its processes: the inner pid, what was
    sent, and the pages. ENODATA: a page was not sent, or may have been written since."""
    sums = _ffi.new("uint64_t[2]")
    for inner, sent, present in parts:
        _check(_lib.sent_digest(sent.pages, present.list, inner, sums), "digest")
    return bytes(_ffi.buffer(sums))


def scan_written(
    pagemap: int, uffd: int, ranges: Ranges, whole: bool, sent: Sent, written: Regions
) -> None:
    """Add to ``written`` the pages written since the last call; scan.h lists the errors."""
    known = known_categories()
    rc = _lib.scan_written(
        pagemap, uffd, _pairs(ranges), len(ranges), known, whole, sent.pages, written.list
    )
    _check(rc, "PAGEMAP_SCAN")


def scan_present(pagemap: int, ranges: Ranges, found: Regions) -> None:
    """Add to ``found`` the pages that exist in the ranges. They must not change meanwhile."""
    known = known_categories()
    rc = _lib.scan_present(pagemap, _pairs(ranges), len(ranges), known, found.list)
    _check(rc, "PAGEMAP_SCAN")


def classify(found: Regions, all_stale: bool, sent: Sent, present: Regions, stale: Regions) -> None:
    """Add to ``present`` all found pages, and to ``stale`` those that must be read: pages that were
    written, or that the destination may not have. With ``all_stale`` these are all pages."""
    rc = _lib.scan_classify(found.list, all_stale, sent.pages, present.list, stale.list)
    _check(rc, "PAGEMAP_SCAN")


class Pull:
    """The pages of one process that must be read. Any number of threads may read them."""

    def __init__(
        self,
        pid: int,
        memory: int,
        pagemap: int,
        *,
        inner: int,
        incarnation: int,
        round: int,
        number: int,
        regions: Regions,
        sent: Sent,
    ) -> None:
        """``memory``: the open /proc/PID/mem. ``pagemap``: the open /proc/PID/pagemap if the
        process may share pages with another one, else -1. ``number``: the number of the pass, which
        grows."""
        self._kept: list[object] = [regions, sent]  # the C structure points to these
        new = _lib.pull_new(
            pid, memory, pagemap, inner, incarnation, round, number, regions.list, sent.pages
        )
        self.work = _ffi.gc(_new(new), _lib.pull_free)

    def refer_to(self, inner: int, sent: Sent) -> None:
        """Let this pull refer to pages that were sent of the process's parent."""
        self._kept.append(sent)
        _lib.pull_refer_to(self.work, sent.pages, inner)

    @property
    def ended(self) -> bool:
        """Whether the process has ended meanwhile."""
        return bool(_lib.pull_state(self.work).error)

    @property
    def unreadable(self) -> tuple[int, int]:
        """How many pages could not be read any more, and the address of the first one."""
        state = _lib.pull_state(self.work)
        return int(state.unreadable), int(state.first_unreadable)


DONE, FULL, PAUSE = 0, 1, 2


class Chunk:
    """A chunk that one thread makes, in memory that the caller gives."""

    def __init__(self) -> None:
        self._chunk = _ffi.gc(_new(_lib.pull_chunk_new()), _lib.pull_chunk_free)
        self._read = _ffi.new("uint64_t *")
        self._at: Any = None

    def begin(self, memory: memoryview) -> None:
        """Begin a chunk in ``memory``, which has CHUNK bytes."""
        self._at = _ffi.from_buffer(memory, require_writable=True)
        _lib.pull_chunk_begin(self._chunk, self._at)

    def fill(self, pull: Pull, budget: int) -> tuple[int, int]:
        """Return (DONE, FULL or PAUSE; bytes that were read of the process)."""
        how = _lib.pull_fill(pull.work, self._chunk, budget, self._read)
        return int(how), int(self._read[0])

    def end(self, pull: Pull) -> int:
        """Complete the chunk and return its length in bytes; 0: it is empty."""
        length = int(_lib.pull_chunk_end(self._chunk, pull.work))
        self._at = None
        return length


def _pairs(ranges: Iterable[tuple[int, int]]) -> Any:
    return _ffi.new("uint64_t[]", [edge for pair in ranges for edge in pair])


def _new(pointer: Any) -> Any:
    if pointer == _ffi.NULL:
        _check(-errno.ENOMEM, "memory.so")
    return pointer


def _check(rc: int, what: str) -> None:
    if rc < 0:
        raise OSError(-rc, os.strerror(-rc), what)
