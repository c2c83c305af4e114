# SPDX-License-Identifier: Apache-2.0
"""The files and the output of a capsule that leaves this host.

Two passes: ``send_ahead`` while the job trains, ``send_rest`` when the tree is frozen. The second
pass is exact, because nothing writes then; it sends only what has changed since the first one.

A file that was mapped shared and writable during the first pass counts as changed. Its pages may be
writable already, and a store to such a page changes neither mtime nor ctime. A mapping that is made
later shows by the mtime, since the first store to each page faults. On tmpfs it need not: a page
that was read first can be written without a fault. So a file of a carried path on tmpfs that is
mapped, read, written and unmapped between the passes would go unnoticed.

So does a file that was written just before the first pass looked at it. Before Linux 6.13, and on
some file systems still, file times are those of the last tick of the kernel's clock. A second write
in the same tick, after the file was read, changes neither of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ....criu_glue.capsule import output
from ....criu_glue.capsule.output_sender import OutputSender
from ....criu_glue.files import trees
from ....criu_glue.files.identity import Identity
from ....criu_glue.files.trees import Stamp, Tree
from ....criu_glue.survey.survey import Changing, changing, mapped_writable
from ....errors import StepFailed
from ..host import carried_out
from ..host.running_capsule import CapsuleFactory, RunningCapsule

Send = Callable[[str, bytes], None]
"""Sends bytes of a stream to the destination; empty bytes end the stream."""

TICK_NS = 20_000_000
"""The kernel's tick is 10 ms at most (CONFIG_HZ), in nanoseconds, and as much again."""


SECOND_NS = 1_000_000_000
"""Some file systems keep no smaller unit of time, such as ext4 with inodes of 128 bytes."""


def carried_trees(resident: RunningCapsule, factory: CapsuleFactory) -> list[Tree]:
    """What moves besides memory: the capsule's /tmp and /dev/shm, and the carried paths.

    /dev/shm comes last, and only when the tree is frozen: it is memory.
    """
    plan = resident.sandbox.plan
    carried = [Tree("carried:" + p, Path(p)) for p in factory.placement.carried]
    shm = resident.sandbox.root / "dev/shm"
    return [Tree("tmp", plan.tmp), *carried, Tree("shm", shm)]


class OutgoingFiles:
    """The files and the output of one outgoing capsule. Every method blocks."""

    def __init__(self, resident: RunningCapsule, factory: CapsuleFactory) -> None:
        self._resident = resident
        self._factory = factory
        self._trees = carried_trees(resident, factory)
        self._listed: dict[str, dict[str, Stamp]] = {}  # tree → its files at the first pass
        self._unsure: dict[str, set[str]] = {}  # tree → those of them that count as changed
        self._taken: dict[str, dict[str, Stamp]] = {}  # carried path → its files when it left
        self.written: dict[bytes, int] = {}
        """After :meth:`send_rest`: as Manifest.written."""
        self.shared: dict[bytes, Identity] = {}
        """The files that the capsule had open on shared paths when :meth:`send_rest` sent the rest;
        by path."""
        self._output = OutputSender(resident.sandbox)

    def send_ahead(self, send: Send) -> None:
        """First pass: all directories but /dev/shm, and the output so far."""
        for tree in self._trees[:-1]:
            began = time.time_ns()
            now = trees.listing(tree)
            fresh = {name for name, (*_, ctime, _) in now.items() if _may_be_the_same(ctime, began)}
            # After the stamps were taken and before anything is read: a mapping that was there at a
            # file's stamp, and through which the job still writes once the file was read, is there
            # in between too.
            mapped = _relative(mapped_writable(self._resident.sandbox), tree)
            self._unsure[tree.name] = fresh | mapped
            _pack(send, tree, now, 1)
            self._listed[tree.name] = now
        self.send_output(send)

    def send_output(self, send: Send) -> None:
        """Send the output that has come since the last call."""
        self._output.send_new(send)

    def send_rest(self, send: Send) -> dict[str, list[str]]:
        """Second pass: what has changed, and the rest of the output. Returns the names that the
        destination must remove: tree → names. Raises StepFailed for what cannot move."""
        removed = self._send_changes(send)
        output.settle(self._resident.sandbox)
        self._output.finish(send)
        return removed

    def remember_taken(self) -> None:
        """Note on this host which files of the carried paths the capsule has taken along."""
        carried_out.remember(self._factory, self._resident.spec.name, self._taken)

    def close(self) -> None:
        self._output.close()

    def _send_changes(self, send: Send) -> dict[str, list[str]]:
        try:
            found = changing(self._resident.sandbox, self._factory.placement)
        except ProcessLookupError as gone:  # frozen processes can be killed, too
            name = self._resident.spec.name
            raise StepFailed("freeze", f"the command of {name} has just ended") from gone
        if found.passing:
            text, remedy = found.passing[0]
            raise StepFailed("freeze", f"at that moment {text}", hint=remedy)
        self.shared = {os.fsencode(path): which for path, which in found.shared.items()}
        self.written = {os.fsencode(path): size for path, size in found.written.items()}
        removed: dict[str, list[str]] = {}
        for tree in [*self._trees, *_single_files(found)]:
            before = self._listed.get(tree.name, {})
            now = trees.listing(tree)
            always = _relative(found.mapped_writable, tree) | self._unsure.get(tree.name, set())
            again = trees.changed(before, now, always)
            # Also other names that they had before: the name of a mapping may be gone meanwhile.
            forced = trees.all_names(always, now) | trees.all_names(always, before)
            _pack(send, tree, again, 2, forced)
            removed[tree.name] = [name for name in before if name not in now]
            if tree.name.startswith("carried:"):
                self._taken[str(tree.source)] = now
        return removed


def _may_be_the_same(ctime_ns: int, began_ns: int) -> bool:
    """Return whether a write after ``began_ns`` may leave a file with this ctime."""
    unit = TICK_NS if ctime_ns % SECOND_NS else 2 * SECOND_NS
    return ctime_ns > began_ns - unit


def sent_of_files(streams: dict[str, int]) -> int:
    """The bytes of directories and output among all streams. Device memory is sent meanwhile."""
    sizes = dict(streams)
    return sum(n for stream, n in sizes.items() if stream.startswith(("tree:", "output")))


def _pack(
    send: Send, tree: Tree, names: Iterable[str], pass_: int, forced: Iterable[str] = ()
) -> None:
    stream = f"tree:{pass_}:{tree.name}"
    trees.pack(tree, names, lambda data: send(stream, bytes(data)) if data else None, forced)
    send(stream, b"")


def _single_files(found: Changing) -> list[Tree]:
    """Open files in unlisted places of the root file system; each travels as a single file."""
    if not found.single_files:
        return []
    names = tuple(path.lstrip("/") for path in found.single_files)
    return [Tree("open", Path("/"), names)]


def _relative(paths: Iterable[str], tree: Tree) -> set[str]:
    """Turn paths as the capsule sees them into names relative to the top of ``tree``."""
    top = {"tmp": "/tmp", "shm": "/dev/shm"}.get(tree.name, str(tree.source))
    return {str(Path(p).relative_to(top)) for p in paths if Path(p).is_relative_to(top)}
