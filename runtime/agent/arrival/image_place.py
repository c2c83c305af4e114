# SPDX-License-Identifier: Apache-2.0
"""Where the streams of an image go at the host that receives it.

A destination has built a sandbox: it unpacks directories there and writes the output into its log.
A holder (agent/holding/) has no sandbox, and keeps the streams as they come.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cached_property, partial
from pathlib import Path
from tarfile import TarInfo
from typing import Protocol

from ....criu_glue.capsule.mounts import Placement, below
from ....criu_glue.files import putting_back
from ....criu_glue.files.putting_back import BringingAlong, PuttingBack
from ....criu_glue.files.rights import User
from ....criu_glue.files.sparing import Sparing, Stamps
from ....criu_glue.files.unpacking import Unpacker
from ....criu_glue.images import written_files
from ....errors import StepFailed
from ...model.manifest import Names
from ...model.snapshots import is_restore_name
from ..host.running_capsule import RunningCapsule

Sink = tuple[Callable[[memoryview], None], Callable[[], object]]
"""Takes the bytes of a stream, and its end."""


class ImagePlace(Protocol):
    """The place of one image. ``migration``: its name on the wire. ``capsule``: the capsule that
    the manifest must name. ``images``: the directory of CRIU's images and of the manifest."""

    migration: str
    capsule: str
    images: Path
    came: Names  # carried path → names that came
    written: Names  # tree → names written here

    def output(self, name: str) -> Path:
        """The file for a part of the capsule's output."""

    def tree(self, stream: str, tree: str) -> Sink:
        """Begin to take a directory; raises StepFailed for one that no image has."""

    def check_tree(self, tree: str) -> None:
        """Raises StepFailed for a directory that no image has."""

    def close(self) -> None:
        """Close all directories that have not ended. A second call does no harm."""


class SandboxPlace:
    """The sandbox of a capsule that comes here. ``images`` has the name of the migration.
    ``placement``: of this host's cluster file; its carried paths are the only ones for which a
    source may send a directory. ``left`` reads, by carried path, the files that the capsule has
    left here. That may take seconds. ``back``: the capsule goes back to a snapshot, and these
    directories have its files."""

    def __init__(
        self,
        images: Path,
        resident: RunningCapsule,
        placement: Placement,
        left: Callable[[], Mapping[str, Stamps]] = dict,
        *,
        back: bool = False,
    ) -> None:
        self.migration = images.name
        self.capsule = resident.spec.name
        self.images = images
        self._placement = placement
        self._read_left = left
        self._back = back
        self._sparing: dict[str, Sparing] = {}  # by carried path, for both passes
        self.came: Names = {}
        self.written: Names = {}
        self._resident = resident
        self._unpackers: dict[str, Unpacker] = {}
        self._expected: dict[str, dict[str, TarInfo]] = {}  # by tree
        self._could_write: dict[str, set[str]] = {}  # by tree: names of files

    def output(self, name: str) -> Path:
        return self._resident.sandbox.plan.log / name

    def top(self, tree: str) -> Path:
        """The directory of a tree on this host; raises StepFailed for a tree that no image has."""
        plan = self._resident.sandbox.plan
        if tree == "tmp":
            return plan.tmp
        if tree == "shm":
            return self._resident.sandbox.root / "dev/shm"
        if tree == "open":
            return Path("/")
        kind, _, path = tree.partition(":")
        if kind == "carried" and path in self._placement.carried:
            if path not in self._sparing:
                made = not Path(path).exists()
                self._sparing[path] = Sparing(self.left.get(path), made=made)
            Path(path).mkdir(parents=True, exist_ok=True)
            return Path(path)
        raise not_carried(tree)

    @cached_property
    def left(self) -> Mapping[str, Stamps]:
        return self._read_left()

    @property
    def of_the_capsule(self) -> dict[str, dict[str, Sequence[int]]]:
        """The files on carried paths that the capsule had left here, and those that this image has
        put here: path → (name → stamp)."""
        return {
            path: {**self.left.get(path, {}), **sparing.placed}
            for path, sparing in self._sparing.items()
        }

    def check_tree(self, tree: str) -> None:
        self.top(tree)

    def tree(self, stream: str, tree: str) -> Sink:
        # Pass one reads the files while the job runs; what it leaves out, pass two brings.
        running = stream.startswith("tree:1:")
        unpacker = self._unpackers[stream] = self._unpacker(tree, running=running)
        return unpacker.write, partial(self._end_tree, stream, tree)

    def _unpacker(self, tree: str, *, running: bool) -> Unpacker:
        plan, top = self._resident.sandbox.plan, self.top(tree)
        user = User(plan.uid, plan.gid, plan.groups)
        if not tree.startswith("carried:"):
            return Unpacker(top, user=user, single=tree == "open", running=running)
        sparing = self._sparing[tree.removeprefix("carried:")]
        if not is_restore_name(self.migration):
            return Unpacker(top, sparing, user, running=running)
        opened, written = self._opened
        names = self._could_write[tree] = _relative(written, top)
        if not self._back:
            return BringingAlong(top, sparing, user, names, running=running)
        return PuttingBack(top, user, _relative(opened, top), names)

    def only_read(self) -> set[bytes]:
        """The files on carried paths that a capsule which goes back to a snapshot has open only for
        reading: they may have changed since."""
        if not is_restore_name(self.migration):
            return set()
        opened, written = self._opened
        return opened - written

    @cached_property
    def _opened(self) -> tuple[set[bytes], set[bytes]]:
        """As written_files.carried. CRIU's images have come before the directories: a holder sends
        them first."""
        return written_files.carried(self.images, self._placement)

    def touch_written(self) -> None:
        """To be called when a capsule that goes back to a snapshot is about to run."""
        for tree, names in self._could_write.items():
            putting_back.touch(self.top(tree), names)

    def _end_tree(self, stream: str, tree: str) -> None:
        unpacker = self._unpackers.pop(stream)
        unpacker.finish()
        if isinstance(unpacker, BringingAlong):
            expected = self._expected.setdefault(tree, {})
            expected.update(unpacker.expected)  # the second pass overrules the first one
            if stream.startswith("tree:2:"):
                putting_back.check(self.top(tree), expected)
        self.came.setdefault(tree.removeprefix("carried:"), set()).update(unpacker.names)
        self.written.setdefault(tree, set()).update(unpacker.written)

    def close(self) -> None:
        for unpacker in self._unpackers.values():
            with contextlib.suppress(Exception):
                unpacker.finish()
        self._unpackers.clear()


def _relative(paths: Set[bytes], top: Path) -> set[str]:
    """The names, relative to ``top``, of those below it."""
    decoded = map(os.fsdecode, paths)
    return {os.path.relpath(name, top) for name in decoded if below(name, str(top))}


def not_carried(tree: str) -> StepFailed:
    return StepFailed(
        "ship",
        f"an image brings the directory {tree[:200]!a}, which is not carried to this host",
        hint="files.carried must be the same in the cluster file of every host",
    )


def create(path: Path) -> int:
    """Make a file that was not there; return a descriptor that appends to it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600)


def append(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]
