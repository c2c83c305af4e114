# SPDX-License-Identifier: Apache-2.0
"""An orchestrator's end and agents, over real ZeroMQ with CURVE on loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from free_ports import free_port

from liveshift.runtime import messages
from liveshift.runtime.config.access import Role
from liveshift.runtime.config.values import ORCHESTRATOR
from liveshift.runtime.control import keys
from liveshift.runtime.control.connection import Connection, Send
from liveshift.runtime.control.keyring import Holder
from liveshift.runtime.control.link import OperatorHandler, Switchboard, Uplink
from liveshift.runtime.messages import Message

Handler = Callable[[str, Message], Awaitable[Message | None]]


@pytest.fixture
def key_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "keys"
    keys.init(directory, ["h0", "h1"])
    keys.add_operator(directory, "ops", Role.OPERATE)
    return directory


def host_key(key_directory: Path, name: str = "h0") -> Path:
    return keys.secret_path(key_directory, name)


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


async def nothing(_peer: str, _ask: Message) -> Message | None:
    return None


async def nobody(_holder: Holder, _ask: Message) -> Message | None:
    return None


async def unknown() -> tuple[str, str]:
    return "nobody knows why", "look there"


def connected(send: Send) -> Connection:
    """A connection to h0, without a socket: ``send`` gets the frames."""
    made = Connection("h0", nothing, boot_id=1, largest=10**6, why_not=unknown)
    made.connected(send)
    return made


def heartbeat(host: str = "h0") -> messages.Heartbeat:
    return messages.Heartbeat(host, 1 << 30, [])


class Ends:
    """The orchestrator's end, and agents that can be added and taken away."""

    def __init__(
        self,
        key_directory: Path,
        handler: Handler,
        operators: OperatorHandler = nobody,
        agents: Mapping[str, str] | None = None,
    ) -> None:
        self.keys = key_directory
        self.address = free_address()
        self.switchboard = Switchboard(self.address, key_directory, agents or {})
        self._handlers = handler, operators
        self._tasks: dict[object, asyncio.Task[None]] = {}

    async def start(self, anew: Handler | None = None) -> None:
        """With a handler: another life of the orchestrator takes the place."""
        if anew is not None:
            self.switchboard = Switchboard(self.address, self.keys, {})
            self._handlers = anew, nobody
        await self.switchboard.listen()
        serving = self.switchboard.serve(*self._handlers)
        self._tasks[self.switchboard] = asyncio.create_task(serving)

    async def agent(
        self, host: str, handler: Handler = nothing, keys: Path | None = None
    ) -> Uplink:
        uplink = Uplink(host, self.address, keys or self.keys, handler)
        self._tasks[uplink] = asyncio.create_task(uplink.serve())
        return uplink

    async def stop(self, end: object) -> None:
        task = self._tasks.pop(end)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def close(self) -> None:
        for end in list(self._tasks):
            await self.stop(end)


@asynccontextmanager
async def joined(
    key_directory: Path,
    handler: Handler = nothing,
    operators: OperatorHandler = nobody,
    agents: Mapping[str, str] | None = None,
) -> AsyncIterator[Ends]:
    ends = Ends(key_directory, handler, operators, agents)
    await ends.start()
    try:
        yield ends
    finally:
        await ends.close()


@contextmanager
def raw_peer(ends: Ends, secret: Path, identity: bytes = b"") -> Iterator[Any]:
    """A DEALER with a key of the cluster, for frames that no program of ours would send."""
    context = zmq.asyncio.Context()
    peer = context.socket(zmq.DEALER)
    own = keys.load_pair(secret)
    peer.curve_serverkey = keys.public_key(ends.keys, ORCHESTRATOR)
    peer.curve_secretkey, peer.curve_publickey = own.secret, own.public
    peer.linger = 0
    if identity:
        peer.identity = identity
    peer.connect(f"tcp://{ends.address}")
    try:
        yield peer
    finally:
        context.destroy(0)
