# SPDX-License-Identifier: Apache-2.0
"""What an image consists of: the last stream of every image, and the file that says it is here.

The source writes down every stream it sent, its size and the hash over all of it. A destination
whose streams are equal keeps the manifest beside the images: with it an image is complete, without
it there is none. Names of files are bytes, as the kernel knows them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ...criu_glue.survey.epoll_sets import Entry
from ...errors import LiveshiftError, NotFound

STREAM = "manifest"
VERSION = 2

LIMIT = 16 << 20
"""Bytes of a manifest: room for the names of 200,000 removed files and more."""

FILE, CAME = "manifest", "came"
"""Names beside the images, which none of CRIU's can have."""

Names = dict[str, set[str]]
"""Tree or carried path → names below it."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``streams``: name → (bytes, xxh3-64 of them), where a stream ``memory:k`` has the xxh3-64 of
    the tags of its chunks' seals instead (wire.Lanes.end), by which each was opened; ``pipes``:
    inode → STDOUT_FD or STDERR_FD; ``removed``: tree → names that the first pass sent and that are
    gone; ``image_bytes``: what was sent while the job stood still; ``epoll``: what CRIU could not
    dump of epoll sets."""

    version: int
    migration: str
    capsule: str
    image_bytes: int
    streams: dict[str, tuple[int, int]]
    pipes: dict[int, int]
    removed: dict[str, list[bytes]]
    epoll: list[Entry]

    def gone(self) -> dict[str, list[str]]:
        """``removed`` with names as Python's os functions take them."""
        return {tree: [os.fsdecode(n) for n in names] for tree, names in self.removed.items()}


class _Came(msgspec.Struct, forbid_unknown_fields=True):
    came: dict[str, list[bytes]]
    written: dict[str, list[bytes]]


@dataclass(frozen=True)
class Landed:
    """An image that is complete, and what came with it (see inbox.Inbox)."""

    manifest: Manifest
    came: Names
    written: Names


def encode(manifest: Manifest) -> bytes:
    return msgspec.msgpack.encode(manifest)


def decode(raw: bytes | bytearray) -> Manifest:
    """Raises LiveshiftError saying what is wrong with it."""
    if len(raw) > LIMIT:
        raise LiveshiftError(f"the manifest has {len(raw)} bytes, at most {LIMIT} are taken")
    found: Manifest = _decode(raw, Manifest, "the manifest")
    if found.version != VERSION:
        raise LiveshiftError(
            f"the manifest has version {found.version}, this liveshift reads version {VERSION}",
            hint="run the same version of liveshift on every host",
        )
    return found


def as_bytes(names: Mapping[str, Iterable[str]]) -> dict[str, list[bytes]]:
    """Names in a manifest's form, in an order that does not change."""
    return {tree: [os.fsencode(n) for n in sorted(below)] for tree, below in names.items()}


def save(images: Path, manifest: Manifest, came: Names, written: Names) -> None:
    """Write both files; the image is complete once this returns."""
    (images / CAME).write_bytes(msgspec.msgpack.encode(_Came(as_bytes(came), as_bytes(written))))
    staged = images / f".{FILE}"
    staged.write_bytes(encode(manifest))
    staged.rename(images / FILE)


def load(images: Path) -> Landed:
    """The complete image in a directory, of whatever life of the agent.

    Raises NotFound when there is none, LiveshiftError when what is there is damaged.
    """
    try:
        manifest = decode((images / FILE).read_bytes())
        noted = _decode((images / CAME).read_bytes(), _Came, "a list of what came")
    except FileNotFoundError as error:
        raise NotFound(f"no complete image in {images}: {error.filename} is not there") from None
    return Landed(manifest, _as_names(noted.came), _as_names(noted.written))


def _as_names(names: dict[str, list[bytes]]) -> Names:
    return {tree: {os.fsdecode(n) for n in below} for tree, below in names.items()}


def _decode(raw: bytes | bytearray, kind: type[Any], what: str) -> Any:
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise LiveshiftError(f"{what} is not understood: {error}") from error
