# SPDX-License-Identifier: Apache-2.0
"""Takes one migration's streams at the destination: image files, directories, the output log."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from ..criu_glue import trees
from ..errors import LiveshiftError, StepFailed
from . import manifest
from .resident import Resident


@dataclass
class Inbox:
    """Takes one migration's streams: image files, directories, the output log."""

    images: Path
    resident: Resident
    bytes: dict[str, int] = field(default_factory=dict)
    came: dict[str, set[str]] = field(default_factory=dict)  # carried path → names
    written: dict[str, set[str]] = field(default_factory=dict)  # tree → names put there
    landed: manifest.Landed | None = None
    _manifest: bytearray = field(default_factory=bytearray)
    _files: dict[str, int] = field(default_factory=dict)
    _unpackers: dict[str, trees.Unpacker] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def complete(self) -> bool:
        return self.landed is not None

    @property
    def manifest(self) -> manifest.Manifest:
        assert self.landed is not None
        return self.landed.manifest

    def take_up(self) -> bool:
        """What an earlier agent has taken; returns whether it is complete."""
        try:
            self.landed = manifest.load(self.images)
        except LiveshiftError:
            return False
        self.came, self.written = self.landed.came, self.landed.written
        return True

    def write(self, stream: str, data: memoryview) -> None:
        """One chunk; empty data ends the stream. Raises OSError when there is no room."""
        with self._lock:
            kind, _, name = stream.partition(":")
            self.bytes[stream] = self.bytes.get(stream, 0) + len(data)
            if stream == manifest.STREAM:
                self._take_manifest(data)
            elif kind == "tree":
                self._into_tree(stream, name.partition(":")[2], data)
            elif data:
                self._into_file(stream, self.path(kind, name), data)

    def _take_manifest(self, data: memoryview) -> None:
        self._manifest += data
        if not data:
            found = manifest.decode(self._manifest)
            manifest.save(self.images, found, self.came, self.written)
            self.landed = manifest.Landed(found, self.came, self.written)

    def close(self) -> None:
        with self._lock:
            for fd in self._files.values():
                os.close(fd)
            self._files.clear()
            for unpacker in self._unpackers.values():
                with contextlib.suppress(Exception):
                    unpacker.finish()
            self._unpackers.clear()

    def path(self, kind: str, name: str) -> Path:
        if kind == "output":
            return self.resident.room.plan.log
        if kind == "image" and name and "/" not in name and not name.startswith("."):
            return self.images / name
        raise StepFailed(
            "ship", f"an image names a stream that no destination takes: {kind}:{name}"
        )

    def _into_file(self, stream: str, path: Path, data: memoryview) -> None:
        fd = self._files.get(stream)
        if fd is None:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._files[stream] = fd
        while data:
            data = data[os.write(fd, data) :]

    def _into_tree(self, stream: str, tree: str, data: memoryview) -> None:
        unpacker = self._unpackers.get(stream)
        if unpacker is None:
            sparing = tree.startswith("carried:")
            unpacker = self._unpackers[stream] = trees.Unpacker(self.top(tree), sparing)
        if data:
            unpacker.write(data)
        else:
            del self._unpackers[stream]
            unpacker.finish()
            self.came.setdefault(tree.removeprefix("carried:"), set()).update(unpacker.names)
            self.written.setdefault(tree, set()).update(unpacker.written)

    def top(self, tree: str) -> Path:
        """Where a tree of that name lies here."""
        plan = self.resident.room.plan
        if tree == "tmp":
            return plan.tmp
        if tree == "shm":
            return self.resident.room.root / "dev/shm"
        if tree == "open":
            return Path("/")
        path = Path(tree.removeprefix("carried:"))
        path.mkdir(parents=True, exist_ok=True)
        return path
