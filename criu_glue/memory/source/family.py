# SPDX-License-Identifier: Apache-2.0
"""The processes that the tracker follows: which are new, which have ended, and their parents."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from .followed import Followed
from .proc import about

GONE = (FileNotFoundError, ProcessLookupError)
"""The kernel raises one of these for a process that has ended."""


class Family:
    """All followed processes of a capsule, by their pids on the host."""

    def __init__(self) -> None:
        self._followed: dict[int, Followed] = {}
        self._incarnations: dict[int, int] = {}  # inner pid: the last incarnation
        self._least = 1  # no process has a lower incarnation

    def __len__(self) -> int:
        return len(self._followed)

    def __iter__(self) -> Iterator[Followed]:
        return iter(list(self._followed.values()))

    def __contains__(self, process: Followed) -> bool:
        return self._followed.get(process.pid) is process

    def refresh(self, pids: Sequence[int]) -> None:
        """Follow these processes only. Drop all others, also one that had the same pid before."""
        found: dict[int, Followed] = {}
        for pid in pids:
            with contextlib.suppress(*GONE):
                who = about(pid)
                known = self._followed.pop(pid, None)
                if known is not None and known.who.started == who.started:
                    known.who = who
                    found[pid] = known
                    continue
                if known is not None:
                    self._drop(known)
                incarnation = max(self._least, self._incarnations.get(who.inner, 0) + 1)
                found[pid] = Followed(pid, who, incarnation)
        for gone in self._followed.values():
            self._drop(gone)
        self._followed = found

    def forget(self, process: Followed) -> None:
        """Drop a process that has ended. Any thread may call this, and more than once."""
        if self._followed.pop(process.pid, None) is not None:
            self._drop(process)

    def forget_sent(self, least: int) -> None:
        """Forget what was sent of all processes; ``least``: the lowest incarnation from now on."""
        self._least = max(self._least, least)
        for process in self:
            process.forget_sent(self._least)

    def close(self) -> None:
        for process in self._followed.values():
            process.close()
        self._followed.clear()

    def living(self) -> list[Followed]:
        return [process for process in self if process.who.state not in "ZX"]

    def generations(self) -> Iterator[list[Followed]]:
        """Yield the living processes in groups, parents before their children."""
        left = {process.pid: process for process in self.living()}
        while left:
            first = [p for p in left.values() if p.who.parent not in left]
            first = first or list(left.values())
            yield first
            for process in first:
                left.pop(process.pid, None)

    def parent(self, process: Followed) -> Followed | None:
        return self._followed.get(process.who.parent)

    def _drop(self, process: Followed) -> None:
        self._incarnations[process.who.inner] = process.incarnation
        process.close()
