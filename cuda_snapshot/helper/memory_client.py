# SPDX-License-Identifier: Apache-2.0
"""The client's calls about device memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from .blocks import Block
from .line import Line
from .memory_calls import CopyIn, CopyOut, Create, Drop, Held, Session, Warm
from .ring_client import Drain, Filler
from .session_client import DeviceSession

CREATE_S = 300.0
"""Making memory, and contexts on several GPUs; the driver clears what it gives."""


class DeviceMemoryCalls(ABC):
    """A part of GpuHelper. ``key`` is "<migration>/<inner pid>"; its memory stays with the helper
    until it is dropped or taken back, whatever becomes of who asked for it."""

    @abstractmethod
    def line(self) -> AbstractContextManager[Line]: ...

    @abstractmethod
    def apart(self) -> AbstractContextManager[Line]: ...

    def warm(self, key: str, gpus: Sequence[str]) -> None:
        """Have the helper ready for memory of these GPUs until the key is dropped: contexts and a
        pinned ring, which take a second to make. Raises LiveshiftError where a GPU has no room for
        a context: no memory there can be given up then, nor any be created."""
        with self.line() as line:
            line.ask(Warm(key, list(gpus)), None, CREATE_S)

    def create(self, key: str, blocks: Sequence[Block]) -> None:
        """Make physical memory for the blocks on their GPUs; all or nothing. Raises Refused where
        the key has some already, LiveshiftError where a GPU hasn't the room."""
        with self.line() as line:
            line.ask(Create(key, list(blocks)), None, CREATE_S)

    def drop(self, key: str) -> None:
        """Let the key's memory go, and end the copies of it. Does nothing where there is none."""
        with self.line() as line:
            line.ask(Drop(key), None)

    def held(self) -> dict[str, int]:
        """Bytes by key; a warmed key has 0."""
        with self.line() as line:
            return dict(line.ask(Held(), dict[str, int]))

    def drain(self, key: str) -> Drain:
        """All bytes of the key's blocks, in their order; the memory stays. Close it, or read it to
        its end. At most two copies run on a host at once, a third waits: don't wait for one of
        another's."""
        with self.apart() as line:
            line.channel.send(msgspec.msgpack.encode(CopyOut(key)))
            return Drain(line.channel)

    def filler(self, key: str) -> Filler:
        """Takes all bytes of the key's blocks, in their order; begins anew each time."""
        with self.apart() as line:
            line.channel.send(msgspec.msgpack.encode(CopyIn(key)))
            return Filler(line.channel)

    def session(self, pid: int, directory: Path, inner_pid: int) -> DeviceSession:
        """Listen for the process's service thread in its directory of pages, from now on; the
        caller then writes the order DEVICES into its page. Raises StepFailed."""
        with self.apart() as line:
            line.ask(Session(pid, str(directory.absolute()), inner_pid), None)
            return DeviceSession(line)
