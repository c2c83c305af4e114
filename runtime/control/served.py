# SPDX-License-Identifier: Apache-2.0
"""Answers one peer's requests: each at most once, and only so many at a time.

A broken connection loses frames, so the peer sends a request again with the same number
(connection.py). Each run of a program begins its numbers at a random one, so numbers of two runs
do not meet. A request that was answered gets the same bytes again.
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

MOST_REQUESTS = 4096
"""One peer has at most this many requests under way. An agent passes on those of a whole host."""
MOST_BYTES = 64 << 20
"""The frames of one peer's requests under way have at most this many bytes together."""

KEPT_S = 60.0
KEPT_ANSWERS = 1024
KEPT_BYTES = 1 << 20
"""Answers are kept for repeated requests, up to three limits: KEPT_S seconds, KEPT_ANSWERS answers,
and KEPT_BYTES bytes together."""

STRETCH = 1 << 24
"""Numbers are remembered in stretches of this length. In one stretch all numbers are of one run
of the peer and grow, so a number up to the highest forgotten one was served before. Two runs are
far enough apart not to share a stretch."""
KEPT_STRETCHES = 4096

Reply = Callable[[bytes], None]
"""Sends a frame to the peer that asked; raises zmq.ZMQError when that is not possible now."""


@dataclass
class _UnderWay:
    reply: Reply  # of the latest copy of the request
    size: int
    task: asyncio.Task[None] | None = None


@dataclass
class _Answer:
    at: float  # monotonic seconds
    raw: bytes  # empty: not kept any more


class Served:
    """The requests of one peer. ``largest``: bytes of the longest answer that the peer takes."""

    def __init__(self, peer: str, largest: int) -> None:
        self._peer = peer
        self._largest = largest
        self._under_way: dict[int, _UnderWay] = {}
        self._bytes = 0
        self._answered: OrderedDict[int, _Answer] = OrderedDict()
        self._whole: deque[int] = deque()  # answers whose bytes are kept, oldest first
        self._kept = 0  # bytes of these together
        self._floors: OrderedDict[int, int] = OrderedDict()  # stretch → highest forgotten number

    def accept(
        self,
        number: int,
        size: int,
        what: str,
        handler: Callable[[], Awaitable[Message | None]],
        reply: Reply,
    ) -> None:
        """Take a request, a frame of ``size`` bytes. Calls ``handler`` only if the request is
        new."""
        if (known := self._under_way.get(number)) is not None:
            known.reply = reply
        elif (answered := self._answered.get(number)) is not None:
            _send(reply, answered.raw or _gone(number, what))
        elif number <= self._floors.get(number // STRETCH, -1):
            _send(reply, _gone(number, what))
        elif len(self._under_way) >= MOST_REQUESTS or self._bytes + size > MOST_BYTES:
            full = Refused(f"{self._peer} has asked for too much at once: {what} is not served")
            _send(reply, encode_error(number, to_wire(full)))
        else:
            request = self._under_way[number] = _UnderWay(reply, size)
            self._bytes += size
            request.task = asyncio.create_task(self._answer(number, what, handler))

    async def _answer(
        self, number: int, what: str, handler: Callable[[], Awaitable[Message | None]]
    ) -> None:
        try:
            answer = encode_answer(number, await handler())
        except LiveshiftError as error:
            answer = encode_error(number, to_wire(error))
        except Exception as error:
            log.exception("%s from %s", what, self._peer)
            answer = encode_error(number, to_wire(error))
        if len(answer) > self._largest:
            long = LiveshiftError(f"the answer to {what} has {len(answer)} bytes: too many to send")
            answer = encode_error(number, to_wire(long))
        request = self._under_way.pop(number)
        self._bytes -= request.size
        self._keep(number, answer)
        _send(request.reply, answer)

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
