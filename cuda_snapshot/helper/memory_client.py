# SPDX-License-Identifier: Apache-2.0
"""The client's calls about device memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from .blocks import Block
from .calls import CopyIn, CopyOut, Create, Drop, GetHeld, Session, Warm
from .connection import HelperConnection
from .ring_client import Drain, Filler
from .session_client import DeviceSession

CREATE_S = 300.0
"""A client waits at most this many seconds until memory, and contexts on several GPUs, are made.
The driver clears the memory first."""


class DeviceMemoryCalls(ABC):
    """A part of GpuHelper. ``key`` is "<migration>/<inner pid>". The helper keeps its memory until
    it is dropped or taken back, even if the agent that asked for it has ended."""

    @abstractmethod
    def connection(self) -> AbstractContextManager[HelperConnection]: ...

    @abstractmethod
    def apart(self) -> AbstractContextManager[HelperConnection]: ...

    def warm(self, key: str, gpus: Sequence[str]) -> None:
        """Prepare the helper for memory of these GPUs until the key is dropped: it makes contexts
        and a pinned ring, which takes a second. Raises LiveshiftError if a GPU has no room for a
        context; then no memory there can be given up or created."""
        with self.connection() as connection:
            connection.ask(Warm(key, list(gpus)), None, CREATE_S)

    def create(self, key: str, blocks: Sequence[Block]) -> None:
        """Make physical memory for the blocks on their GPUs; all or nothing. Raises Refused if the
        key has memory already, LiveshiftError if a GPU hasn't the room."""
        with self.connection() as connection:
            connection.ask(Create(key, list(blocks)), None, CREATE_S)

    def drop(self, key: str) -> None:
        """Free the key's memory and end its copies. Does nothing if there is none."""
        with self.connection() as connection:
            connection.ask(Drop(key), None)

    def held(self) -> dict[str, int]:
        """Bytes by key; a key that was only warmed has 0."""
        with self.connection() as connection:
            return dict(connection.ask(GetHeld(), dict[str, int]))

    def drain(self, key: str) -> Drain:
        """Read all bytes of the key's blocks, in their order; the memory stays. The caller must
        close the Drain or read it to its end. At most two copies run on a host at once and a third
        waits, so a thread that has a copy must not wait for another thread's copy."""
        with self.apart() as connection:
            connection.channel.send(msgspec.msgpack.encode(CopyOut(key)))
            return Drain(connection.channel)

    def filler(self, key: str) -> Filler:
        """Write all bytes of the key's blocks, in their order; each call begins again at the
        first byte."""
        with self.apart() as connection:
            connection.channel.send(msgspec.msgpack.encode(CopyIn(key)))
            return Filler(connection.channel)

    def session(self, pid: int, directory: Path, inner_pid: int) -> DeviceSession:
        """From now on the helper listens for the process's service thread in its directory of
        pages. The caller must then write the order DEVICES into the page. Raises StepFailed."""
        with self.apart() as connection:
            connection.ask(Session(pid, str(directory.absolute()), inner_pid), None)
            return DeviceSession(connection)
