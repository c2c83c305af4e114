# SPDX-License-Identifier: Apache-2.0
"""Parts a full dump into CRIU's images without the pages that move apart from them, and those.

In the place of a source: what CRIU may be given later is taken out of its images, as a page filter
would have kept it out, and is put into chunks.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import xxhash
from image_edits import decode, encode

from liveshift.criu_glue.images.image_kinds import ImageFile
from liveshift.criu_glue.images.protobuf import ProtobufMessage
from liveshift.criu_glue.memory.engine import CHUNK
from liveshift.criu_glue.memory.store.image_view import ImageView
from liveshift.criu_glue.memory.store.store import MemoryStore, ProcessTable

PAGE = 4096
DATA, ZERO, REFERENCE = 1, 2, 3
ZEROS = bytes(PAGE)
_SHARED, _PRIVATE, _EXECUTABLE, _ANONYMOUS, _LOCKED, _HUGE = 1, 2, 4, 0x20, 0x2000, 0x40000
_VDSO = 1 << 3 | 1 << 4 | 1 << 12  # criu: include/image.h, VMA_AREA_VSYSCALL, VDSO, VVAR

Pages = dict[int, bytes]
"""By address."""

BASE = 0x7F00_0000_0000
"""Where tests have memory that is no process's."""


def page(n: int) -> bytes:
    """A page for tests, another one for every ``n``."""
    return random.Random(n).randbytes(16) * (PAGE // 16)


def chunk(
    pid: int,
    runs: Iterable[tuple[int, int, int]],
    payload: bytes = b"",
    incarnation: int = 1,
    round_: int = 0,
) -> bytes:
    """One chunk; runs of (address, pages, kind)."""
    packed = [struct.pack("<QII", *run) for run in runs]
    head = struct.pack("<4sIIII", b"LSM1", pid, incarnation, round_, len(packed))
    head += b"".join(packed)
    return head.ljust(PAGE, b"\0") + payload if payload else head


def reference(page: bytes, pid: int, address: int) -> bytes:
    seen = xxhash.xxh3_128_intdigest(page)
    return struct.pack("<QQIQ", seen & (1 << 64) - 1, seen >> 64, pid, address)


def chunks(pid: int, pages: Pages, incarnation: int = 1) -> Iterator[bytes]:
    """Pages as a source would send them: contiguous runs, zero pages only named."""
    runs: list[tuple[int, int, int]] = []
    payload = bytearray()
    for address in sorted(pages):
        kind = ZERO if pages[address] == ZEROS else DATA
        if len(payload) == (1 << 20) - PAGE or len(runs) == 254:
            yield chunk(pid, runs, bytes(payload), incarnation)
            runs, payload = [], bytearray()
        if runs and runs[-1][0] + runs[-1][1] * PAGE == address and runs[-1][2] == kind:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, kind)
        else:
            runs.append((address, 1, kind))
        payload += pages[address] if kind == DATA else b""
    yield chunk(pid, runs, bytes(payload), incarnation)


def table(memory: Mapping[int, Pages], incarnation: int = 1) -> dict[int, ProcessTable]:
    return {pid: ProcessTable(incarnation, packed(runs_of(pages))) for pid, pages in memory.items()}


def packed(runs: Iterable[tuple[int, int]]) -> bytes:
    return b"".join(struct.pack("<QQ", *run) for run in runs)


def runs_of(pages: Iterable[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for address in sorted(pages):
        if runs and runs[-1][0] + runs[-1][1] * PAGE == address:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((address, 1))
    return runs


def keep(memory: Mapping[int, Pages], directory: Path) -> MemoryStore:
    """A store with all of it, its table known."""
    size = sum(len(pages) for pages in memory.values()) * PAGE
    store = MemoryStore.create(directory, size)
    for pid, pages in memory.items():
        for each in chunks(pid, pages):
            store.write(each)
    store.end(table(memory))
    return store


def content(image: MemoryStore | ImageView) -> dict[int, Pages]:
    """What an image consists of, as it would be passed on."""
    found: dict[int, Pages] = {}

    def take(chunk: memoryview, release: Callable[[], None]) -> None:
        assert len(chunk) <= CHUNK, "more than the wire takes"
        pid, _, _, runs = struct.unpack_from("<IIII", chunk, 4)
        at = PAGE
        for n in range(runs):
            address, pages, kind = struct.unpack_from("<QII", chunk, 20 + 16 * n)
            for k in range(pages):
                data = ZEROS if kind == ZERO else bytes(chunk[at : at + PAGE])
                found.setdefault(pid, {})[address + k * PAGE] = data
                at += 0 if kind == ZERO else PAGE
        release()

    image.forward(take)
    return found


def digest(memory: Mapping[int, Pages]) -> bytes:
    """The digest of all pages, as digest.h defines it."""
    half = (1 << 64) - 1
    low = high = 0
    for pid, pages in memory.items():
        for address, data in pages.items():
            seen = xxhash.xxh3_128_intdigest(data)
            mixed = struct.pack("<QQQQ", pid, address, seen & half, seen >> 64)
            mix = xxhash.xxh3_128_intdigest(mixed)
            low, high = low + mix & half, high + (mix >> 64) & half
    return struct.pack("<QQ", low, high)


def part(images: Path) -> dict[int, Pages]:
    """Take out of the images in a directory what may be filled in later; by inner pid."""
    return {
        int(path.stem.partition("-")[2]): _part(path, images)
        for path in sorted(images.glob("pagemap-[0-9]*.img"))
    }


def _part(path: Path, images: Path) -> Pages:
    ranges = _ranges(images / path.name.replace("pagemap", "mm"))
    head, *entries = [_numbers(entry) for entry in ImageFile(path).entries]
    pages_path = images / f"pages-{head[1]}.img"
    raw = pages_path.read_bytes() if pages_path.exists() else b""
    taken: Pages = {}
    kept, left, at = [ImageFile(path).entries[0]], bytearray(), 0
    for entry in entries:
        start, count = entry[1], entry.get(5) or entry[2]
        assert entry[4] & 4, "not a page that lies in the image"
        for address in range(start, start + count * PAGE, PAGE):
            page = raw[at : at + PAGE]
            at += PAGE
            if any(a <= address < b for a, b in ranges):
                taken[address] = page
            else:
                left += page
                kept.append(memoryview(encode([(1, address), (2, 1), (4, entry[4]), (5, 1)])))
    assert at == len(raw)
    magic = path.read_bytes()[:8]
    framed = b"".join(struct.pack("<I", len(entry)) + bytes(entry) for entry in kept)
    path.write_bytes(magic + framed)
    pages_path.write_bytes(left)
    return taken


def _ranges(mm: Path) -> list[tuple[int, int]]:
    """Where CRIU registers what it restores lazily (criu: vma.h, vma_entry_can_be_lazy), without
    what is executable, into which it writes."""
    found = []
    for raw in ProtobufMessage(ImageFile(mm).entries[0]).raws(14):
        vma = _numbers(raw)
        flags = vma[6]
        lazy = flags & _PRIVATE and flags & _ANONYMOUS and not flags & (_LOCKED | _HUGE)
        if lazy and not vma[7] & _VDSO and not vma[5] & _EXECUTABLE:
            found.append((vma[1], vma[2]))
    return found


def _numbers(raw: memoryview) -> dict[int, int]:
    return {n: value for n, value in decode(bytes(raw)) if isinstance(value, int)}
