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
from .source_engine import Pull, Ranges, Regions, Sent, classify, scan_present, scan_written

TRIES = 3
"""The tracker tries this often, once a round, to track a process that it cannot track."""

PART = 256 << 20
"""While the capsule is frozen, the tracker scans a process in parts of at least this many bytes."""

PARTS = 64
"""A large process has about this many parts; they are then larger than PART."""


class Followed:
    """One process. ``pid`` is its pid on the host. While it is tracked, its writes are known."""

    def __init__(self, pid: int, who: About, incarnation: int) -> None:
        self.pid = pid
        self.who = who
        self.incarnation = incarnation
        self.sent = Sent()
        self.untracked = ""
        """Why the process is not tracked, in words; "" when it is."""
        self.untrusted = ""
        """Why tracking may miss writes of the process, in words; "" when it does not."""
        self.written = Regions()
        """The pages that the next pull must read."""
        self.present = Regions()
        self.ranges: Ranges = []
        self._uffd: int | None = None
        self._tries = 0
        self._whole = True  # there may be pages that were listed and never read
        self._read_once = False
        self._trust_again = False  # all that tracking may have missed so far was sent
        self._files: list[int] = []
        self._found: list[Regions] = []

    def close(self) -> None:
        self._close_uffd()
        self._close_files()

    def interrupted(self) -> None:
        """Record that not all listed pages were read. The next look lists those as well."""
        self._whole = True

    def forget_sent(self, least: int) -> None:
        """Record that the destination has nothing of the process: the next look lists all pages.
        ``least``: the incarnation is not lower from now on."""
        self.sent.clear()
        self.incarnation = max(self.incarnation, least)
        self._tries, self._read_once = 0, False
        self.interrupted()

    def image_complete(self) -> None:
        """Record that the destination has all pages in ``present``, as they were at the freeze, and
        perhaps no others."""
        self.sent.keep(self.present)
        self._tries, self._read_once = 0, False
        self._trust_again = True

    def scan(self, only_count: bool = False) -> None:
        """List in ``written`` the pages written since the last scan, and protect them again.

        If the process cannot be tracked, all its pages are listed once, and the pass at the freeze
        reads it again in full. ``only_count``: the caller will not read the listed pages now.
        Raises FileNotFoundError or ProcessLookupError when the process has ended.
        """
        self.written.clear()
        for _ in range(2):  # a second time if the process has run another program meanwhile
            self.ranges = own_ranges(self.pid, self.who.locked)
            if not self._track() or self._look_tracked(only_count):
                break
        # This check must come after the look. I/O that is complete by now, or that began after the
        # look, needs no check: the pages are read as they are. What I/O before a freeze has written
        # is in the image of that freeze. So if the image is complete, only I/O of now counts.
        if self._trust_again or not self.untrusted:
            self.untrusted = writers.past_page_tables(self.pid)
            self._trust_again = False
        if self._uffd is None and not self._read_once and not only_count:
            for look in self.looks_standing():
                look()
            self.classify(all_stale=True)
            self._read_once = True

    def _look_tracked(self, only_count: bool) -> bool:
        assert self._uffd is not None
        whole = self._whole and not only_count
        try:
            with self._pagemap() as pagemap:
                scan_written(pagemap, self._uffd, self.ranges, whole, self.sent, self.written)
        except FileNotFoundError:
            raise
        except OSError as error:
            self._lose_track(error)
            return False
        self._whole = only_count
        self._tries = 0
        return True

    def looks_standing(self) -> list[Callable[[], None]]:
        """Return functions that scan the frozen process. Any threads must call all of them before
        :meth:`classify`."""
        self._found = []
        return [self._look_at(part) for part in divided(self.ranges)]

    def classify(self, all_stale: bool) -> None:
        """List in ``present`` all pages that exist, and in ``written`` those that the destination
        may not have. With ``all_stale`` these are all pages."""
        self.written.clear()
        self.present.clear()
        # Without a userfaultfd of ours, what the kernel says of writes may be said for another.
        stale = all_stale or self._uffd is None or bool(self.untrusted)
        for found in self._found:
            classify(found, stale, self.sent, self.present, self.written)
        self._found = []

    def _look_at(self, part: Ranges) -> Callable[[], None]:
        found = Regions()
        self._found.append(found)

        def look() -> None:
            with self._pagemap() as pagemap:
                scan_present(pagemap, part, found)

        return look

    def pull(self, round: int, number: int, alone: bool) -> Pull:
        """Return a Pull that reads the listed pages. ``alone``: no other process can share them.
        Raises FileNotFoundError or ProcessLookupError when the process has ended."""
        self._close_files()
        for name in ("mem",) if alone else ("mem", "pagemap"):
            path = f"/proc/{self.pid}/{name}"
            self._files.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        return Pull(
            self.pid,
            self._files[0],
            -1 if alone else self._files[1],
            inner=self.who.inner,
            incarnation=self.incarnation,
            round=round,
            number=number,
            regions=self.written,
            sent=self.sent,
        )

    def _track(self) -> bool:
        if self._uffd is not None:
            return True
        if self._tries >= TRIES:
            return False
        if shares_memory(self.pid, self.who.parent):  # vfork(2): it will run a program soon
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
        """Handle an error of a scan: the userfaultfd no longer follows the process's memory.

        Raises ProcessLookupError when the process has ended, and ``error`` when it has another
        cause."""
        self._close_uffd()
        self.written.clear()
        self.sent.invalidate_all()
        self._whole = True
        self._read_once = False
        if error.errno == errno.EPERM:  # it has run another program
            self.sent.clear()
            self.incarnation += 1
            self.untracked = "it runs another program each time"
        elif error.errno == errno.EBUSY:
            self.untracked = "another userfaultfd follows its memory"
        elif error.errno == errno.ESRCH:
            raise ProcessLookupError(errno.ESRCH, "it has ended", str(self.pid)) from error
        else:
            raise error

    @contextlib.contextmanager
    def _pagemap(self) -> Iterator[int]:
        # It is opened each time: after an exec an open one still shows the old program's memory.
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
    """Divide the ranges into parts of about the same size, for several threads."""
    most = max(PART, sum(end - start for start, end in ranges) // PARTS // PAGE * PAGE)
    part: Ranges = []
    left = most
    for start, end in ranges:
        while end - start > left:
            yield [*part, (start, start + left)]
            start, part, left = start + left, [], most
        part.append((start, end))
        left -= end - start
    if part:
        yield part
