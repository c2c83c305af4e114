# SPDX-License-Identifier: Apache-2.0
"""Looking up a shared library's exported symbols in its file, without loading the library.

Loading torch to ask what it exports takes seconds and hundreds of megabytes; its GNU hash table
answers from a handful of mapped pages. elf(5) describes the file's layout. The hash table is a GNU
extension of the System V ABI; glibc's elf/dl-lookup.c shows its layout.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import LiveshiftError

SHT_GNU_HASH = 0x6FFFFFF6
PT_LOAD = 1


class ElfError(LiveshiftError):
    """The file is no 64-bit little-endian shared library with a GNU hash table."""


class SharedLibrary:
    """The dynamic symbols of one mapped ELF file; get one from :func:`shared_library`."""

    def __init__(self, image: mmap.mmap) -> None:
        self._image = image
        if image[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64-bit little-endian ELF file")
        self._phoff, self._shoff = struct.unpack_from("<QQ", image, 32)
        self._phentsize, self._phnum, self._shentsize, shnum = struct.unpack_from("<4H", image, 54)
        sections = [self._section(i) for i in range(shnum)]
        found = next((s for s in sections if s[1] == SHT_GNU_HASH), None)
        if found is None:
            raise ValueError("it has no GNU hash table")
        self._hash = found[4]
        dynsym = sections[found[6]]
        self._dynsym, self._dynstr = dynsym[4], sections[dynsym[6]][4]

    def _section(self, index: int) -> tuple[int, ...]:
        """name, type, flags, address, offset, size, link of a section header."""
        return struct.unpack_from("<IIQQQQI", self._image, self._shoff + index * self._shentsize)

    def address_of(self, name: str) -> int | None:
        """Virtual address of a symbol that the library defines; None if it does not define it."""
        wanted, image = name.encode(), self._image
        hashed = 5381
        for byte in wanted:
            hashed = (hashed * 33 + byte) & 0xFFFFFFFF
        bucket_count, first, bloom_size, _ = struct.unpack_from("<4I", image, self._hash)
        buckets = self._hash + 16 + 8 * bloom_size
        chains = buckets + 4 * bucket_count
        (index,) = struct.unpack_from("<I", image, buckets + 4 * (hashed % bucket_count))
        if index < first:  # an empty bucket
            return None
        while True:
            (link,) = struct.unpack_from("<I", image, chains + 4 * (index - first))
            if link | 1 == hashed | 1:  # the lowest bit only marks the end of a chain
                at, section, address = struct.unpack_from(
                    "<I2xHQ", image, self._dynsym + 24 * index
                )
                start = self._dynstr + at
                if section != 0 and image[start : start + len(wanted) + 1] == wanted + b"\0":
                    return int(address)
            if link & 1:
                return None
            index += 1

    def bytes_until(self, address: int, end: bytes) -> bytes:
        """The file's bytes from a virtual address up to, not including, the next ``end``."""
        for i in range(self._phnum):
            kind, _, offset, start, _, size = struct.unpack_from(
                "<IIQQQQ", self._image, self._phoff + i * self._phentsize
            )
            if kind == PT_LOAD and start <= address < start + size:
                at = offset + address - start
                stop = self._image.find(end, at, offset + size)
                if stop >= 0:
                    return self._image[at:stop]
        raise ValueError(f"nothing that ends in {end!r} lies at address {address:#x}")


@contextmanager
def shared_library(path: Path) -> Iterator[SharedLibrary]:
    """Open a library for looking up symbols while the context lasts.

    Raises ElfError, naming the file, when it can't be read or is damaged, also out of the body.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
            yield SharedLibrary(image)
    except (OSError, ValueError, ArithmeticError, IndexError, struct.error) as error:
        raise ElfError(f"cannot read the symbols of {path}: {error}") from error
