# SPDX-License-Identifier: Apache-2.0
"""Control messages between the orchestrator and the agents: asks and answers over ZeroMQ.

Either side may ask at any time. The orchestrator binds a ROUTER as CURVE server, every agent
connects a DEALER with its host's key; a key that is not in the cluster's directory does not get
past the handshake (ZAP), and a host's name is the one its key belongs to, whatever it calls itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from ..errors import LiveshiftError, Unreachable, from_wire, to_wire
from . import keys
from .config_values import ORCHESTRATOR
from .messages import Message, decode, encode_answer, encode_ask, encode_error

log = logging.getLogger("liveshift.link")

Handler = Callable[[str, Message], Awaitable[Message | None]]
"""Called as handler(peer name, ask); what it returns or raises goes back to the peer."""

NOBODY = "?"
HEARTBEAT_MS = 1000
"""ZMTP heartbeat: a connection whose peer is gone is closed after a few of these."""


class Line:
    """Asks in flight to one peer, and the peer's asks on their way to the handler."""

    def __init__(self, peer: str, send: Callable[[bytes], Awaitable[Any]], handler: Handler):
        self.peer = peer
        self._send = send
        self._handler = handler
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Message | None]] = {}
        self._serving: set[asyncio.Task[None]] = set()

    async def ask(self, message: Message, timeout: float) -> Message | None:
        """Send an ask and return its answer; raises what the peer raised, or Unreachable."""
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            await self._send(encode_ask(number, message))
            return await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise Unreachable(
                f"{self.peer} did not answer {type(message).__name__} within {timeout:g} s"
            ) from None
        except zmq.ZMQError as error:
            raise Unreachable(f"{self.peer} is not connected: {error}") from None
        finally:
            self._waiting.pop(number, None)

    def take(self, raw: bytes | memoryview) -> None:
        """One frame from the peer; a frame that is not understood is logged and dropped."""
        try:
            frame = decode(raw)
        except LiveshiftError as error:
            log.error("from %s: %s", self.peer, error)
            return
        if frame.body is not None:
            task = asyncio.create_task(self._serve(frame.id, frame.body))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
            return
        future = self._waiting.get(frame.id)
        if future is None or future.done():
            return  # answered after its deadline
        if frame.error is not None:
            future.set_exception(from_wire(*frame.error))
        else:
            future.set_result(frame.answer)

    def drop(self) -> None:
        """The peer is gone: everything it was asked fails now, not at its deadline."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Unreachable(f"lost contact to {self.peer}"))

    async def _serve(self, number: int, ask: Message) -> None:
        try:
            reply = encode_answer(number, await self._handler(self.peer, ask))
        except LiveshiftError as error:
            reply = encode_error(number, to_wire(error))
        except Exception as error:
            log.exception("%s from %s", type(ask).__name__, self.peer)
            reply = encode_error(number, to_wire(error))
        with contextlib.suppress(zmq.ZMQError):  # who asked has gone
            await self._send(reply)


class Switchboard:
    """The orchestrator's side: one Line per host that has spoken with a valid key."""

    def __init__(self, address: str, key_directory: Path, handler: Handler) -> None:
        self._address = address
        self._keys = key_directory
        self._handler = handler
        self._context = zmq.asyncio.Context()
        self._auth = AsyncioAuthenticator(self._context)
        self.lines: dict[str, Line] = {}
        self._routes: dict[str, bytes] = {}

    async def serve(self) -> None:
        """Bind and take frames until cancelled."""
        try:
            await self._serve()
        finally:
            self._auth.stop()
            self._context.destroy(linger=0)

    async def _serve(self) -> None:
        own = keys.load_private(self._keys, ORCHESTRATOR)
        self._auth.start()
        known = Known(self._keys)
        self._auth.configure_curve_callback(credentials_provider=known)
        socket = self._context.socket(zmq.ROUTER)
        socket.curve_server = True
        socket.curve_secretkey, socket.curve_publickey = own.secret, own.public
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # says at once that a host is not connected
        _liveness(socket)
        socket.bind(f"tcp://{self._address}")
        while True:
            identity, body = await socket.recv_multipart(copy=False)
            name = known.owner(body)
            if name == NOBODY:  # its key was taken away after the handshake
                continue
            self._routes[name] = identity.bytes  # a new one after every reconnect
            if name not in self.lines:
                self.lines[name] = Line(name, self._sender(socket, name), self._handler)
            self.lines[name].take(body.buffer)

    def _sender(self, socket: zmq.asyncio.Socket, name: str) -> Callable[[bytes], Awaitable[Any]]:
        def send(raw: bytes) -> Awaitable[Any]:
            result: Awaitable[Any] = socket.send_multipart([self._routes[name], raw])
            return result

        return send

    async def ask(self, host: str, message: Message, timeout: float) -> Message | None:
        """Ask the agent of a host; raises Unreachable when it has never spoken."""
        line = self.lines.get(host)
        if line is None:
            raise Unreachable(
                f"the agent on {host} has not reported to the orchestrator",
                hint=f"start it there: liveshift agent --config FILE --host {host}",
            )
        return await line.ask(message, timeout)


class Uplink:
    """An agent's side: one Line to the orchestrator, reconnected by ZeroMQ."""

    def __init__(self, host: str, address: str, key_directory: Path, handler: Handler) -> None:
        own = keys.load_private(key_directory, host)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.curve_serverkey = keys.public_keys(key_directory)[ORCHESTRATOR]
        self._socket.curve_secretkey, self._socket.curve_publickey = own.secret, own.public
        _liveness(self._socket)
        self._socket.connect(f"tcp://{address}")
        self.line = Line("the orchestrator", self._socket.send, handler)

    async def serve(self) -> None:
        """Take frames until cancelled."""
        try:
            while True:
                self.line.take(await self._socket.recv())
        finally:
            self._context.destroy(linger=0)


class Known:
    """Whose key is it? ZAP asks for every handshake, the receivers for every frame."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._owners: dict[str, str] = {}

    def callback(self, domain: str, key: bytes) -> bool:
        """ZAP's question, the key in Z85; read anew each time, so a new host needs no restart."""
        try:
            self._owners = {k.decode(): n for n, k in keys.public_keys(self._directory).items()}
        except LiveshiftError as error:
            log.error("no peer can be let in: %s", error)
            return False
        known = key.decode() in self._owners
        if not known:
            log.error("turned away a peer with an unknown key")
        return known

    def owner(self, frame: zmq.Frame) -> str:
        """The host whose key the connection that brought this frame was opened with."""
        return self._owners.get(str(frame.get("User-Id")), NOBODY)


def _liveness(socket: zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5 * HEARTBEAT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.LINGER, 0)
