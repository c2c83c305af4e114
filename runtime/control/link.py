# SPDX-License-Identifier: Apache-2.0
"""Control messages to and from the orchestrator: asks and answers over ZeroMQ with CURVE.

The orchestrator binds a ROUTER as CURVE server; every agent connects a DEALER with its host's key
and either side may ask at any time; an operator's command line connects with its own key and only
asks. A key that is not in the cluster's directory does not get past the handshake (ZAP), and who
speaks is whose key it is, whatever they call themselves.

ZeroMQ cannot hang up on one peer. When a key has been revoked the ROUTER is therefore closed and
bound anew: everybody connects again within a fraction of a second, but the one whose key is gone.
What was lost with the connections is sent again (line.py).

Nobody can fill our memory: frames and those that wait (outlet.py) and the asks being served
(served.py) are bounded for each holder of a key.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from ...errors import LiveshiftError, NotPermitted, Unreachable, to_wire
from ..config.values import ORCHESTRATOR
from ..messages import Here, Message, There, decode, encode_answer, encode_error
from ..messages.words import request_to
from . import keys, reach
from .keyring import NOBODY, Holder, Known
from .line import Handler, Line, Send, new_life
from .outlet import FROM_ORCHESTRATOR, TO_ORCHESTRATOR, Weight, limit, outlet
from .served import Served

__all__ = ["NOBODY", "Handler", "Holder", "Known", "Line", "Switchboard", "Uplink"]

log = logging.getLogger("liveshift.link")

OperatorHandler = Callable[[Holder, Message], Awaitable[Message | None]]
"""Called as handler(whose key, ask)."""

HANDSHAKE_MS = 10_000
"""A connection that has not shown a key by then is closed."""
BACKLOG = 4096
"""Connections that may wait to be accepted: after a rebind everybody comes at once."""

WATCH_S = 0.5
"""Between two looks whether a key was revoked."""
GREET_S = 10.0
TURNED_AWAY_S = 2.0
"""An agent that was turned away tries again after this: its key may be on its way."""
REBIND_S = 10.0

WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED


class Switchboard:
    """The orchestrator's side: one Line per host that has spoken with a valid key.

    ``handler`` serves hosts, ``operators`` (if any) the holders of operators' keys. Both may be set
    until it serves.
    """

    def __init__(
        self,
        address: str,
        key_directory: Path,
        handler: Handler | None = None,
        operators: OperatorHandler | None = None,
    ) -> None:
        self._address = address
        self._keys = key_directory
        self.handler = handler
        self.operators = operators
        self._life = new_life()
        self._context = zmq.asyncio.Context()
        self._auth = AsyncioAuthenticator(self._context)
        self._known = Known(key_directory, operators=True)
        self._socket: zmq.asyncio.Socket | None = None
        self._counters: dict[str, _Counter] = {}
        self._routes: dict[str, bytes] = {}
        self._weights: dict[str, Weight] = {}
        self.lines: dict[str, Line] = {}
        self.agents: dict[str, str] = {}
        """Where the agents of hosts listen for images: there it is seen whether they run."""

    async def listen(self) -> None:
        """Bind; whoever connects waits until it serves.

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
        """Stop listening."""
        self._auth.stop()
        self._context.destroy(linger=0)

    async def serve(self) -> None:
        """Take frames until cancelled; listens first, if it does not yet."""
        if self._socket is None:
            await self.listen()
        try:
            known, socket = self._known.holders(), self._socket
            while socket is not None:
                try:
                    known = await self._until_revoked(socket, known)
                finally:
                    self._hang_up(socket)
                socket = await self._bind(self._own, REBIND_S)
        finally:
            self.close()

    async def ask(self, host: str, message: Message, timeout: float) -> Message | None:
        """Ask the agent of a host; raises Unreachable when it has never spoken."""
        line = self.lines.get(host)
        if line is None:
            raise Unreachable(
                f"the agent on {host} has not reported to the orchestrator",
                hint=f"start it there: liveshift agent --config FILE --host {host}",
            )
        return await line.ask(message, timeout)

    async def _bind(self, own: keys.KeyPair, patience: float) -> zmq.asyncio.Socket:
        """``patience``: seconds in which the socket before may let go of the address."""
        socket = self._context.socket(zmq.ROUTER)
        socket.curve_server = True
        socket.curve_secretkey, socket.curve_publickey = own.secret, own.public
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # says at once that a peer is not connected
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        limit(socket, longest=TO_ORCHESTRATOR)
        until = time.monotonic() + patience
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
        """Take frames until one of the keys ``known`` before the bind is not known any more, or
        one that came later; returns those that are."""
        taking = asyncio.ensure_future(self._take_all(socket))
        try:
            while not (await asyncio.wait({taking}, timeout=WATCH_S))[0]:
                before, known = known, self._known.holders()
                if gone := [before[key].name for key in before.keys() - known.keys()]:
                    log.warning("the keys of %s are gone: all connect again", ", ".join(gone))
                    return known
            await taking  # it ends by an error only
            raise AssertionError
        finally:
            taking.cancel()
            with suppress(asyncio.CancelledError):
                await taking

    def _hang_up(self, socket: zmq.asyncio.Socket) -> None:
        self._routes.clear()
        for line in self.lines.values():
            line.disconnected()
        socket.close(0)

    async def _take_all(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            parts = await socket.recv_multipart(copy=False)
            try:
                self._take(socket, parts)
            except Exception:  # whatever one peer sends, the others go on
                log.exception("a frame that cannot be taken")

    def _take(self, socket: zmq.asyncio.Socket, parts: list[zmq.Frame]) -> None:
        if len(parts) != 2:
            log.error("a peer sent a message of %d parts", len(parts))
            return
        identity, body = parts[0].bytes, parts[1]
        holder = self._known.holder(body)
        if holder is None:
            return  # its key was taken away after the handshake
        if holder.role is None:
            self._take_from_host(socket, holder.name, identity, body.buffer)
            return
        if holder.name not in self._counters:
            self._counters[holder.name] = _Counter(holder.name, self._life)
        counter = self._counters[holder.name]
        reply = outlet(socket, identity, counter.weight)
        counter.take(holder, body.buffer, reply, self.operators)

    def _take_from_host(
        self, socket: zmq.asyncio.Socket, name: str, identity: bytes, raw: memoryview
    ) -> None:
        if name not in self.lines:
            self._weights[name] = Weight()
            assert self.handler is not None
            self.lines[name] = Line(
                name, None, self.handler, life=self._life, largest=FROM_ORCHESTRATOR,
                why_not=lambda: reach.why_no_agent(name, self.agents.get(name)),
            )  # fmt: skip
        line = self.lines[name]
        if self._routes.get(name) != identity:  # a new one after every reconnect
            self._routes[name] = identity
            line.connected(outlet(socket, identity, self._weights[name]))
            line.catch_up()
        line.take(raw)


class _Counter:
    """Where the holder of one operator's key is served, over however many connections."""

    def __init__(self, name: str, life: int) -> None:
        self._life = life
        self._served = Served(f"{name} (key)", FROM_ORCHESTRATOR)
        self.weight = Weight()

    def take(
        self, holder: Holder, raw: memoryview, reply: Send, serve: OperatorHandler | None
    ) -> None:
        """One frame; whatever is no ask is logged and refused."""
        try:
            frame = decode(raw)
            ask = frame.body
            if ask is None:
                raise LiveshiftError("an operator sent an answer, and was asked nothing")
        except LiveshiftError as error:
            log.error("from %s (key): %s", holder.name, error)
            with suppress(zmq.ZMQError):  # of another version, perhaps: it is to know
                reply(encode_error(0, to_wire(error)))
            return
        if isinstance(ask, Here):
            with suppress(zmq.ZMQError):  # gone again
                reply(encode_answer(frame.id, There(self._life)))
            return

        async def answer() -> Message | None:
            if serve is None:
                raise NotPermitted("operators' keys are not served here")
            return await serve(holder, ask)

        self._served.take(frame.id, len(raw), request_to(ask), answer, reply)


class Uplink:
    """An agent's side: one Line to the orchestrator, reconnected by ZeroMQ."""

    def __init__(self, host: str, address: str, key_directory: Path, handler: Handler) -> None:
        own = keys.load_private(key_directory, host)
        self._host = host
        self._address = f"tcp://{address}"
        self._context = zmq.asyncio.Context()
        self._socket = socket = self._context.socket(zmq.DEALER)
        socket.curve_serverkey = keys.public_key(key_directory, ORCHESTRATOR)
        socket.curve_secretkey, socket.curve_publickey = own.secret, own.public
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a peer that is not there
        limit(socket, longest=FROM_ORCHESTRATOR)
        self._events = socket.get_monitor_socket(WATCHED)
        self._send = outlet(socket, None, Weight())
        self._turned_away = False
        self.line = Line(
            "the orchestrator", None, handler, life=new_life(), largest=TO_ORCHESTRATOR,
            why_not=self._why_not,
        )  # fmt: skip
        socket.connect(self._address)

    async def serve(self) -> None:
        """Take frames until cancelled."""
        work = [asyncio.ensure_future(self._take_all()), asyncio.ensure_future(self._watch())]
        try:
            await asyncio.gather(*work)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            self.close()

    def close(self) -> None:
        """Hang up for good."""
        self._context.destroy(linger=0)

    async def _take_all(self) -> None:
        while True:
            parts = await self._socket.recv_multipart()
            try:
                self.line.take(parts[0])
            except Exception:
                log.exception("a frame that cannot be taken")

    async def _watch(self) -> None:
        """Follow the connection: greet the orchestrator each time that it is there."""
        greeting: asyncio.Future[None] | None = None
        try:
            while True:
                event = (await recv_monitor_message(self._events))["event"]
                if greeting is not None:
                    greeting.cancel()
                    greeting = None
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._turned_away = False
                    self.line.connected(self._send)
                    greeting = asyncio.ensure_future(self._greet())
                    continue
                self.line.disconnected()
                if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    await self._come_again()
        finally:
            if greeting is not None:
                greeting.cancel()

    async def _greet(self) -> None:
        while True:
            try:
                await self.line.greet(GREET_S)
                return
            except LiveshiftError as error:
                log.warning("%s", error)

    async def _why_not(self) -> tuple[str, str]:
        """Why the orchestrator is not connected."""
        address = self._address.removeprefix("tcp://")
        if self._turned_away:
            return (
                f"{address} turned away the key of {self._host}: unknown there, or revoked",
                "`liveshift keys list` where the cluster's keys are made",
            )
        return await reach.why_not(address)

    async def _come_again(self) -> None:
        """ZeroMQ gives up for good when a key is refused; it may be on its way, or come back."""
        self._turned_away = True
        log.error(
            "the orchestrator at %s turned away the key of %s: unknown there, or revoked",
            self._address,
            self._host,
        )
        await asyncio.sleep(TURNED_AWAY_S)
        with suppress(zmq.ZMQError):  # it has forgotten the address by itself
            self._socket.disconnect(self._address)
        self._socket.connect(self._address)
