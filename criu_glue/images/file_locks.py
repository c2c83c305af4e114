# SPDX-License-Identifier: Apache-2.0
"""File locks of a tree: which of them prevent a move, and for which CRIU would have to wait.

The source holds its locks until the destination runs the tree. So the destination cannot take an
exclusive lock on a file that both hosts see: CRIU would wait there for the source. If the source
released the lock earlier, a third process could take it while the job still relies on it. Such a
lock prevents a move, and so does a lease (fcntl(2), F_SETLEASE). A shared lock does not prevent it,
because source and destination can both hold it. A lock on a file that moves with the capsule, or
that each host has for itself, does not prevent it either: at the destination it is another file.

Most programs hold such locks only for moments. Locks prevent a move if each of ``LOOKS`` looks
finds one, the same or another. A move waits for a moment without one before it stops the job. If
such a lock exists nevertheless when the tree is frozen, the tree goes on at its source.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ...errors import StepFailed
from .image_kinds import ImageFile
from .protobuf import ProtobufMessage

LOOKS, LOOK_S = 10, 0.1

REMEDY = (
    "let the program release it for a moment (SQLite: end the transaction), or lock a file below"
    " /tmp, /dev/shm or files.carried instead"
)
_WORDS = {"FLOCK": "flock(2) lock", "POSIX": "fcntl(2) lock", "OFDLCK": "fcntl(2) lock (OFD)"}
_KINDS = {1: "POSIX", 2: "FLOCK", 4: "OFDLCK", 8: "LEASE"}  # criu: include/file-lock.h
_WRITE = 1  # F_WRLCK
_END = 1 << 63

T = TypeVar("T")


@dataclass(frozen=True)
class FileLock:
    """A lock as proc(5) shows it; ``start`` and ``end`` are bytes of the file."""

    kind: str
    exclusive: bool
    start: int
    end: int
    device: str = ""
    inode: int = 0

    @property
    def keeps_others_out(self) -> bool:
        return self.exclusive or self.kind == "LEASE"

    def conflicts(self, other: FileLock) -> bool:
        """True if two programs cannot hold these two locks at once."""
        if (self.device, self.inode) != (other.device, other.inode):
            return False
        by_range = {"POSIX", "OFDLCK"}
        if self.kind != other.kind and not {self.kind, other.kind} <= by_range:
            return False  # flock(2) and fcntl(2) do not see each other
        if self.start > other.end or other.start > self.end:
            return False
        return self.keeps_others_out or other.keeps_others_out

    def __str__(self) -> str:
        if self.kind == "LEASE":
            return "a lease"
        return f"{'an exclusive' if self.exclusive else 'a shared'} {_WORDS[self.kind]}"


def words(who: str, lock: FileLock, path: str) -> str:
    return f"{who} holds {lock} on {path}, which no other host can take over"


def parse(text: str) -> Iterator[FileLock]:
    """The held locks in the text of /proc/locks or of a descriptor's fdinfo ("lock:" lines)."""
    for line in text.splitlines():
        fields = line.removeprefix("lock:").split()
        if len(fields) < 8 or fields[1] == "->" or not fields[0].rstrip(":").isdigit():
            continue
        kind, mode, place, start, end = fields[1], fields[3], fields[5], fields[6], fields[7]
        if kind == "LEASE" or kind in _WORDS:
            device, _, inode = place.rpartition(":")
            last = _END if end == "EOF" else int(end)
            yield FileLock(kind, mode == "WRITE", int(start), last, device, int(inode))


def lasting(first: Iterable[T], look: Callable[[], Iterable[T]]) -> list[T]:
    """Look ``LOOKS`` times, in about a second, and return the items that every look has found.

    Returns [] as soon as a look finds nothing. If every look finds items but none of them is in
    all looks, returns those of the last look."""
    found = now = dict.fromkeys(first)
    for _ in range(LOOKS):  # a busy machine needs more time, but makes as many looks
        if not now:
            return []
        time.sleep(LOOK_S)
        now = dict.fromkeys(look())
        found = {held: None for held in found if held in now}
    return list(found or now)


def refuse_held(images: Path, root: Path) -> None:
    """Raise StepFailed if the image has a lock for which CRIU would have to wait on this host."""
    here: list[FileLock] | None = None
    for path, lock in _of_image(images):
        with contextlib.suppress(FileNotFoundError):
            seen = os.stat(root / path.lstrip("/"))
            device = f"{os.major(seen.st_dev):02x}:{os.minor(seen.st_dev):02x}"
            if here is None:
                here = list(parse(Path("/proc/locks").read_text()))
            wanted = FileLock(lock.kind, lock.exclusive, lock.start, lock.end, device, seen.st_ino)
            if any(wanted.conflicts(other) for other in here):
                raise StepFailed(
                    "restore",
                    f"a task has {lock} on {path}, and another process has locked it here",
                    hint=REMEDY,
                )


def _of_image(images: Path) -> Iterator[tuple[str, FileLock]]:
    """(path, lock) of each lock of an image whose file has a path."""
    if not (images / "filelocks.img").exists():
        return
    paths: dict[int, str] = {}
    for raw in ImageFile(images / "files.img").entries:
        if (regular := ProtobufMessage(raw).message(3)) is not None:
            paths[regular.uint(1)] = os.fsdecode(bytes(regular.raw(6) or b""))
    for raw in ImageFile(images / "filelocks.img").entries:
        lock = ProtobufMessage(raw)  # criu: images/file-lock.proto
        ids = ProtobufMessage(ImageFile(images / f"ids-{lock.uint(3)}.img").entries[0])
        for opened in map(ProtobufMessage, ImageFile(images / f"fdinfo-{ids.uint(2)}.img").entries):
            kind = _KINDS.get(lock.uint(1))
            if opened.uint(4) == lock.uint(4) and opened.uint(1) in paths and kind:
                start, length = lock.long(5), lock.long(6)
                end = start + length - 1 if length else _END
                exclusive = lock.uint(2) & 3 == _WRITE
                yield paths[opened.uint(1)], FileLock(kind, exclusive, start, end)
