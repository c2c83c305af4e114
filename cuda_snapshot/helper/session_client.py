# SPDX-License-Identifier: Apache-2.0
"""The agent's end of a device session: what it asks the helper to have of a process.

A session has a connection of its own and ends with it, so an agent that dies ends its sessions:
then the process is told END, and keys keep what they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .blocks import Block
from .calls import Ask
from .line import Closing, Line, contact

QUICK_S, LONG_S, FULL_S = 120.0, 900.0, 3600.0
"""For an answer: about what is in tables; about memory; about every byte of a GPU, which a process
reads by its host's memory. The helper's own deadlines for the process are shorter."""


class Wait(Ask, frozen=True):
    """None."""

    timeout_s: float


class Blocks(Ask, frozen=True):
    """list[Block]."""


class Checksums(Ask, frozen=True):
    """dict[int, int]."""

    samples: int


class GiveUp(Ask, frozen=True):
    """list[Block]."""

    key: str


class TakeBack(Ask, frozen=True):
    """None."""

    key: str
    keep: bool
    gpus: list[tuple[str, str]]


class Own(Ask, frozen=True):
    """None."""


class DeviceSession(Closing):
    """A process's device memory, while all its other threads stand still. A context manager: the
    process is told END on exit. All methods raise LiveshiftError."""

    def __init__(self, line: Line) -> None:
        """Takes over a connection on which the helper has agreed to the session."""
        self._line = line

    def close(self) -> None:
        """End the session. May be called again."""
        self._line.channel.close()

    def wait(self, timeout_s: float) -> None:
        """Until the process's service thread has connected."""
        self._ask(Wait(timeout_s), None, timeout_s + QUICK_S)

    def blocks(self) -> list[Block]:
        """All device allocations of the process, also those whose memory it gave up."""
        return list(self._ask(Blocks(), list[Block], QUICK_S))

    def checksums(self, samples: int) -> dict[int, int]:
        """64 bits by address, for all memory that is with the process: over so many samples of
        each allocation, or over every byte (0)."""
        return dict(self._ask(Checksums(samples), dict[int, int], LONG_S if samples else FULL_S))

    def give_up(self, key: str) -> list[Block]:
        """Have the helper hold all arena memory under the key: what it took. All or nothing; an
        error says so where the helper still holds it."""
        return list(self._ask(GiveUp(key), list[Block], LONG_S))

    def take_back(
        self, key: str, *, keep: bool = False, gpus: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Give the process what the key holds, at its old addresses; then the key is dropped. May
        be tried again after an error, and with ``keep`` also for another process: the key stays.

        ``gpus``: pairs of GPUs of this host; what was given up on the first is brought to the
        second."""
        self._ask(TakeBack(key, keep, list(gpus)), None, LONG_S)

    def own(self) -> None:
        """Have the process make memory of its own of what it was given, for the driver's checkpoint
        to take along; an error may mean that a GPU has no room for that."""
        self._ask(Own(), None, LONG_S)

    def _ask(self, ask: Ask, returns: Any, within_s: float) -> Any:
        try:
            with contact("a device session"):
                return self._line.ask(ask, returns, within_s)
        finally:
            if not self._line.usable:  # a late answer must not be taken for that of another ask
                self.close()
