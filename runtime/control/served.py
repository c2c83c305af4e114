# SPDX-License-Identifier: Apache-2.0
"""One peer's asks, each served once however often it comes, and no more of them than fit.

A connection that breaks takes frames with it, so who asked asks again with the same number
(line.py). Numbers begin at random in every program's life, so that no two lives' are taken for
one another; an ask that was answered is answered with the same bytes again.
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
"""Of one peer under way at a time; an agent passes on those of a whole host."""
MOST_BYTES = 64 << 20
"""Of frames of asks under way."""

KEPT_S = 60.0
KEPT_ANSWERS = 1024
KEPT_BYTES = 1 << 20
"""Answers are kept to be asked for again: so long, so many, and of so many bytes together."""

STRETCH = 1 << 24
"""Numbers of one such stretch are of the same life, and grow: those up to one that is no longer
kept have been asked before. Lives are far enough apart not to share one."""
KEPT_STRETCHES = 4096

Reply = Callable[[bytes], None]
"""Sends a frame to who asked; raises zmq.ZMQError when that is not possible now."""


@dataclass
class _UnderWay:
    reply: Reply  # where the latest copy of the ask came from
    size: int
    task: asyncio.Task[None] | None = None


@dataclass
class _Answer:
    at: float  # monotonic
    raw: bytes  # empty: no longer kept


class Served:
    """``largest``: bytes of the longest answer that the peer takes."""

    def __init__(self, peer: str, largest: int) -> None:
        self._peer = peer
        self._largest = largest
        self._under_way: dict[int, _UnderWay] = {}
        self._bytes = 0
        self._answered: OrderedDict[int, _Answer] = OrderedDict()
        self._whole: deque[int] = deque()  # those of them whose bytes are kept, oldest first
        self._kept = 0  # bytes
        self._floors: OrderedDict[int, int] = OrderedDict()  # the highest forgotten, by stretch

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
        """An ask has come as a frame of ``size`` bytes; ``serve`` is called for a new one only."""
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
    with suppress(zmq.ZMQError):  # who asked has gone, or asks again when connected again
        reply(raw)
