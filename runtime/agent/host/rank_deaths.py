# SPDX-License-Identifier: Apache-2.0
"""Notices how the ranks of a capsule end, since their command may not say it: torchrun ends with 1,
whether a rank was killed or has failed.

A rank is here a process that has finished a collective, as a page says that it has mapped: the page
of an ended rank stays, and another process may get that rank's pid. What counts is the first one
that ended badly: torchrun then ends the others, by signals too. That end is forgotten in two cases.
If a rank trains that was started later, torchrun has put it in the place of the dead one. And if
the command outlives the end by OUTLIVED_S seconds, the program itself has wanted it: of a helper,
say. A rank that ends before the agent's next heartbeat has seen it, or while no agent runs, is
missed; then the command's code is all that is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ....criu_glue.capsule.sandboxes import started
from ....criu_glue.capsule.tree import inner_pid
from ....interposer.page import Page, PageError, PageFile
from .exit_status import exit_status

OUTLIVED_S = 60.0
"""torchrun gives the workers that it ends 30 seconds before it kills them (torch 2.13,
torch/distributed/elastic/multiprocessing/api.py), and ends itself after that."""

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended: ``signal`` (0 for none), and how many collectives it had finished. ``at``:
    when that was seen, in seconds since boot."""

    signal: int
    collectives: int
    at: float = field(default=0.0, compare=False)

    @property
    def ago(self) -> float:
        """Seconds since then."""
        return _now() - self.at


class RankDeaths:
    """The ranks of one capsule on this host. ``first``: the first bad end, None if there was none.

    ``command``: the command's pid in the capsule. ``command_ended``: whether it has ended. The
    kernel kills what is left of a capsule then, which is no fault.
    """

    def __init__(self, command: int, command_ended: Callable[[], bool]) -> None:
        self.first: RankEnd | None = None
        self._command = command
        self._command_ended = command_ended
        self._known: dict[int, int] = {}  # the host's pid → the capsule's pid
        # Pid, pidfd, page and start (seconds since boot) of those that are not followed yet.
        self._new: list[tuple[int, int, PageFile, float]] = []

    def find(self, pids: Sequence[int], pages: Iterable[Page], open_page: OpenPage) -> None:
        """Find ranks that are not known yet; called in a thread. ``pids``: the processes of the
        capsule as this host sees them; ``pages``: theirs, by their pids in the capsule."""
        # One that has ended stays known as long as it is a zombie.
        self._known = {pid: self._known[pid] for pid in pids if pid in self._known}
        trains = {page.pid for page in pages if page.finished} - set(self._known.values())
        for pid in pids if trains else ():
            if pid in self._known:
                continue
            with contextlib.suppress(OSError, PageError):  # it has just ended
                inner = inner_pid(pid)
                if inner in trains:
                    self._open(pid, inner, open_page)

    def _open(self, pid: int, inner: int, open_page: OpenPage) -> None:
        with contextlib.ExitStack() as undo:
            pidfd = os.pidfd_open(pid)
            undo.callback(os.close, pidfd)
            if inner_pid(pid) != inner:  # the pid belonged to another process before
                raise ProcessLookupError
            page = open_page(pid, inner)
            undo.callback(page.close)
            began = started(pid) / TICKS
            signal.pidfd_send_signal(pidfd, 0)  # fails if the pid belongs to another one by now
            undo.pop_all()
        self._known[pid] = inner
        self._new.append((pid, pidfd, page, began))

    def follow(self) -> None:
        """Follow the ranks that :meth:`find` has found, in this thread's event loop. Called with
        each heartbeat while the command runs."""
        loop = asyncio.get_running_loop()
        if self.first and self.first.ago > OUTLIVED_S and not self._command_ended():
            self.first = None
        while self._new:
            pid, pidfd, page, began = self._new.pop()
            if self.first and began > self.first.at:
                self.first = None
            loop.add_reader(pidfd, self._gone, pid, pidfd, page)

    def _gone(self, pid: int, pidfd: int, page: PageFile) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        try:
            status = exit_status(pidfd, pid)
            if status is None or status == 0 or self.first is not None:
                return
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            if number == signal.SIGKILL and page.pid != self._command and self._command_ended():
                return
            collectives = 0
            with contextlib.suppress(PageError):
                collectives = page.page().finished
            self.first = RankEnd(number, collectives, _now())
        finally:
            os.close(pidfd)
            page.close()


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


OpenPage = Callable[[int, int], PageFile]
"""Opens the page of a process of the capsule, by its pids on the host and in the capsule. Raises
OSError or PageError, also if the process has not mapped it."""
