# SPDX-License-Identifier: Apache-2.0
"""Saves the image of a suspended job's capsule in a directory, so that it outlives its holder, and
loads it again.

The directory lies on a file system that the hosts share. A file in it says that the image is
whole, and what each file must be; it is written last. Who can change an image can run any code as
the job's user where it is restored, and who can read it has the job's memory. So only a directory
that root alone can change is used, to write and to read, and the files are for root alone.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import xxhash

from .... import units
from ....errors import LiveshiftError, NotFound, Refused, StepFailed

VERSION = 1
SUMS = "image.json"
_CHUNK = 4 << 20
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class SavedImage(msgspec.Struct, frozen=True):
    """What is written beside the files. ``files`` has the size and the digest of each file, by its
    name in the directory. The digest is XXH3 with 128 bits, of the data and their offsets."""

    version: int
    image: str
    capsule: str
    files: dict[str, tuple[int, str]]


def check_trusted(directory: Path) -> None:
    """Raise Refused unless root alone can change what is in ``directory``, and NotFound if it is
    not there."""
    try:
        directory = directory.resolve(strict=True)
        here = directory.stat()
    except OSError as error:
        raise NotFound(
            f"{directory} cannot be used: {error.strerror}",
            hint="make it on a file system that all hosts share, for root alone (mode 0700)",
        ) from None
    if not stat.S_ISDIR(here.st_mode):
        raise Refused(f"{directory} is not a directory")
    for path in (directory, *directory.parents):
        found = path.stat()
        others = found.st_mode & _WRITABLE_BY_OTHERS
        if found.st_uid != 0 or (
            others and (path == directory or not found.st_mode & stat.S_ISVTX)
        ):
            raise Refused(
                f"{directory} cannot be used: others than root can change {path}",
                hint="a user who can change an image runs code where it is restored:"
                " use a directory that root alone can change",
            )


def save(files: Path, target: Path, image: str, capsule: str) -> int:
    """Copy all files below ``files`` to ``target``, which does not exist, or is what an attempt has
    left. Return the bytes that they take, once they are on the disk.

    Raises Refused if there is no room, StepFailed for other errors; then nothing is left.
    """
    place = target.parent.parent
    check_trusted(place)
    sums: dict[str, tuple[int, str]] = {}
    with _all_or_nothing(target, "hold", f"{target} cannot be written"):
        needed, free = _taken(files), shutil.disk_usage(place).free
        if needed > free:
            raise Refused(
                f"{place} has {units.size(free)} left, and the image of {capsule} takes"
                f" {units.size(needed)}"
            )
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(mode=0o700, parents=True)
        for path in sorted(p for p in files.rglob("*") if p.is_file()):
            name = str(path.relative_to(files))
            (target / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            sums[name] = _copy(path, target / name, sync=True)
        fresh = target / f"{SUMS}.new"
        with fresh.open("xb") as file:
            file.write(msgspec.json.encode(SavedImage(VERSION, image, capsule, sums)))
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(target / SUMS)
        _sync_directories(target)
        return needed


def load(source: Path, target: Path, image: str, capsule: str) -> None:
    """Copy an image that :meth:`save` has written to ``target``, and compare each file with what
    was written. Raises NotFound if there is no whole image of that name, StepFailed if it is
    damaged; then nothing is left in ``target``."""
    saved = read(source)
    if (saved.image, saved.capsule) != (image, capsule):
        raise NotFound(
            f"{source} has {saved.image} of {saved.capsule}, and not {image} of {capsule}"
        )
    with _all_or_nothing(target, "restore", f"{source} cannot be read"):
        for name, sums in saved.files.items():
            path = target / name
            if not path.resolve().is_relative_to(target.resolve()):
                raise StepFailed("restore", f"{source / SUMS} names {name}, which is outside")
            path.parent.mkdir(parents=True, exist_ok=True)
            if (found := _copy(source / name, path, sync=False)) != sums:
                raise StepFailed(
                    "restore",
                    f"{source / name} is damaged: {found[0]} bytes with the digest {found[1]},"
                    f" and {sums[0]} with {sums[1]} were written",
                )


@contextmanager
def _all_or_nothing(target: Path, step: str, trouble: str) -> Iterator[None]:
    """After an error nothing is left in ``target``. An OSError becomes the StepFailed of a step."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError):
            raise StepFailed(step, f"{trouble}: {error}") from error
        raise


def read(source: Path) -> SavedImage:
    """What is known of the image in ``source``. Raises NotFound if there is none that is whole."""
    check_trusted(source)
    try:
        saved = msgspec.json.decode((source / SUMS).read_bytes(), type=SavedImage)
    except FileNotFoundError:
        raise NotFound(f"{source} has no whole image") from None
    except (OSError, msgspec.DecodeError) as error:
        raise LiveshiftError(f"{source / SUMS} cannot be read: {error}") from error
    if saved.version != VERSION:
        raise Refused(
            f"{source} was written by another version of liveshift: its format is"
            f" {saved.version}, and this one reads {VERSION}"
        )
    return saved


def _taken(files: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in files.rglob("*") if path.is_file())


def _copy(source: Path, target: Path, *, sync: bool) -> tuple[int, str]:
    """Copy a file with its holes; return its size and digest. The file of a store is far larger
    than its data (held_store.py)."""
    digest = xxhash.xxh3_128()
    with source.open("rb", buffering=0) as old, target.open("xb", buffering=0) as new:
        os.fchmod(new.fileno(), 0o600)
        size = os.fstat(old.fileno()).st_size
        new.truncate(size)
        for begin, end in _data(old.fileno(), size):
            at = begin
            while at < end:
                data = os.pread(old.fileno(), min(_CHUNK, end - at), at)
                if not data:
                    raise OSError(f"{source} has become shorter")
                _add(digest, at, data)
                written = 0
                while written < len(data):
                    written += os.pwrite(new.fileno(), data[written:], at + written)
                at += len(data)
        if sync:
            os.fsync(new.fileno())
    return size, digest.hexdigest()


def _add(digest: xxhash.xxh3_128, at: int, data: bytes) -> None:
    """Add data to a digest, block by block, without the blocks of zeros. One file system may keep
    these as a hole, and another one as data."""
    for offset in range(0, len(data), 4096):
        block = data[offset : offset + 4096]
        if block.strip(b"\0"):
            digest.update((at + offset).to_bytes(8, "little"))
            digest.update(block)


def _data(file: int, size: int) -> list[tuple[int, int]]:
    """Where a file has data, in whole blocks of 4096 bytes."""
    parts: list[tuple[int, int]] = []
    at = 0
    while at < size:
        try:
            begin = os.lseek(file, at, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            break
        end = os.lseek(file, begin, os.SEEK_HOLE)
        begin -= begin % 4096
        end = min(size, end + -end % 4096)
        if parts and begin <= parts[-1][1]:
            parts[-1] = (parts[-1][0], max(end, parts[-1][1]))
        else:
            parts.append((begin, end))
        at = end
    return parts


def _sync_directories(top: Path) -> None:
    for path in (top, *(p for p in top.rglob("*") if p.is_dir()), top.parent, top.parent.parent):
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
