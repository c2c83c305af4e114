# SPDX-License-Identifier: Apache-2.0
"""The place of an image at a holder, which has no sandbox: directories stay the tar streams as
which they came, and the parts of the output stay files. The host that restores the image unpacks
and checks them.

All lies on the tmpfs of the images, so it takes memory.
"""

from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path

import xxhash

from ...model.manifest import Names
from ..arrival.image_place import Sink, append, create, not_carried
from ..arrival.inbox import FREED_S, LOOK, need_memory

OUTPUT, TREES = "output", "trees"
"""Two directories beside CRIU's images, whose names all end in ".img"."""


class HeldPlace:
    """The directory ``images`` of one image. ``carried``: the paths of this host's cluster file,
    the only ones for which a source may send a directory. The file of every host names the same
    ones, so the host that restores the image takes them too. ``patience``: as in need_memory."""

    def __init__(
        self,
        images: Path,
        migration: str,
        capsule: str,
        carried: tuple[str, ...],
        patience: float = FREED_S,
    ) -> None:
        self.migration = migration
        self.capsule = capsule
        self.images = images
        self.came: Names = {}  # these two stay empty: nothing is unpacked here
        self.written: Names = {}
        self._carried = carried
        self._patience = patience
        self._files: dict[str, int] = {}

    def make(self) -> None:
        """Make the directories. Raises OSError."""
        for name in (OUTPUT, TREES):
            (self.images / name).mkdir(parents=True)

    def output(self, name: str) -> Path:
        return output_file(self.images, name)

    def check_tree(self, tree: str) -> None:
        kind, _, path = tree.partition(":")
        if tree not in ("tmp", "shm", "open") and (kind != "carried" or path not in self._carried):
            raise not_carried(tree)

    def tree(self, stream: str, tree: str) -> Sink:
        self.check_tree(tree)
        file = self._files[stream] = create(tree_file(self.images, stream))
        return _RawStream(file, self._patience).append, partial(self._end, stream)

    def _end(self, stream: str) -> None:
        os.close(self._files.pop(stream))

    def close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                os.close(file)
        self._files.clear()


class _RawStream:
    """Appends a stream to a file in memory, and looks at times whether the host has enough left."""

    def __init__(self, file: int, patience: float) -> None:
        self._file = file
        self._patience = patience
        self._unlooked = 0

    def append(self, data: memoryview) -> None:
        self._unlooked += len(data)
        if self._unlooked > LOOK:
            need_memory(self._patience)
            self._unlooked = 0
        append(self._file, data)


def output_file(images: Path, name: str) -> Path:
    return images / OUTPUT / name


def tree_file(images: Path, stream: str) -> Path:
    """The file of a directory's stream. A hash of the name: it may contain a long path."""
    return images / TREES / xxhash.xxh3_128_hexdigest(stream.encode())
