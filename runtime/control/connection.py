# SPDX-License-Identifier: Apache-2.0
"""A connection to one peer carries requests in both directions. It outlives the connections of
ZeroMQ below it, which come and go.

Frames may be lost with a connection. When the peer connects again, each side tells its boot id
(Here, There), which is another one in each run of a program. To the same run the connection sends
all unanswered requests again, and the peer answers none twice (served.py). Requests to an earlier
run fail, because it is unknown how far that run got with them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import zmq

from ...errors import LiveshiftError, Unreachable, from_wire, to_wire
from ..messages import Here, Message, There, decode, encode_answer, encode_error, encode_request
from ..messages.request_text import request_to
from .served import Served

log = logging.getLogger("liveshift.link")

Handler = Callable[[str, Message], Awaitable[Message | None]]
"""Called as handler(peer name, request); its result or its exception goes back to the peer."""

WhyNot = Callable[[], Awaitable[tuple[str, str]]]
"""Returns (cause, what to look at) for a peer that is not connected."""

Send = Callable[[bytes], None]
"""Sends a frame without waiting; raises zmq.ZMQError when it cannot."""

RECONNECT_S = 3.0
"""A request waits so many seconds for a peer that is not connected. A reconnect takes at most one
second."""


def new_boot_id() -> int:
    """A random number for this run of the program. Here and There carry one, and the numbers of
    requests start at another."""
    return secrets.randbits(48)


@dataclass
class _Pending:
    what: str
    frame: bytes
    sent: int = 0  # number of the connection that carried it last, from 1
    answer: asyncio.Future[Message | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Connection:
    """The requests and answers of one peer, over its connections of ZeroMQ.

    ``boot_id``: our own. ``largest``: bytes of the longest frame that the peer takes. ``why_not``:
    is called for the reason when the peer is not connected. It is not before :meth:`connected`.
    """

    def __init__(
        self,
        peer: str,
        handler: Handler,
        *,
        boot_id: int,
        largest: int,
        why_not: WhyNot,
    ) -> None:
        self.peer = peer
        self.peer_boot_id: int | None = None
        """The boot id of the peer's run that we met last. Another run knows nothing of earlier
        requests."""
        self._send: Send | None = None
        self._handler = handler
        self._boot_id = boot_id
        self._largest = largest
        self._why_not = why_not
        self._connection_number = 0
        self._refused_on = 0  # the connection over which we refused a frame
        self._numbers = itertools.count(new_boot_id())
        self._pending: dict[int, _Pending] = {}
        self._served = Served(peer, largest)

    # ---- requests ----

    async def request(self, message: Message, timeout: float) -> Message | None:
        """Send a request and return its answer; raises what the peer raised, or Unreachable.

        It waits at most RECONNECT_S for a peer that is not connected.
        """
        number = next(self._numbers)
        pending = _Pending(request_to(message), encode_request(number, message))
        if len(pending.frame) > self._largest:
            raise LiveshiftError(
                f"{pending.what} to {self.peer} has {len(pending.frame)} bytes, at most"
                f" {self._largest} can be sent"
            )
        self._pending[number] = pending
        try:
            async with asyncio.timeout(timeout):
                why = self._put(pending)
                if why is not None:
                    await asyncio.wait({pending.answer}, timeout=RECONNECT_S)
                    if not pending.sent and not pending.answer.done():
                        raise await self._unreachable(why)
                return await pending.answer
        except TimeoutError:
            raise Unreachable(
                f"{self.peer} did not answer {pending.what} within {timeout:g} s"
            ) from None
        finally:
            del self._pending[number]

    async def _unreachable(self, why: zmq.ZMQError) -> Unreachable:
        """The error for a peer to which a frame could not be sent."""
        if why.errno == zmq.EAGAIN:
            return Unreachable(
                f"{self.peer} is connected, but has not taken the last messages: it hangs, or its"
                " link is slow",
                hint="its log says more",
            )
        cause, hint = await self._why_not()
        return Unreachable(f"{self.peer} is not connected: {cause}", hint=hint)

    # ---- connections ----

    def connected(self, send: Send) -> None:
        """The peer has connected (again): frames go out through ``send`` from now on."""
        self._send = send
        self._connection_number += 1

    def catch_up(self) -> None:
        """Send the requests that could not be sent before. They belong to no run of the peer
        yet."""
        for pending in self._pending.values():
            if not pending.sent:
                self._put(pending)

    def disconnected(self) -> None:
        """Nothing can be sent until the peer is connected again."""
        self._send = None

    def meet(self, boot_id: int) -> None:
        """The peer has told its boot id over the current connection."""
        same, self.peer_boot_id = boot_id == self.peer_boot_id, boot_id
        for pending in list(self._pending.values()):
            if pending.sent == self._connection_number:
                continue  # already sent over this connection
            if pending.sent and not same:
                self._lose(pending)
            else:
                self._put(pending)

    async def greet(self, timeout: float) -> None:
        """Tell our boot id, and learn that of the peer; raises like :meth:`request`."""
        answer = await self.request(Here(self._boot_id), timeout)
        if isinstance(answer, There):
            self.meet(answer.boot_id)

    # ---- frames ----

    def receive(self, raw: bytes | memoryview) -> None:
        """Take one frame from the peer. A frame that is not understood is logged and dropped.

        The peer is informed too, so that an agent of another version finds the reason in its own
        log. That happens once for each connection, because otherwise two peers could refuse each
        other's refusals without end.
        """
        try:
            frame = decode(raw)
        except LiveshiftError as error:
            log.error("from %s: %s", self.peer, error)
            if self._refused_on != self._connection_number:
                self._refused_on = self._connection_number
                with suppress(zmq.ZMQError):  # the peer is gone again
                    self._transmit(encode_error(0, to_wire(error)))
            return
        if isinstance(frame.body, Here):
            with suppress(zmq.ZMQError):  # the peer is gone again
                self._transmit(encode_answer(frame.id, There(self._boot_id)))
            self.meet(frame.body.boot_id)
        elif (body := frame.body) is not None:
            self._served.accept(
                frame.id,
                len(raw),
                request_to(body),
                lambda: self._handler(self.peer, body),
                self._send or self._transmit,  # an answer goes where the request came from
            )
        elif pending := self._pending.get(frame.id):  # else: the answer came after the deadline
            if pending.answer.done():
                return
            if frame.error is not None:
                pending.answer.set_exception(from_wire(*frame.error))
            else:
                pending.answer.set_result(frame.answer)

    # ----

    def _put(self, pending: _Pending) -> zmq.ZMQError | None:
        """Send the request if that is possible now; return the error otherwise."""
        try:
            self._transmit(pending.frame)
        except zmq.ZMQError as error:
            return error
        pending.sent = self._connection_number
        return None

    def _transmit(self, raw: bytes) -> None:
        if self._send is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        self._send(raw)

    def _lose(self, pending: _Pending) -> None:
        if not pending.answer.done():
            pending.answer.set_exception(
                Unreachable(f"lost contact to {self.peer} during {pending.what}")
            )
