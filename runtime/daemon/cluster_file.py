# SPDX-License-Identifier: Apache-2.0
"""A daemon follows its cluster file: when the file changes, the daemon starts itself again.

A daemon's restart is a tested path: capsules outlive their agent, and the orchestrator comes back
from its journal. So there is no second way to apply a new file. The daemon waits until no move is
under way on its side, then replaces itself by exec(2), with the same pid, so that systemd sees no
restart. A file with mistakes, or one that cannot take effect while jobs run, changes nothing: the
daemon logs why and goes on with the file that it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import NoReturn

from ...errors import LiveshiftError
from ..config.cluster import Cluster, load

log = logging.getLogger("liveshift.cluster_file")

POLL_S = 1.0
"""The daemon looks at the file every POLL_S seconds. A look is one stat(2)."""

Stamp = tuple[int, int, int]
"""(inode, size in bytes, mtime in ns)"""


class ClusterFile:
    """The file at ``path``, from which the daemon has loaded ``cluster``."""

    def __init__(self, path: Path, cluster: Cluster) -> None:
        self.path = path
        self._cluster = cluster
        self._seen = self._stamp()

    async def follow(
        self,
        daemon: Coroutine[None, None, None],
        idle: Callable[[], bool],
        objection: Callable[[Cluster], str],
    ) -> None:
        """Run a daemon until the file has :meth:`changed`. Return when the daemon has ended.

        Raises what the daemon raises.
        """
        running = asyncio.ensure_future(daemon)
        watching = asyncio.ensure_future(self.changed(idle, objection))
        try:
            await asyncio.wait((running, watching), return_when=asyncio.FIRST_COMPLETED)
            for ended in (task for task in (running, watching) if task.done()):
                ended.result()
        finally:
            for task in (running, watching):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def changed(self, idle: Callable[[], bool], objection: Callable[[Cluster], str]) -> None:
        """Return once the file holds a different, valid cluster and the daemon is idle.

        ``idle``: whether a restart would interrupt nothing. ``objection``: why this daemon cannot
        start with that cluster, "" where it can. It is asked at once, so that a person soon reads
        it, and again when the daemon is idle: a job may have started meanwhile on a host that the
        file does not have any more.
        """
        wanted: Cluster | None = None
        while True:
            if (stamp := self._stamp()) is not None and stamp != self._seen:
                self._seen = stamp
                wanted = await asyncio.to_thread(self._read)
                if wanted is not None and self._rejects(wanted, objection):
                    wanted = None
            if wanted is not None and idle():
                if not self._rejects(wanted, objection):
                    log.info("%s has changed: starting again with it", self.path)
                    return
                wanted = None
            await asyncio.sleep(POLL_S)

    def _read(self) -> Cluster | None:
        """The new cluster if it is valid and differs; None otherwise. Blocks; for a thread."""
        try:
            found = load(self.path)
        except LiveshiftError as error:
            log.error("the changed cluster file is not used: %s", error.message)
            return None
        return found if found.digest != self._cluster.digest else None

    def _rejects(self, found: Cluster, objection: Callable[[Cluster], str]) -> bool:
        """Whether this daemon cannot start with the new cluster; logs why."""
        if why := fixed(self._cluster, found) or objection(found):
            log.error("%s: the changed cluster file is not used: %s", self.path, why)
        return bool(why)

    def _stamp(self) -> Stamp | None:
        """The file's stamp; None while the file is missing, as when another is copied over it."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns


def fixed(old: Cluster, new: Cluster) -> str:
    """Name a changed setting on which capsules, keys or sockets depend; "" if there is none."""
    for name, before, after in (
        ("cluster.name", old.name, new.name),
        ("cluster.overlay", old.overlay, new.overlay),
        ("cluster.orchestrator", old.orchestrator, new.orchestrator),
        ("network", old.relay and old.relay.address, new.relay and new.relay.address),
        ("paths", old.paths, new.paths),
    ):
        if before != after:
            return f"{name} differs, which takes effect only when you restart the daemon"
    return ""


def start_again() -> NoReturn:
    """Replace this process by a new run of the same command line."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # files that a library opened without O_CLOEXEC
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
