# SPDX-License-Identifier: Apache-2.0
"""The kinds of image files of a capsule's dump, and a check that a file has the form of its kind.

The numbers are CRIU's (criu: include/magic.h, image-desc.c, protobuf.c). A file begins with two
magic words. Then each entry is a u32 length and a protobuf message. Some kinds hold raw bytes after
their first entry; ``pages`` files hold only raw bytes. Kinds that CRIU can dump but a capsule
cannot have are left out: for example, its mounts and network belong to the sandbox.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ...errors import StepFailed

COMMON_MAGIC = 0x54564319
INVENTORY_MAGIC = 0x58313116
LIMIT = 64 << 20
"""An image that consists of entries has at most this many bytes. A page range takes 30 bytes, a
mapping 60, an open file 150."""

FIRST_LIMIT = 1 << 20
"""An entry before raw bytes has at most this many bytes."""

_WORD = struct.Struct("<I")


class Form(Enum):
    """What follows the magic words of a file."""

    ENTRIES = "entries"
    FIRST = "one entry or none, then bytes of its own kind"
    RAW = "bytes, and no magic word before them"


@dataclass(frozen=True)
class Kind:
    """One kind of image file; ``number`` is the pattern between the kind's name and ``.img``."""

    magic: int
    number: str = ""
    form: Form = Form.ENTRIES


_DECIMAL, _HEX = r"-(0|[1-9][0-9]{0,19})", r"-(0|[1-9a-f][0-9a-f]{0,15})"

KINDS = {
    "inventory": Kind(INVENTORY_MAGIC),
    "pstree": Kind(0x50273030),
    "files": Kind(0x56303138),
    "remap-fpath": Kind(0x59133954),
    "memfd": Kind(0x48453499),
    "seccomp": Kind(0x64413049),
    "cgroup": Kind(0x59383330),
    "filelocks": Kind(0x54323616),
    "inotify-wd": Kind(0x54562009),
    "eventpoll-tfd": Kind(0x44433746),
    "tty-info": Kind(0x59453036),
    "cpuinfo": Kind(0x61404013),
    "core": Kind(0x55053847, _DECIMAL),
    "ids": Kind(0x54432030, _DECIMAL),
    "fs": Kind(0x51403912, _DECIMAL),
    "mm": Kind(0x57492820, _DECIMAL),
    "fdinfo": Kind(0x56213732, _DECIMAL),
    "pagemap": Kind(0x56084025, _DECIMAL),
    "pagemap-shmem": Kind(0x56084025, _DECIMAL),
    "timens": Kind(0x43114433, _DECIMAL),
    "ipcns-var": Kind(0x53115007, _DECIMAL),
    "ipcns-shm": Kind(0x46283044, _DECIMAL, Form.FIRST),
    "ipcns-msg": Kind(0x55453737, _DECIMAL, Form.FIRST),
    "ipcns-sem": Kind(0x59573019, _DECIMAL, Form.FIRST),
    "tcp-stream": Kind(0x51465506, _HEX, Form.FIRST),
    "ghost-file": Kind(0x52583605, _HEX, Form.FIRST),
    "pipes-data": Kind(0x56453709, form=Form.FIRST),
    "fifo-data": Kind(0x59333054, form=Form.FIRST),
    "sk-queues": Kind(0x56264026, form=Form.FIRST),
    "tty-data": Kind(0x59413026, form=Form.FIRST),
    "pages": Kind(0, _DECIMAL, Form.RAW),
}

ALWAYS = ("inventory", "pstree", "files")
ONE_ENTRY = frozenset(("inventory", "core", "ids", "fs", "mm"))
"""CRIU reads only the first entry of these kinds and ignores a second one."""

_NAMES = re.compile(
    "|".join(f"(?P<k{n}>{name}{kind.number}\\.img)" for n, (name, kind) in enumerate(KINDS.items()))
)


def kind_of(name: str) -> str:
    """The kind of an image file by its name; raises StepFailed if no capsule's image has it."""
    match = _NAMES.fullmatch(name)
    if match is None or match.lastgroup is None:
        raise _refusal(name, "of a kind that no capsule's image has")
    return [*KINDS][int(match.lastgroup[1:])]


class ImageFile:
    """One image file whose frame is valid: its magic words are right, and its entries' lengths stay
    inside the file. The constructor raises StepFailed otherwise."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kind = kind_of(path.name)
        self.entries: list[memoryview] = []
        kind = KINDS[self.kind]
        if kind.form is Form.RAW:
            return
        with path.open("rb") as file:
            size = LIMIT if kind.form is Form.ENTRIES else FIRST_LIMIT + 3 * _WORD.size
            raw = file.read(size + 1)
        if kind.form is Form.ENTRIES and len(raw) > LIMIT:
            raise self.refusal(f"larger than {LIMIT} bytes")
        at = self._magic(raw, kind.magic)
        if kind.form is Form.ENTRIES:
            self.entries = list(self._cut(memoryview(raw), at))
            if self.kind in ONE_ENTRY and len(self.entries) != 1:
                raise self.refusal(f"of {len(self.entries)} entries, expected one")
        elif len(raw) > at:
            self.entries = [next(self._cut(memoryview(raw), at))]

    def change(self, changed: Callable[[memoryview], bytes]) -> None:
        """Replace each entry by what ``changed`` makes of it, here and in the file.

        Not for kinds with raw bytes, and not for the inventory. Raises OSError."""
        kind = KINDS[self.kind]
        assert kind.form is Form.ENTRIES
        assert kind.magic != INVENTORY_MAGIC
        entries = [changed(entry) for entry in self.entries]
        if entries == [bytes(entry) for entry in self.entries]:
            return
        words = _WORD.pack(COMMON_MAGIC) + _WORD.pack(kind.magic)
        staged = self.path.with_suffix(".new")
        staged.write_bytes(words + b"".join(_WORD.pack(len(e)) + e for e in entries))
        staged.rename(self.path)
        self.entries = [memoryview(entry) for entry in entries]

    def refusal(self, why: str) -> StepFailed:
        return _refusal(self.path.name, why)

    def _magic(self, raw: bytes, magic: int) -> int:
        words = (magic,) if magic == INVENTORY_MAGIC else (COMMON_MAGIC, magic)
        size = _WORD.size * len(words)
        if raw[:size] != b"".join(map(_WORD.pack, words)):
            raise self.refusal(f"without the magic words of its kind: {raw[:size].hex()}")
        return size

    def _cut(self, raw: memoryview, at: int) -> Iterator[memoryview]:
        end = len(raw)
        while at < end:
            if at + _WORD.size > end:
                raise self.refusal("cut off")
            begin = at + _WORD.size
            at = begin + _WORD.unpack_from(raw, at)[0]
            if at > end:
                raise self.refusal(f"whose entry at byte {begin} ends beyond the file")
            yield raw[begin:at]


def _refusal(name: str, why: str) -> StepFailed:
    return StepFailed("verify", f"{name[:100]!a} is an image {why}: it is not handed to CRIU")
