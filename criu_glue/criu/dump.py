# SPDX-License-Identifier: Apache-2.0
"""Freeze and dump a capsule's tree with CRIU, and hold it frozen until someone decides.

CRIU runs with ``--leave-running`` and calls our hook at ``post-dump``, when every image is
written and the tasks are still stopped. There it waits (held.py):

- thaw:   the hook exits 1, CRIU lets every task go on, sockets and all (nothing was lost);
- commit: nobody answers; the room's process 1 is killed, which ends tasks, CRIU and hook at once.

Without ``--leave-running`` an error inside CRIU kills or damages the source (facts: sockets
stay in repair mode), so the kill is always ours. Should CRIU itself be killed while it holds the
tree, its tasks are stopped by the SIGSTOP that ``pin`` has left pending, and ``thaw`` takes
their sockets out of repair mode.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import psutil

from ...errors import StepFailed
from ..capsule.room import STDERR_FD, STDOUT_FD, Room, enter
from ..capsule.tree import in_order, inner_pid, tasks
from ..images import link_remaps
from ..survey import epoll_sets
from ..survey.epoll_sets import Entry
from ..survey.lost_names import MOST_DELETED
from . import repair_mode
from .capture import Capture, Sink
from .explain import explain
from .held import HeldCriu
from .page_filter import PageFilter
from .tool import Criu

COMMON = (
    *("--tcp-established", "--network-lock", "skip", "--file-locks"),
    *("--ghost-limit", str(MOST_DELETED)),
)
"""Options that dump and restore share: the lock is ours (network.py), deleted files are carried."""

OUT = "epoll-entries"
"""What was taken out of epoll sets and is to be put in again, beside CRIU's files."""

log = logging.getLogger("liveshift.dump")

HINT = "the job runs on at its host; `liveshift events` keeps the log's end"


class FrozenTree:
    """A tree that CRIU dumps and then holds frozen.

    After :meth:`dump` returned the tasks are stopped and every image byte went to the sink.
    After an error in it, or after :meth:`thaw`, they run on as before. The network lock is the
    caller's.
    """

    def __init__(self, room: Room, root_pid: int, directory: Path) -> None:
        self._room = room
        self._root_pid = root_pid
        self._directory = directory
        self._criu = HeldCriu(directory)
        self._capture: Capture | None = None
        self._filter: PageFilter | None = None
        self._begun = False
        self._pinned = False
        self._out: list[Entry] = []
        self.image_bytes = 0

    def dump(
        self, criu: Criu, sink: Sink, deadline_s: float, page_filter: PageFilter | None = None,
        look: Callable[[], None] = lambda: None, epoll: Sequence[Entry] = (),
    ) -> None:  # fmt: skip
        """Freeze and dump; raises StepFailed (tasks running again), or what the sink has raised or
        ``look``, which is called meanwhile. ``epoll``: entries that CRIU cannot dump, as they were
        found a moment ago.

        With ``page_filter`` the image has no pages of what somebody has it hide meanwhile.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        until = time.monotonic() + deadline_s
        self._capture = Capture(self._directory, sink)
        self._filter = page_filter
        self._begun = True
        try:
            self._take_out(epoll)
            preload = (page_filter.library,) if page_filter else ()
            self._criu.start(
                enter(self._room),
                criu.command(*self._options(), preload=preload),
                "post-dump",
                environment=page_filter.environment if page_filter else None,
            )
            self._wait_held(until, look)
            self._capture.wait_idle(deadline_s)
        except BaseException as failed:
            self.thaw()
            if self._capture.error:  # why CRIU could not write on
                raise self._capture.error from failed
            raise
        self.image_bytes = self._capture.bytes

    def taken_out(self) -> list[Entry]:
        """What is to be put into epoll sets again once the tree was restored."""
        return epoll_sets.unchanged(self._out, self._pids())

    def _take_out(self, entries: Sequence[Entry]) -> None:
        """The note comes first: also an agent that is started anew puts them in again."""
        if entries:
            (self._directory / OUT).write_bytes(msgspec.json.encode(list(entries)))
            self._out = epoll_sets.take_out(entries, self._pids())

    def _put_in(self) -> None:
        note = self._directory / OUT
        with contextlib.suppress(FileNotFoundError):
            entries = msgspec.json.decode(note.read_bytes(), type=list[Entry])
            pids = self._pids()
            try:
                epoll_sets.put_in(epoll_sets.unchanged(entries, pids), pids)
            except OSError as error:  # the tree goes on all the same
                log.error("%s: an epoll set lacks a file: %s", self._room.plan.hostname, error)
            note.unlink()

    def _pids(self) -> dict[int, int]:
        """The capsule's pids of the tree → the host's."""
        return {inner: pid for pid, inner in in_order(self._room, self._root_pid).items()}

    def take_up(self) -> None:
        """Go on where an earlier agent left: whatever CRIU does there, :meth:`thaw` ends it."""
        self._begun = self._pinned = True
        self._criu.take_up()

    def pin(self) -> None:
        """See to it that the tasks stay stopped even if CRIU is killed from here on.

        A SIGSTOP to a traced and stopped task stays pending until its tracer is gone. Raises
        StepFailed when CRIU has gone already.
        """
        self._pinned = True
        self._signal(signal.SIGSTOP)
        if not self._criu.alive():
            raise StepFailed("dump", "CRIU was killed while it held the tree", hint=HINT)

    def thaw(self) -> None:
        """Let the tasks go on at the source. Safe to call at any time, more than once."""
        if not self._begun:
            return
        if self._capture is not None:
            self._capture.close()  # a CRIU that still writes images gives up and lets go
        if self._filter is not None:
            with contextlib.suppress(OSError):
                self._filter.hide({})  # nor is it to wait for what will not come
        self._put_in()
        if self._criu.alive() and self._pinned:
            self._signal(signal.SIGCONT)  # takes the pending SIGSTOP back
        elif not self._criu.alive():  # killed: what it would have undone is ours to undo
            repair_mode.leave(task.pid for task in tasks(self._room))
            link_remaps.clear(self._room)
        if not self._criu.tell("stop"):
            raise StepFailed("thaw", f"CRIU does not let go of {self._room.plan.hostname}")
        if self._pinned:
            self._signal(signal.SIGCONT)  # should it have been killed just now
        self._criu.close()
        self._begun = False

    def release(self) -> None:
        """Clean up after the room was ended: CRIU and its hook are gone with it."""
        if self._capture is not None:
            self._capture.close()
        self._criu.close()
        self._begun = False

    def _signal(self, signum: int) -> None:
        """To the tree; not to the hook of a CRIU that was killed, which process 1 has adopted."""
        for task in self._tree():
            with contextlib.suppress(ProcessLookupError):
                os.kill(task.pid, signum)

    def _tree(self) -> list[psutil.Process]:
        for task in tasks(self._room):
            with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):
                if inner_pid(task.pid) == self._root_pid:
                    return [task, *task.children(recursive=True)]
        return []

    def _options(self) -> list[str]:
        external = [
            arg
            for fd in (STDOUT_FD, STDERR_FD)
            for arg in ("--external", f"pipe:[{self._room.pipe_inode(fd)}]")
        ]
        return [
            "dump",
            "--tree",
            str(self._root_pid),
            "--log-file",
            "dump.log",
            "-v2",
            "--stream",
            "--leave-running",
            "--link-remap",
            *COMMON,
            *external,
        ]

    def _wait_held(self, until: float, look: Callable[[], None]) -> None:
        try:
            held = self._criu.wait_held(until, look)
        except TimeoutError:
            raise StepFailed(
                "dump",
                "CRIU did not finish within its deadline (timeouts.freeze)",
                hint="memory that does not go ahead goes over the link meanwhile: `liveshift"
                " migrate --dry-run` says how much that is",
            ) from None
        if not held:
            cause = explain(self._directory / "dump.log")
            raise cause.of_dump()(
                "dump",
                f"CRIU could not dump {self._room.plan.hostname}: {cause.words}",
                hint=HINT,
            )
