# SPDX-License-Identifier: Apache-2.0
"""Saves the image of a capsule in a directory, so that it outlives its holder, and loads it again.

The directory lies on a file system that the hosts share. The file image.json in it says that the
image is whole, and what each other file must be; it is written last. Its own digest goes to the
orchestrator, which signs those of all capsules (snapshot/saved_snapshot.py).
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from .... import units
from ....errors import LiveshiftError, NotFound, Refused, StepFailed
from . import saved_file
from .saved_file import SUFFIX, SavedFile
from .trusted_directory import all_or_nothing, check_trusted, sync_below, write_last

VERSION = 2
SUMS = "image.json"


class SavedImage(msgspec.Struct, frozen=True):
    """The content of image.json. ``files``: file name in an image → its file here."""

    version: int
    image: str
    capsule: str
    files: dict[str, SavedFile]


@dataclass(frozen=True)
class WrittenImage:
    """``bytes``: taken on the disk. ``digest``: the SHA-256 of image.json, in hex."""

    bytes: int
    digest: str


def save(top: Path, files: Iterable[Path], target: Path, image: str, capsule: str) -> WrittenImage:
    """Write ``files``, which are below ``top``, to ``target``, which does not exist, or is what an
    attempt has left. It returns once they are on the disk.

    Raises Refused if there is no room, StepFailed for other errors; then nothing is left.
    """
    place = target.parent.parent
    check_trusted(place)
    paths = sorted(files)
    sums: dict[str, SavedFile] = {}
    with all_or_nothing(target, "hold", f"{target} cannot be written"):
        needed = sum(path.stat().st_blocks * 512 for path in paths)
        if needed > (free := shutil.disk_usage(place).free):
            raise Refused(
                f"{place} has {units.size(free)} left, and the image of {capsule} takes up to"
                f" {units.size(needed)}"
            )
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(mode=0o700, parents=True)
        for path in paths:
            name = str(path.relative_to(top))
            packed = _stored(target, name)
            packed.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            sums[name] = saved_file.write(path, packed)
        data = msgspec.json.encode(SavedImage(VERSION, image, capsule, sums))
        sync_below(target)
        write_last(target / SUMS, data)
    size = sum(each.stored for each in sums.values()) + len(data)
    return WrittenImage(size, hashlib.sha256(data).hexdigest())


def read(source: Path, digest: str) -> SavedImage:
    """Return the list of files of the image in ``source``. ``digest``: as in WrittenImage. Raises
    NotFound if the image is not whole, Refused if its list has another digest."""
    check_trusted(source)
    try:
        data = (source / SUMS).read_bytes()
    except FileNotFoundError:
        raise NotFound(f"{source} has no whole image") from None
    except OSError as error:
        raise LiveshiftError(f"{source / SUMS} cannot be read: {error}") from error
    if (found := hashlib.sha256(data).hexdigest()) != digest:
        raise Refused(
            f"{source / SUMS} was changed since it was signed: its SHA-256 is {found},"
            f" and that of {digest} was signed"
        )
    try:
        saved = msgspec.json.decode(data, type=SavedImage)
    except (ValueError, msgspec.DecodeError) as error:  # ValueError: it is not UTF-8
        raise LiveshiftError(f"{source / SUMS} cannot be read: {error}") from error
    if saved.version != VERSION:
        raise Refused(
            f"{source} was written by another version of liveshift: its format is"
            f" {saved.version}, and this one reads {VERSION}"
        )
    return saved


def content(source: Path, saved: SavedImage, name: str) -> bytes:
    """Return the content of one small file. Raises StepFailed if it is damaged or missing."""
    with tempfile.TemporaryDirectory(prefix="liveshift-") as place:
        target = Path(place, "content")
        _load(source, target, saved, name)
        return target.read_bytes()


def load(source: Path, target: Path, saved: SavedImage, without: str = "") -> None:
    """Load all files of an image to ``target``, each once its digest is right, but for the file
    ``without``. Raises StepFailed; then nothing is left in ``target``."""
    with all_or_nothing(target, "restore", f"{source} cannot be read"):
        for name in saved.files:
            if name == without:
                continue
            path = target / name
            if not path.resolve().is_relative_to(target.resolve()):
                raise StepFailed("restore", f"{source / SUMS} names {name}, which is outside")
            path.parent.mkdir(parents=True, exist_ok=True)
            _load(source, path, saved, name)


def _load(source: Path, target: Path, saved: SavedImage, name: str) -> None:
    if name not in saved.files:
        raise StepFailed("restore", f"the image in {source} has no file {name}")
    try:
        saved_file.read(_stored(source, name), target, saved.files[name])
    except OSError as error:
        raise StepFailed("restore", f"{source} cannot be read: {error}") from error


def _stored(place: Path, name: str) -> Path:
    return place / (name + SUFFIX)
