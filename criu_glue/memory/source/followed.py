# SPDX-License-Identifier: Apache-2.0
"""One process whose memory the tracker follows."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator

from ..engine import PAGE
from . import userfault, writers
from .maps import own_ranges, shares_memory
from .proc import About
from .source_engine import Pull, Ranges, Regions, Sent, judge, scan_present, scan_written

TRIES = 3
"""How often a process that cannot be tracked is tried again, once a round."""

PART = 256 << 20
PARTS = 64
"""A standstill's look at a process is divided into parts of so many bytes, or into so many."""


class Followed:
    """A process, by the host's ``pid``. What it has written is known as long as it is tracked."""

    def __init__(self, pid: int, who: About, incarnation: int) -> None:
        self.pid = pid
        self.who = who
        self.incarnation = incarnation
        self.sent = Sent()
        self.untracked = ""
        """Why it is not tracked, in words."""
        self.distrusted = ""
        """Why what is tracked is not all that is written, in words."""
        self.written = Regions()
        """What the next pull is to read."""
        self.present = Regions()
        self.ranges: Ranges = []
        self._uffd: int | None = None
        self._tries = 0
        self._whole = True  # there may be pages that were listed and not read
        self._read_once = False
        self._files: list[int] = []
        self._found: list[Regions] = []

    def close(self) -> None:
        self._close_uffd()
        self._close_files()

    def interrupted(self) -> None:
        """What was listed has not all been read: the next look lists that as well."""
        self._whole = True

    def look(self, known: int, only_look: bool = False) -> None:
        """List in ``written`` what it wrote since the last look, and protect that.

        Raises FileNotFoundError or ProcessLookupError when it has ended. One that cannot be tracked
        is listed whole, once; the rest of it is left to the standstill. With ``only_look`` what is
        listed will not be read now.
        """
        self.written.clear()
        for _ in range(2):  # it may have run another program meanwhile
            self.ranges = own_ranges(self.pid, self.who.locked)
            if not self._track() or self._look_tracked(known, only_look):
                break
        # Not before it: what began later than the look, or is through by now, is read as it is.
        if not self.distrusted:
            self.distrusted = writers.past_page_tables(self.pid)
        if self._uffd is None and not self._read_once and not only_look:
            for look in self.looks_standing(known):
                look()
            self.judge(distrust=True)
            self._read_once = True

    def _look_tracked(self, known: int, only_look: bool) -> bool:
        assert self._uffd is not None
        whole = self._whole and not only_look
        try:
            with self._pagemap() as pagemap:
                scan_written(
                    pagemap, self._uffd, self.ranges, known, whole, self.sent, self.written
                )
        except FileNotFoundError:
            raise
        except OSError as error:
            self._lose_track(error)
            return False
        self._whole = only_look
        self._tries = 0
        return True

    def looks_standing(self, known: int) -> list[Callable[[], None]]:
        """What must be called, by any threads, before :meth:`judge`. It must stand still."""
        self._found = []
        return [self._look_at(part, known) for part in divided(self.ranges)]

    def judge(self, distrust: bool) -> None:
        """List in ``present`` all pages that there are, and in ``written`` those that the
        destination may not have; all of them with ``distrust``."""
        self.written.clear()
        self.present.clear()
        for found in self._found:
            judge(found, distrust or bool(self.distrusted), self.sent, self.present, self.written)
        self._found = []

    def _look_at(self, part: Ranges, known: int) -> Callable[[], None]:
        found = Regions()
        self._found.append(found)

        def look() -> None:
            with self._pagemap() as pagemap:
                scan_present(pagemap, part, known, found)

        return look

    def pull(self, round: int, number: int, alone: bool) -> Pull:
        """What reads the pages that were listed; ``alone``: no other process can have the same
        pages. Raises FileNotFoundError or ProcessLookupError when it has ended."""
        self._close_files()
        for name in ("mem",) if alone else ("mem", "pagemap"):
            path = f"/proc/{self.pid}/{name}"
            self._files.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        return Pull(
            self.pid, self._files[0], -1 if alone else self._files[1], inner=self.who.inner,
            incarnation=self.incarnation, round=round, number=number, regions=self.written,
            sent=self.sent,
        )  # fmt: skip

    def _track(self) -> bool:
        if self._uffd is not None:
            return True
        if self._tries >= TRIES:
            return False
        if shares_memory(self.pid, self.who.parent):  # vfork(2): it is about to run a program
            self._read_once = True
            self.untracked = "its memory is its parent's"
            return False
        self._tries += 1
        try:
            self._uffd = userfault.open_in(self.pid)
        except userfault.Untrackable as reason:
            self.untracked = str(reason)
            return False
        self.untracked = ""
        self._whole = True
        return True

    def _lose_track(self, error: OSError) -> None:
        """Its memory is not what the userfaultfd follows. Raises the error if that is not why."""
        self._close_uffd()
        self.written.clear()
        self.sent.expect_all()
        self._whole = True
        self._read_once = False
        if error.errno == errno.EPERM:  # it has run another program
            self.sent.clear()
            self.incarnation += 1
            self.untracked = "it runs another program each time"
        elif error.errno == errno.EBUSY:
            self.untracked = "somebody else follows its memory"
        elif error.errno == errno.ESRCH:
            raise ProcessLookupError(errno.ESRCH, "it has ended", str(self.pid)) from error
        else:
            raise error

    @contextlib.contextmanager
    def _pagemap(self) -> Iterator[int]:
        # Opened each time: an open one stays the old program's after an exec.
        pagemap = os.open(f"/proc/{self.pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield pagemap
        finally:
            os.close(pagemap)

    def _close_uffd(self) -> None:
        if self._uffd is not None:
            os.close(self._uffd)
            self._uffd = None

    def _close_files(self) -> None:
        while self._files:
            os.close(self._files.pop())


def divided(ranges: Ranges) -> Iterator[Ranges]:
    """The ranges in portions of about the same size, for several threads."""
    most = max(PART, sum(end - start for start, end in ranges) // PARTS // PAGE * PAGE)
    part: Ranges = []
    room = most
    for start, end in ranges:
        while end - start > room:
            yield [*part, (start, start + room)]
            start, part, room = start + room, [], most
        part.append((start, end))
        room -= end - start
    if part:
        yield part
