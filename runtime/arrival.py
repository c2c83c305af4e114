# SPDX-License-Identifier: Apache-2.0
"""The destination's side of a migration: the inbox that takes the image, and the restore.

Images lie in memory (a tmpfs under the run directory) and nowhere else. Methods block; the
agent runs them in a thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path

from ..criu_glue import restore, trees
from ..criu_glue.tool import Criu
from ..errors import StepFailed
from . import carried_out
from .messages import Frozen, Moved
from .resident import Housing, Resident
from .stopwatch import Stopwatch


@dataclass
class Inbox:
    """Takes one migration's streams: image files, directories, the output log."""

    images: Path
    resident: Resident
    bytes: dict[str, int] = field(default_factory=dict)
    came: dict[str, set[str]] = field(default_factory=dict)  # carried path → names
    written: dict[str, set[str]] = field(default_factory=dict)  # tree → names put there
    _files: dict[str, int] = field(default_factory=dict)
    _unpackers: dict[str, trees.Unpacker] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def write(self, stream: str, data: memoryview) -> None:
        """One chunk; empty data ends the stream. Raises OSError when there is no room."""
        with self._lock:
            kind, _, name = stream.partition(":")
            self.bytes[stream] = self.bytes.get(stream, 0) + len(data)
            if kind == "tree":
                self._into_tree(stream, name.partition(":")[2], data)
            else:
                self._into_file(stream, self._path(kind, name), data)

    def close(self) -> None:
        with self._lock:
            for fd in self._files.values():
                os.close(fd)
            self._files.clear()
            for unpacker in self._unpackers.values():
                with contextlib.suppress(Exception):
                    unpacker.finish()
            self._unpackers.clear()

    def _path(self, kind: str, name: str) -> Path:
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


class Arrival:
    """One capsule on its way into this host: a reserved room and what has come for it."""

    def __init__(self, migration: str, source: str, resident: Resident, housing: Housing) -> None:
        self.migration = migration
        self.source = source
        self.resident = resident
        self._housing = housing
        self.images = housing.cluster.paths.run / "images" / migration
        self.images.mkdir(parents=True, exist_ok=True)
        self.inbox = Inbox(self.images, resident)

    def restore(self, criu: Criu, frozen: Frozen, deadline_s: float) -> Moved:
        """Check that all is here, restore, and let the network open; on an error nothing runs."""
        watch = Stopwatch()
        with watch.phase("verify", frozen=True) as lap:
            self.inbox.close()
            self._check_complete(frozen)
            for tree, names in frozen.removed.items():
                put_here = self.inbox.written.get(tree, set())
                trees.remove(self.inbox.top(tree), put_here.intersection(names))
            carried_out.reconcile(self._housing, self.resident.spec.name, self.inbox.came)
            lap.detail = f"{len(frozen.streams)} streams"
        with watch.phase("restore", frozen=True) as lap:
            restore.restore(criu, self.resident.room, self.images, frozen.pipes, deadline_s)
            lap.bytes = frozen.image_bytes
        return Moved(frozen.image_bytes, watch.phases)

    def discard(self) -> None:
        """Drop the room and whatever has arrived. May be called again."""
        self.inbox.close()
        self.resident.leaving = True
        self.resident.remove()
        self.free_images()

    def free_images(self) -> None:
        shutil.rmtree(self.images, ignore_errors=True)

    def _check_complete(self, frozen: Frozen) -> None:
        short = {
            stream: (self.inbox.bytes.get(stream, 0), size)
            for stream, size in frozen.streams.items()
            if self.inbox.bytes.get(stream, 0) != size
        }
        if short:
            raise StepFailed("restore", f"the image is not complete: {json.dumps(short)[:300]}")
