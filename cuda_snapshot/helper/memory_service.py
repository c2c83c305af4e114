# SPDX-License-Identifier: Apache-2.0
"""The helper's answers to all requests about device memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from ... import units
from ..cuda import Cuda
from . import sessions
from .calls import HelperRequest, done
from .contexts import Contexts
from .device_memory import DeviceMemory
from .memory_calls import CopyIn, CopyOut, Create, Drop, GetHeld, Session, Warm
from .process_session import ProcessSession
from .ring import Busy, CopyRings, sizes
from .server import Caller, Handler
from .transfers import Transfers


class MemoryService:
    """The handlers of these requests. Raises LiveshiftError if the driver can't be used."""

    def __init__(self, cuda: Cuda) -> None:
        contexts = Contexts(cuda)
        self._memory = DeviceMemory(contexts)
        self._rings = CopyRings(contexts, *sizes())
        self._transfers = Transfers(contexts, self._memory, self._rings)

    def handlers(self) -> Mapping[type[HelperRequest], Handler]:
        return {
            Warm: self._warm,
            Create: lambda _, request: self._memory.create(request.key, request.blocks),
            Drop: self._drop,
            GetHeld: lambda _, request: self._memory.held(),
            CopyOut: lambda caller, request: self._transfers.drain(caller.channel, request.key),
            CopyIn: lambda caller, request: self._transfers.fill(caller.channel, request.key),
            Session: self._session,
        }

    def holds(self) -> str:
        """Why the helper must stay, in words: it may have the only copy of a rank's state."""
        held = {key: size for key, size in self._memory.held().items() if size}
        if not held:
            return ""
        return f"it holds {units.size(sum(held.values()))} of device memory for {', '.join(held)}"

    def _warm(self, caller: Caller, request: Warm) -> None:
        self._memory.warm(request.key, request.gpus)
        if request.gpus:
            with suppress(Busy), self._rings.one(request.gpus[0], patience_s=0):
                pass  # the ring is pinned now, and stays so while the contexts stay

    def _drop(self, caller: Caller, request: Drop) -> None:
        self._memory.drop(request.key)
        self._rings.unpin_idle(self._memory.gpus())

    def _session(self, caller: Caller, request: Session) -> None:
        session = ProcessSession(request.pid, Path(request.directory), request.inner_pid)
        caller.channel.send(msgspec.msgpack.encode(done(None)))
        sessions.serve(caller.channel, session, self._memory)
        self._rings.unpin_idle(self._memory.gpus())
