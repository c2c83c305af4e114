# SPDX-License-Identifier: Apache-2.0
"""Control messages to and from the orchestrator: requests and answers over ZeroMQ with CURVE.

The orchestrator binds a ROUTER as CURVE server. Every agent connects a DEALER with its host's key,
and either side may send requests at any time. An operator's command line connects with its own key
and only sends requests. A key that is not in the cluster's directory fails at the handshake (ZAP).
The key alone says who speaks; names inside the messages do not count.

ZeroMQ cannot close the connection of one peer. So when a key is revoked, the orchestrator closes
the ROUTER and binds it again. All other peers connect again within a fraction of a second, and what
was lost with the connections is sent again (connection.py).

No peer can fill our memory. Frames, the frames that wait (send_queue.py) and the requests being
answered (served.py) are bounded for each holder of a key.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from ...errors import LiveshiftError, Unreachable, to_wire
from ..config.values import ORCHESTRATOR
from ..messages import Here, Message, There, decode, encode_answer, encode_error
from ..messages.request_text import request_to
from . import keys, reach
from .connection import Connection, Handler, Send, new_boot_id
from .keyring import Holder, KnownKeys
from .send_queue import FROM_ORCHESTRATOR, TO_ORCHESTRATOR, Weight, limit, send_queue
from .served import Served

log = logging.getLogger("liveshift.link")

OperatorHandler = Callable[[Holder, Message], Awaitable[Message | None]]
"""Called as handler(the key's holder, request)."""

HANDSHAKE_MS = 10_000
"""A connection that has not shown a key after this many milliseconds is closed."""
BACKLOG = 4096
"""Up to this many connections may wait to be accepted. After a rebind all peers connect at once."""

WATCH_S = 0.5
"""The orchestrator looks for revoked keys every so many seconds."""
GREET_S = 10.0
TURNED_AWAY_S = 2.0
"""An agent whose key was refused tries again after this many seconds. The orchestrator may get
the key's public half meanwhile."""
REBIND_S = 10.0

WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED


class Switchboard:
    """The orchestrator's side: one Connection per host that has spoken with a valid key.

    ``agents``: the address at which each host's agent listens for images. A probe of it shows
    whether the agent runs.
    """

    def __init__(self, address: str, key_directory: Path, agents: Mapping[str, str]) -> None:
        self._address = address
        self._keys = key_directory
        self._agents = agents
        self._boot_id = new_boot_id()
        self._context = zmq.asyncio.Context()
        self._auth = AsyncioAuthenticator(self._context)
        self._known = KnownKeys(key_directory, operators=True)
        self._counters: dict[str, _Counter] = {}
        self._routes: dict[str, bytes] = {}
        self._weights: dict[str, Weight] = {}
        self.connections: dict[str, Connection] = {}

    async def listen(self) -> None:
        """Bind the address. Peers that connect wait until :meth:`serve`.

        Raises LiveshiftError when it cannot listen, with nothing left open.
        """
        try:
            self._own = keys.load_private(self._keys, ORCHESTRATOR)
            self._auth.start()
            self._auth.configure_curve_callback(credentials_provider=self._known)
            self._socket = await self._bind(self._own, 0)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening and free all sockets."""
        self._auth.stop()
        self._context.destroy(linger=0)

    async def serve(self, handler: Handler, operators: OperatorHandler) -> None:
        """Take frames until cancelled, once :meth:`listen` has returned.

        ``handler`` answers hosts, ``operators`` the holders of operators' keys.
        """
        self._handler, self._operators = handler, operators
        try:
            known, socket = self._known.holders(), self._socket
            while True:
                try:
                    known = await self._until_revoked(socket, known)
                finally:
                    self._hang_up(socket)
                socket = await self._bind(self._own, REBIND_S)
        finally:
            self.close()

    async def request(self, host: str, message: Message, timeout: float) -> Message | None:
        """Send a request to the agent of a host and return the answer; raises Unreachable when it
        has never spoken."""
        connection = self.connections.get(host)
        if connection is None:
            raise Unreachable(
                f"the agent on {host} has not reported to the orchestrator",
                hint=f"start it there: liveshift agent --config FILE --host {host}",
            )
        return await connection.request(message, timeout)

    async def _bind(self, own: keys.KeyPair, retry_s: float) -> zmq.asyncio.Socket:
        """Bind a new socket; try for ``retry_s`` seconds, as the previous one may hold the
        address."""
        socket = self._context.socket(zmq.ROUTER)
        socket.curve_server = True
        socket.curve_secretkey, socket.curve_publickey = own.secret, own.public
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to an absent peer fails at once
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        limit(socket, longest=TO_ORCHESTRATOR)
        until = time.monotonic() + retry_s
        while True:
            try:
                socket.bind(f"tcp://{self._address}")
                return socket
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or time.monotonic() > until:
                    socket.close(0)
                    raise LiveshiftError(f"cannot listen on {self._address}: {error}") from error
            await asyncio.sleep(0.01)

    async def _until_revoked(
        self, socket: zmq.asyncio.Socket, known: dict[str, Holder]
    ) -> dict[str, Holder]:
        """Take frames until a key is revoked: one of ``known``, or one that came later. Return the
        keys that are known then."""
        taking = asyncio.ensure_future(self._receive_all(socket))
        try:
            while not (await asyncio.wait({taking}, timeout=WATCH_S))[0]:
                before, known = known, self._known.holders()
                if gone := [before[key].name for key in before.keys() - known.keys()]:
                    log.warning("the keys of %s are gone: all connect again", ", ".join(gone))
                    return known
            await taking  # it never ends without an error
            raise AssertionError
        finally:
            taking.cancel()
            with suppress(asyncio.CancelledError):
                await taking

    def _hang_up(self, socket: zmq.asyncio.Socket) -> None:
        self._routes.clear()
        for connection in self.connections.values():
            connection.disconnected()
        socket.close(0)

    async def _receive_all(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            parts = await socket.recv_multipart(copy=False)
            try:
                self._receive(socket, parts)
            except Exception:  # one peer's bad frame must not stop the others
                log.exception("a frame that cannot be taken")

    def _receive(self, socket: zmq.asyncio.Socket, parts: list[zmq.Frame]) -> None:
        if len(parts) != 2:
            log.error("a peer sent a message of %d parts", len(parts))
            return
        identity, body = parts[0].bytes, parts[1]
        holder = self._known.holder(body)
        if holder is None:
            return  # its key was revoked after the handshake
        if holder.role is None:
            connection = self._connection(socket, holder.name, identity)
            connection.receive(body.buffer)
            return
        if holder.name not in self._counters:
            self._counters[holder.name] = _Counter(holder.name, self._boot_id)
        counter = self._counters[holder.name]
        reply = send_queue(socket, identity, counter.weight)
        counter.receive(holder, body.buffer, reply, self._operators)

    def _connection(self, socket: zmq.asyncio.Socket, name: str, identity: bytes) -> Connection:
        """Return the connection to a host from which a frame has just come."""
        if name not in self.connections:
            self._weights[name] = Weight()
            self.connections[name] = Connection(
                name,
                self._handler,
                boot_id=self._boot_id,
                largest=FROM_ORCHESTRATOR,
                why_not=lambda: reach.why_no_agent(name, self._agents.get(name)),
            )
        connection = self.connections[name]
        if self._routes.get(name) != identity:  # each reconnect has a new identity
            self._routes[name] = identity
            connection.connected(send_queue(socket, identity, self._weights[name]))
            connection.catch_up()
        return connection


class _Counter:
    """Serves the holder of one operator's key, over all its connections."""

    def __init__(self, name: str, boot_id: int) -> None:
        self._boot_id = boot_id
        self._served = Served(f"{name} (key)", FROM_ORCHESTRATOR)
        self.weight = Weight()

    def receive(
        self, holder: Holder, raw: memoryview, reply: Send, handler: OperatorHandler
    ) -> None:
        """Take one frame; anything but a request is logged and refused."""
        try:
            frame = decode(raw)
            request = frame.body
            if request is None:
                raise LiveshiftError("an operator sent an answer, and was asked nothing")
        except LiveshiftError as error:
            log.error("from %s (key): %s", holder.name, error)
            with suppress(zmq.ZMQError):  # reply all the same: the peer may have another version
                reply(encode_error(0, to_wire(error)))
            return
        if isinstance(request, Here):
            with suppress(zmq.ZMQError):  # the peer is gone again
                reply(encode_answer(frame.id, There(self._boot_id)))
            return
        self._served.accept(
            frame.id, len(raw), request_to(request), lambda: handler(holder, request), reply
        )


class Uplink:
    """An agent's side: one Connection to the orchestrator. ZeroMQ reconnects it."""

    def __init__(self, host: str, address: str, key_directory: Path, handler: Handler) -> None:
        own = keys.load_private(key_directory, host)
        self._host = host
        self._address = f"tcp://{address}"
        self._context = zmq.asyncio.Context()
        self._socket = socket = self._context.socket(zmq.DEALER)
        socket.curve_serverkey = keys.public_key(key_directory, ORCHESTRATOR)
        socket.curve_secretkey, socket.curve_publickey = own.secret, own.public
        socket.setsockopt(zmq.IMMEDIATE, 1)  # no queue for an absent peer
        limit(socket, longest=FROM_ORCHESTRATOR)
        self._events = socket.get_monitor_socket(WATCHED)
        self._send = send_queue(socket, None, Weight())
        self._turned_away = False
        self.connection = Connection(
            "the orchestrator",
            handler,
            boot_id=new_boot_id(),
            largest=TO_ORCHESTRATOR,
            why_not=self._why_not,
        )
        socket.connect(self._address)

    async def serve(self) -> None:
        """Take frames until cancelled."""
        work = [asyncio.ensure_future(self._receive_all()), asyncio.ensure_future(self._watch())]
        try:
            await asyncio.gather(*work)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            self.close()

    def close(self) -> None:
        """Close the connection. It cannot be used again."""
        self._context.destroy(linger=0)

    async def _receive_all(self) -> None:
        while True:
            parts = await self._socket.recv_multipart()
            try:
                self.connection.receive(parts[0])
            except Exception:
                log.exception("a frame that cannot be taken")

    async def _watch(self) -> None:
        """Follow the connection, and greet the orchestrator after each handshake."""
        greeting: asyncio.Future[None] | None = None
        try:
            while True:
                event = (await recv_monitor_message(self._events))["event"]
                if greeting is not None:
                    greeting.cancel()
                    greeting = None
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._turned_away = False
                    self.connection.connected(self._send)
                    greeting = asyncio.ensure_future(self._greet())
                    continue
                self.connection.disconnected()
                if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    await self._come_again()
        finally:
            if greeting is not None:
                greeting.cancel()

    async def _greet(self) -> None:
        while True:
            try:
                await self.connection.greet(GREET_S)
                return
            except LiveshiftError as error:
                log.warning("%s", error)

    async def _why_not(self) -> tuple[str, str]:
        """Why the orchestrator is not connected, and what to look at."""
        address = self._address.removeprefix("tcp://")
        if self._turned_away:
            return (
                f"{address} turned away the key of {self._host}: unknown there, or revoked",
                "`liveshift keys list` where the cluster's keys are made",
            )
        return await reach.why_not(address)

    async def _come_again(self) -> None:
        """Connect again after a refused key: ZeroMQ does not try it again by itself. The
        orchestrator may learn the key later."""
        self._turned_away = True
        log.error(
            "the orchestrator at %s turned away the key of %s: unknown there, or revoked",
            self._address,
            self._host,
        )
        await asyncio.sleep(TURNED_AWAY_S)
        with suppress(zmq.ZMQError):  # ZeroMQ may have dropped the address
            self._socket.disconnect(self._address)
        self._socket.connect(self._address)
