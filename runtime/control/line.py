# SPDX-License-Identifier: Apache-2.0
"""A line to one peer: asks in flight, and the peer's own, over connections that come and go.

Frames may be lost with a connection. When the peer is there again both sides say which life they
are (Here, There): to the same life everything unanswered is sent again, and it serves nothing
twice (served.py); what was asked of an earlier life fails, since nobody can know how far it got.
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
"""Called as handler(peer name, ask); what it returns or raises goes back to the peer."""

WhyNot = Callable[[], Awaitable[tuple[str, str]]]
"""Tells (cause, what to look at) of a peer that is not connected."""

Send = Callable[[bytes], None]
"""Sends a frame without waiting; raises zmq.ZMQError when it cannot."""

RECONNECT_S = 3.0
"""How long an ask waits for a peer that is not connected: connecting again takes at most one."""


def new_life() -> int:
    """A number that no other life has, for Here and to begin the numbers of asks at."""
    return secrets.randbits(48)


@dataclass
class _Asked:
    what: str
    frame: bytes
    sent: int = 0  # the connection it was sent over last, from 1
    answer: asyncio.Future[Message | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Line:
    """``life``: ours; ``largest``: bytes of the longest frame that the peer takes; ``why_not`` is
    asked when it is not connected.

    ``send`` may be None until :meth:`connected`.
    """

    def __init__(
        self, peer: str, send: Send | None, handler: Handler, *, life: int, largest: int,
        why_not: WhyNot | None = None,
    ) -> None:  # fmt: skip
        self.peer = peer
        self.peer_life: int | None = None
        """Which run of the peer was met last; another one knows nothing of earlier asks."""
        self._send = send
        self._handler = handler
        self._life = life
        self._largest = largest
        self._why_not = why_not
        self._connection = 1
        self._refused_on = 0  # the connection over which the peer heard that it is not understood
        self._numbers = itertools.count(new_life())
        self._asked: dict[int, _Asked] = {}
        self._served = Served(peer, largest)

    # ---- asking ----

    async def ask(self, message: Message, timeout: float) -> Message | None:
        """Send an ask and return its answer; raises what the peer raised, or Unreachable.

        A peer that is not connected is waited for, RECONNECT_S at most.
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
        """What to say of a peer that could not be sent to."""
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
        """The peer is gone: everything it was asked fails now, not at its deadline."""
        for asked in self._asked.values():
            self._lose(asked)

    # ---- connections ----

    def connected(self, send: Send) -> None:
        """Frames go another way from now on: the peer has connected (again)."""
        self._send = send
        self._connection += 1

    def catch_up(self) -> None:
        """Send what could not be sent before: it was asked of no life yet."""
        for asked in self._asked.values():
            if not asked.sent:
                self._put(asked)

    def disconnected(self) -> None:
        """Nothing can be sent until the peer is connected again."""
        self._send = None

    def meet(self, life: int) -> None:
        """The peer has said which life it is, over the connection of now."""
        same, self.peer_life = life == self.peer_life, life
        for asked in list(self._asked.values()):
            if asked.sent == self._connection:
                continue  # on its way over this very connection
            if asked.sent and not same:
                self._lose(asked)
            else:
                self._put(asked)

    async def greet(self, timeout: float) -> None:
        """Say which life we are, hear which one the peer is; raises like :meth:`ask`."""
        answer = await self.ask(Here(self._life), timeout)
        if isinstance(answer, There):
            self.meet(answer.life)

    # ---- frames ----

    def take(self, raw: bytes | memoryview) -> None:
        """One frame from the peer; a frame that is not understood is logged and dropped.

        The peer hears it too, once for each connection: an agent of another version then finds the
        reason in its own log. Only once, since two peers could else refuse each other's refusals.
        """
        try:
            frame = decode(raw)
        except LiveshiftError as error:
            log.error("from %s: %s", self.peer, error)
            if self._refused_on != self._connection:
                self._refused_on = self._connection
                with suppress(zmq.ZMQError):  # gone again
                    self._transmit(encode_error(0, to_wire(error)))
            return
        if isinstance(frame.body, Here):
            with suppress(zmq.ZMQError):  # gone again
                self._transmit(encode_answer(frame.id, There(self._life)))
            self.meet(frame.body.life)
        elif (body := frame.body) is not None:
            self._served.take(
                frame.id,
                len(raw),
                request_to(body),
                lambda: self._handler(self.peer, body),
                self._send or self._transmit,  # an answer goes where the ask came from
            )
        elif asked := self._asked.get(frame.id):  # else: answered after its deadline
            if asked.answer.done():
                return
            if frame.error is not None:
                asked.answer.set_exception(from_wire(*frame.error))
            else:
                asked.answer.set_result(frame.answer)

    # ----

    def _put(self, asked: _Asked) -> zmq.ZMQError | None:
        """Send it if that is possible now; returns why not."""
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
