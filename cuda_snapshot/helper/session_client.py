# SPDX-License-Identifier: Apache-2.0
"""The agent's end of a device session: its requests about a process, which the helper passes on.

A session has a connection of its own and ends with it. So an agent that dies ends its sessions: the
helper sends END to the process, and keeps the memory of all keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .blocks import Block
from .calls import Blocks, Checksums, GiveUp, HelperRequest, Own, TakeBack, Wait
from .connection import Closing, HelperConnection, contact

QUICK_S, LONG_S, FULL_S = 120.0, 900.0, 3600.0
"""The agent waits at most this many seconds for an answer. QUICK_S: the process only reads tables.
LONG_S: it maps or reads memory. FULL_S: it reads every byte of a GPU through its host's memory. The
helper's own deadlines for the process are shorter."""


class DeviceSession(Closing):
    """A session about a process's device memory, while all its other threads are held. A context
    manager: on exit the helper sends END to the process. All methods raise LiveshiftError."""

    def __init__(self, connection: HelperConnection) -> None:
        """Takes over a connection on which the helper has agreed to the session."""
        self._connection = connection

    def close(self) -> None:
        """End the session. May be called again."""
        self._connection.channel.close()

    def wait(self, timeout_s: float) -> None:
        """Wait until the process's service thread has connected."""
        self._ask(Wait(timeout_s), None, timeout_s + QUICK_S)

    def blocks(self) -> list[Block]:
        """All device allocations of the process, also those whose memory it gave up."""
        return list(self._ask(Blocks(), list[Block], QUICK_S))

    def checksums(self, samples: int) -> dict[int, int]:
        """A 64-bit checksum by address, for all memory that the process has: of so many samples of
        each allocation, or of every byte (``samples`` 0)."""
        return dict(self._ask(Checksums(samples), dict[int, int], LONG_S if samples else FULL_S))

    def give_up(self, key: str) -> list[Block]:
        """The helper takes all arena memory and holds it under the key; returns the blocks it took.
        All or nothing; if the helper still holds the memory after an error, the error says so."""
        return list(self._ask(GiveUp(key), list[Block], LONG_S))

    def take_back(
        self, key: str, *, keep: bool = False, gpus: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Give the process the key's memory at its old addresses, then drop the key. After an error
        this may be tried again. With ``keep`` the key stays, also for another process.

        ``gpus``: pairs of GPUs of this host; memory that was given up on the first goes to the
        second."""
        self._ask(TakeBack(key, keep, list(gpus)), None, LONG_S)

    def own(self) -> None:
        """Let the process copy the memory it was given into memory of its own, which the driver's
        checkpoint takes along. An error may mean that a GPU has no room for that."""
        self._ask(Own(), None, LONG_S)

    def _ask(self, request: HelperRequest, returns: Any, within_s: float) -> Any:
        try:
            with contact("a device session"):
                return self._connection.ask(request, returns, within_s)
        finally:
            if not self._connection.usable:  # so that no later request receives this late answer
                self.close()
