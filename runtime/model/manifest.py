# SPDX-License-Identifier: Apache-2.0
"""The manifest: the last stream of every image, and the file that marks the image as complete.

The source lists every stream that it sent, with its size and the hash over all of it. If the
destination's streams are equal, it stores the manifest beside the images. Only with that file is an
image complete. Names of files are bytes, as the kernel knows them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ...criu_glue.files.identity import Identity
from ...criu_glue.survey.epoll_sets import EpollEntry
from ...errors import LiveshiftError, NotFound

STREAM = "manifest"
VERSION = 4
EARLIER = (3,)
"""Versions that are read, too: they lack what has a default now."""

LIMIT = 16 << 20
"""A manifest has at most this many bytes, enough for the names of over 200,000 removed files."""

FILE, CAME = "manifest", "came"
"""The names of two files beside the images. CRIU uses neither name."""

Names = dict[str, set[str]]
"""Tree or carried path → the names below it."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of an image.

    ``streams``: name → (bytes, xxh3-64 of them). A stream ``memory:k`` has instead the xxh3-64 of
    the tags that opened its chunks (wire.Lanes.end). ``pipes``: inode → STDOUT_FD or STDERR_FD.
    ``removed``: tree → names that the first pass sent and that are gone now. ``image_bytes``: sent
    while the job was frozen. ``epoll``: the parts of epoll sets that CRIU could not dump.
    ``shared``: the files that the capsule had open on shared paths, by path. ``written``: those
    that were open for writing, path → bytes when the capsule was frozen.
    """

    version: int
    migration: str
    capsule: str
    image_bytes: int
    streams: dict[str, tuple[int, int]]
    pipes: dict[int, int]
    removed: dict[str, list[bytes]]
    epoll: list[EpollEntry]
    shared: dict[bytes, Identity] = msgspec.field(default_factory=dict)
    written: dict[bytes, int] = msgspec.field(default_factory=dict)

    def gone(self) -> dict[str, list[str]]:
        """``removed``, with names as Python's os functions take them."""
        return {tree: [os.fsdecode(n) for n in names] for tree, names in self.removed.items()}


class _Came(msgspec.Struct, forbid_unknown_fields=True):
    came: dict[str, list[bytes]]
    written: dict[str, list[bytes]]


@dataclass(frozen=True)
class Landed:
    """A complete image, and what came with it (see inbox.Inbox)."""

    manifest: Manifest
    came: Names
    written: Names


def encode(manifest: Manifest) -> bytes:
    return msgspec.msgpack.encode(manifest)


def decode(raw: bytes | bytearray) -> Manifest:
    """Decode a manifest; raises LiveshiftError with what is wrong in it."""
    if len(raw) > LIMIT:
        raise LiveshiftError(f"the manifest has {len(raw)} bytes, at most {LIMIT} are taken")
    found: Manifest = _decode(raw, Manifest, "the manifest")
    if found.version not in (*EARLIER, VERSION):
        raise LiveshiftError(
            f"the manifest has version {found.version}, this liveshift reads the versions"
            f" {', '.join(map(str, (*EARLIER, VERSION)))}",
            hint="run the same version of liveshift on every host",
        )
    return found


def as_bytes(names: Mapping[str, Iterable[str]]) -> dict[str, list[bytes]]:
    """The names in the form that a manifest has, in a fixed order."""
    return {tree: [os.fsencode(n) for n in sorted(below)] for tree, below in names.items()}


def save(images: Path, manifest: Manifest, came: Names, written: Names) -> None:
    """Write both files; the image is complete once this returns."""
    (images / CAME).write_bytes(msgspec.msgpack.encode(_Came(as_bytes(came), as_bytes(written))))
    staged = images / f".{FILE}"
    staged.write_bytes(encode(manifest))
    staged.rename(images / FILE)


def load(images: Path) -> Landed:
    """Read the complete image in a directory, even if an earlier run of the agent received it.

    Raises NotFound when there is none, LiveshiftError when it is damaged.
    """
    try:
        manifest = decode((images / FILE).read_bytes())
        noted = _decode((images / CAME).read_bytes(), _Came, "a list of what came")
    except FileNotFoundError as error:
        raise NotFound(f"no complete image in {images}: {error.filename} does not exist") from None
    return Landed(manifest, _as_names(noted.came), _as_names(noted.written))


def _as_names(names: dict[str, list[bytes]]) -> Names:
    return {tree: {os.fsdecode(n) for n in below} for tree, below in names.items()}


def _decode(raw: bytes | bytearray, kind: type[Any], what: str) -> Any:
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise LiveshiftError(f"{what} is not understood: {error}") from error
