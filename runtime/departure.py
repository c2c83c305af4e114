# SPDX-License-Identifier: Apache-2.0
"""The source's side of a migration. Every method blocks; the agent runs them in a thread.

Order: ``precopy`` while the job trains, ``freeze`` to have the tree dumped and held, then
exactly one of ``thaw`` (it goes on here) and ``finish`` (it has gone).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from ..criu_glue import network, output, trees
from ..criu_glue.dump import FrozenTree
from ..criu_glue.room import STDERR_FD, STDOUT_FD
from ..criu_glue.survey import Survey, survey
from ..criu_glue.tool import Criu
from ..criu_glue.trees import Stamp, Tree
from . import carried_out
from .messages import Frozen, Moved
from .resident import ROOT_PID, Housing, Resident
from .stopwatch import Stopwatch
from .wire import Sender

BLOCK = 1 << 20


def carried_trees(resident: Resident, housing: Housing) -> list[Tree]:
    """What goes along besides memory: the capsule's /tmp and /dev/shm, and the carried paths.

    /dev/shm comes last and only once the tree is frozen: it is memory.
    """
    plan = resident.room.plan
    found = [Tree("tmp", plan.tmp, plan.tmp)]
    for path in housing.placement.carried:
        found.append(Tree("carried:" + path, Path(path), Path(path)))
    shm = resident.room.root / "dev/shm"
    return [*found, Tree("shm", shm, shm)]


class Departure:
    """One capsule on its way out of this host."""

    def __init__(
        self, migration: str, resident: Resident, housing: Housing, criu: Criu, sender: Sender
    ) -> None:
        self.migration = migration
        self.resident = resident
        self._housing = housing
        self._sender = sender
        self._trees = carried_trees(resident, housing)
        self._listed: dict[str, dict[str, Stamp]] = {}
        self._taken: dict[str, dict[str, Stamp]] = {}
        self._log_sent = 0
        self._images = housing.cluster.paths.run / "images" / migration
        self._frozen = FrozenTree(criu, resident.room, ROOT_PID, self._images)
        self._locked = False

    def precopy(self) -> Moved:
        """Send directories and output as they are now; the job trains meanwhile."""
        watch = Stopwatch()
        with watch.phase("pre-copy") as lap:
            for tree in self._trees[:-1]:
                now = trees.listing(tree)
                self._pack(tree, now, 1)
                self._listed[tree.name] = now
            self._send_log()
            self._sender.finish()
            lap.bytes = self._sender.bytes
        return Moved(self._sender.bytes, watch.phases)

    def freeze(self, deadline_s: float) -> Frozen:
        """Freeze, dump into the wire, hold. On an error the tasks run and the network is open."""
        before = self._sender.bytes
        watch = Stopwatch()
        try:
            with watch.phase("lock", frozen=True):
                network.lock(self.resident.room.init)
                self._locked = True
            with watch.phase("dump", frozen=True) as lap:
                self._frozen.dump(
                    lambda name, data: self._sender.send("image:" + name, data), deadline_s
                )
                lap.bytes = self._frozen.image_bytes
            with watch.phase("files", frozen=True) as lap:
                files_before = self._sender.bytes
                removed = self._send_changes()
                output.settle(self.resident.room, self._log_sent)
                self._send_log()
                lap.bytes = self._sender.bytes - files_before
            with watch.phase("ship", frozen=True) as lap:
                self._sender.finish()
                lap.detail = "the rest of the image, on its way"
        except BaseException:
            self.thaw()
            raise
        inodes = {self.resident.room.pipe_inode(fd): fd for fd in (STDOUT_FD, STDERR_FD)}
        return Frozen(
            image_bytes=self._sender.bytes - before,
            streams=dict(self._sender.streams),
            pipes=inodes,
            removed=removed,
            phases=watch.phases,
        )

    def thaw(self) -> None:
        """The tree goes on here: tasks first, then the network they expect."""
        try:
            self._frozen.thaw()
        finally:
            if self._locked:
                network.unlock(self.resident.room.init)
                self._locked = False
            self._close()

    def finish(self) -> None:
        """The tree has gone: kill the held copy, take its room and network away."""
        self.resident.leaving = True
        carried_out.remember(self._housing, self.resident.spec.name, self._taken)
        network.unplug(self.resident.overlay, self.resident.netns, self.resident.spec.index)
        self.resident.remove()
        self._frozen.release()
        self._close()

    def _close(self) -> None:
        with contextlib.suppress(Exception):
            self._sender.close()
        shutil.rmtree(self._images, ignore_errors=True)

    def _send_changes(self) -> dict[str, list[str]]:
        """Second pass over the directories, exact since nothing writes; returns what is gone."""
        look = self.survey()
        removed: dict[str, list[str]] = {}
        for tree in [*self._trees, *_single(look)]:
            before = self._listed.get(tree.name, {})
            now = trees.listing(tree)
            always = _relative(look.mapped_writable, tree)
            self._pack(tree, trees.changed(before, now, always), 2, always)
            removed[tree.name] = [name for name in before if name not in now]
            if tree.name.startswith("carried:"):
                self._taken[str(tree.source)] = now
        return removed

    def survey(self) -> Survey:
        return survey(self.resident.room, ROOT_PID, self._housing.placement)

    def _pack(
        self, tree: Tree, names: Iterable[str], pass_: int, forced: Iterable[str] = ()
    ) -> None:
        stream = f"tree:{pass_}:{tree.name}"
        trees.pack(tree, names, self._into(stream), forced)
        self._sender.send(stream, b"")

    def _into(self, stream: str) -> Callable[[bytes], None]:
        return lambda data: self._sender.send(stream, bytes(data)) if data else None

    def _send_log(self) -> None:
        with self.resident.room.plan.log.open("rb") as log:
            log.seek(self._log_sent)
            raw = log.read()
            raw = raw[: output.whole(raw)]
        for at in range(0, len(raw), BLOCK):
            self._sender.send("output", raw[at : at + BLOCK])
        self._log_sent += len(raw)


def _single(look: Survey) -> list[Tree]:
    """Open files on unlisted places of the root file system, each by itself."""
    if not look.single_files:
        return []
    names = tuple(path.lstrip("/") for path in look.single_files)
    return [Tree("open", Path("/"), Path("/"), names)]


def _relative(paths: tuple[str, ...], tree: Tree) -> list[str]:
    """Paths as the capsule sees them → names relative to the tree they are in."""
    top = {"tmp": "/tmp", "shm": "/dev/shm"}.get(tree.name, str(tree.source))
    return [str(Path(p).relative_to(top)) for p in paths if Path(p).is_relative_to(top)]
