# SPDX-License-Identifier: Apache-2.0
"""Serves one peer's asks: each at most once, however often it comes, and only so many at a time.

A broken connection loses frames, so the peer asks again with the same number (line.py). Each life
of a program begins its numbers at a random one, so numbers of two lives do not meet. An ask that
was answered gets the same bytes again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import zmq

from ...errors import LiveshiftError, Refused, Unreachable, to_wire
from ..messages import Message, encode_answer, encode_error

log = logging.getLogger("liveshift.link")

MOST_ASKS = 4096
"""One peer has at most this many asks under way. An agent passes on those of a whole host."""
MOST_BYTES = 64 << 20
"""The frames of one peer's asks under way have at most this many bytes together."""

KEPT_S = 60.0
KEPT_ANSWERS = 1024
KEPT_BYTES = 1 << 20
"""Answers are kept for repeated asks, up to three limits: KEPT_S seconds, KEPT_ANSWERS answers, and
KEPT_BYTES bytes together."""

STRETCH = 1 << 24
"""Numbers are remembered in stretches of this length. In one stretch all numbers are of one life
and grow, so a number up to the highest forgotten one was served before. Two lives are far enough
apart not to share a stretch."""
KEPT_STRETCHES = 4096

Reply = Callable[[bytes], None]
"""Sends a frame to the peer that asked; raises zmq.ZMQError when that is not possible now."""


@dataclass
class _UnderWay:
    reply: Reply  # of the latest copy of the ask
    size: int
    task: asyncio.Task[None] | None = None


@dataclass
class _Answer:
    at: float  # monotonic seconds
    raw: bytes  # empty: not kept any more


class Served:
    """The asks of one peer. ``largest``: bytes of the longest answer that the peer takes."""

    def __init__(self, peer: str, largest: int) -> None:
        self._peer = peer
        self._largest = largest
        self._under_way: dict[int, _UnderWay] = {}
        self._bytes = 0
        self._answered: OrderedDict[int, _Answer] = OrderedDict()
        self._whole: deque[int] = deque()  # answers whose bytes are kept, oldest first
        self._kept = 0  # bytes of these together
        self._floors: OrderedDict[int, int] = OrderedDict()  # stretch → highest forgotten number

    @property
    def idle(self) -> bool:
        return not self._under_way

    def take(
        self,
        number: int,
        size: int,
        what: str,
        serve: Callable[[], Awaitable[Message | None]],
        reply: Reply,
    ) -> None:
        """Take an ask, a frame of ``size`` bytes. ``serve`` is called only if the ask is new."""
        if (known := self._under_way.get(number)) is not None:
            known.reply = reply
        elif (answered := self._answered.get(number)) is not None:
            _send(reply, answered.raw or _gone(number, what))
        elif number <= self._floors.get(number // STRETCH, -1):
            _send(reply, _gone(number, what))
        elif len(self._under_way) >= MOST_ASKS or self._bytes + size > MOST_BYTES:
            full = Refused(f"{self._peer} has asked for too much at once: {what} is not served")
            _send(reply, encode_error(number, to_wire(full)))
        else:
            ask = self._under_way[number] = _UnderWay(reply, size)
            self._bytes += size
            ask.task = asyncio.create_task(self._serve(number, what, serve))

    async def _serve(
        self, number: int, what: str, serve: Callable[[], Awaitable[Message | None]]
    ) -> None:
        try:
            answer = encode_answer(number, await serve())
        except LiveshiftError as error:
            answer = encode_error(number, to_wire(error))
        except Exception as error:
            log.exception("%s from %s", what, self._peer)
            answer = encode_error(number, to_wire(error))
        if len(answer) > self._largest:
            long = LiveshiftError(f"the answer to {what} has {len(answer)} bytes: too many to send")
            answer = encode_error(number, to_wire(long))
        ask = self._under_way.pop(number)
        self._bytes -= ask.size
        self._keep(number, answer)
        _send(ask.reply, answer)

    def _keep(self, number: int, raw: bytes) -> None:
        now = time.monotonic()
        if len(raw) <= KEPT_BYTES:
            self._whole.append(number)
            self._kept += len(raw)
        self._answered[number] = _Answer(now, raw if len(raw) <= KEPT_BYTES else b"")
        while self._kept > KEPT_BYTES:
            self._answered[self._forget_bytes()].raw = b""
        while len(self._answered) > KEPT_ANSWERS or self._oldest().at < now - KEPT_S:
            if self._whole and self._whole[0] == next(iter(self._answered)):
                self._forget_bytes()
            forgotten, _ = self._answered.popitem(last=False)
            stretch = forgotten // STRETCH
            self._floors[stretch] = max(forgotten, self._floors.pop(stretch, forgotten))
        while len(self._floors) > KEPT_STRETCHES:
            self._floors.popitem(last=False)

    def _forget_bytes(self) -> int:
        number = self._whole.popleft()
        self._kept -= len(self._answered[number].raw)
        return number

    def _oldest(self) -> _Answer:
        return next(iter(self._answered.values()))


def _gone(number: int, what: str) -> bytes:
    gone = Unreachable(f"{what} may have been served: its answer was lost with a connection")
    return encode_error(number, to_wire(gone))


def _send(reply: Reply, raw: bytes) -> None:
    with suppress(zmq.ZMQError):  # the peer is gone; once reconnected it asks again
        reply(raw)
