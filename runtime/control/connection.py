# SPDX-License-Identifier: Apache-2.0
"""A line to one peer carries asks in both directions, over connections that come and go.

Frames may be lost with a connection. When the peer connects again, both sides say which life they
are (Here, There): one life is one run of a program. To the same life the line sends everything
unanswered again, and the peer serves nothing twice (served.py). Asks to an earlier life fail,
because it is unknown how far that life got with them.
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
from ..messages import Here, Message, There, decode, encode_answer, encode_ask, encode_error
from ..messages.words import request_to
from .served import Served

log = logging.getLogger("liveshift.link")

Handler = Callable[[str, Message], Awaitable[Message | None]]
"""Called as handler(peer name, ask); its result or its exception goes back to the peer."""

WhyNot = Callable[[], Awaitable[tuple[str, str]]]
"""Returns (cause, what to look at) for a peer that is not connected."""

Send = Callable[[bytes], None]
"""Sends a frame without waiting; raises zmq.ZMQError when it cannot."""

RECONNECT_S = 3.0
"""An ask waits so many seconds for a peer that is not connected; a reconnect takes one at most."""


def new_boot_id() -> int:
    """A random number for one life. Here carries it, and the numbers of asks start at it."""
    return secrets.randbits(48)


@dataclass
class _Asked:
    what: str
    frame: bytes
    sent: int = 0  # number of the connection that carried it last, from 1
    answer: asyncio.Future[Message | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Connection:
    """The asks and answers of one peer, over its connections.

    ``boot_id``: our own. ``largest``: bytes of the longest frame that the peer takes. ``why_not``:
    is called for the reason when the peer is not connected. ``send`` may be None until
    :meth:`connected`.
    """

    def __init__(
        self,
        peer: str,
        send: Send | None,
        handler: Handler,
        *,
        boot_id: int,
        largest: int,
        why_not: WhyNot | None = None,
    ) -> None:
        self.peer = peer
        self.peer_boot_id: int | None = None
        """The peer's life that we met last. Another life knows nothing of earlier asks."""
        self._send = send
        self._handler = handler
        self._boot_id = boot_id
        self._largest = largest
        self._why_not = why_not
        self._connection = 1
        self._refused_on = 0  # the connection over which we refused a frame
        self._numbers = itertools.count(new_boot_id())
        self._asked: dict[int, _Asked] = {}
        self._served = Served(peer, largest)

    # ---- asking ----

    async def ask(self, message: Message, timeout: float) -> Message | None:
        """Send an ask and return its answer; raises what the peer raised, or Unreachable.

        It waits at most RECONNECT_S for a peer that is not connected.
        """
        number = next(self._numbers)
        asked = _Asked(request_to(message), encode_ask(number, message))
        if len(asked.frame) > self._largest:
            raise LiveshiftError(
                f"{asked.what} to {self.peer} has {len(asked.frame)} bytes, at most {self._largest}"
                " can be sent"
            )
        self._asked[number] = asked
        try:
            async with asyncio.timeout(timeout):
                why = self._put(asked)
                if why is not None:
                    await asyncio.wait({asked.answer}, timeout=RECONNECT_S)
                    if not asked.sent and not asked.answer.done():
                        raise await self._unreachable(why)
                return await asked.answer
        except TimeoutError:
            raise Unreachable(
                f"{self.peer} did not answer {asked.what} within {timeout:g} s"
            ) from None
        finally:
            del self._asked[number]

    async def _unreachable(self, why: zmq.ZMQError) -> Unreachable:
        """The error for a peer to which a frame could not be sent."""
        if why.errno == zmq.EAGAIN:
            return Unreachable(
                f"{self.peer} is connected, but has not taken the last messages: it hangs, or its"
                " link is slow",
                hint="its log says more",
            )
        if self._why_not is not None:
            cause, look = await self._why_not()
            return Unreachable(f"{self.peer} is not connected: {cause}", hint=look)
        return Unreachable(f"{self.peer} is not connected", hint="its log says why")

    def drop(self) -> None:
        """The peer is gone: all open asks fail now, not at their deadlines."""
        for asked in self._asked.values():
            self._lose(asked)

    # ---- connections ----

    def connected(self, send: Send) -> None:
        """The peer has connected (again): frames go out through ``send`` from now on."""
        self._send = send
        self._connection += 1

    def catch_up(self) -> None:
        """Send the asks that could not be sent before. They belong to no life yet."""
        for asked in self._asked.values():
            if not asked.sent:
                self._put(asked)

    def disconnected(self) -> None:
        """Nothing can be sent until the peer is connected again."""
        self._send = None

    def meet(self, boot_id: int) -> None:
        """The peer has said, over the current connection, which life it is."""
        same, self.peer_boot_id = boot_id == self.peer_boot_id, boot_id
        for asked in list(self._asked.values()):
            if asked.sent == self._connection:
                continue  # already sent over this connection
            if asked.sent and not same:
                self._lose(asked)
            else:
                self._put(asked)

    async def greet(self, timeout: float) -> None:
        """Say which life we are, and learn which one the peer is; raises like :meth:`ask`."""
        answer = await self.ask(Here(self._boot_id), timeout)
        if isinstance(answer, There):
            self.meet(answer.boot_id)

    # ---- frames ----

    def take(self, raw: bytes | memoryview) -> None:
        """Take one frame from the peer. A frame that is not understood is logged and dropped.

        The peer is informed too, so that an agent of another version finds the reason in its own
        log. That happens once for each connection, because otherwise two peers could refuse each
        other's refusals without end.
        """
        try:
            frame = decode(raw)
        except LiveshiftError as error:
            log.error("from %s: %s", self.peer, error)
            if self._refused_on != self._connection:
                self._refused_on = self._connection
                with suppress(zmq.ZMQError):  # the peer is gone again
                    self._transmit(encode_error(0, to_wire(error)))
            return
        if isinstance(frame.body, Here):
            with suppress(zmq.ZMQError):  # the peer is gone again
                self._transmit(encode_answer(frame.id, There(self._boot_id)))
            self.meet(frame.body.boot_id)
        elif (body := frame.body) is not None:
            self._served.take(
                frame.id,
                len(raw),
                request_to(body),
                lambda: self._handler(self.peer, body),
                self._send or self._transmit,  # an answer goes where the ask came from
            )
        elif asked := self._asked.get(frame.id):  # else: the answer came after the deadline
            if asked.answer.done():
                return
            if frame.error is not None:
                asked.answer.set_exception(from_wire(*frame.error))
            else:
                asked.answer.set_result(frame.answer)

    # ----

    def _put(self, asked: _Asked) -> zmq.ZMQError | None:
        """Send the ask if that is possible now; return the error otherwise."""
        try:
            self._transmit(asked.frame)
        except zmq.ZMQError as error:
            return error
        asked.sent = self._connection
        return None

    def _transmit(self, raw: bytes) -> None:
        if self._send is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        self._send(raw)

    def _lose(self, asked: _Asked) -> None:
        if not asked.answer.done():
            asked.answer.set_exception(
                Unreachable(f"lost contact to {self.peer} during {asked.what}")
            )
