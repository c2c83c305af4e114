# SPDX-License-Identifier: Apache-2.0
"""A client's connection to the helper, on which it sends a request and receives the reply."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import msgspec
from msgspec import Raw

from ...errors import Unreachable, from_wire
from .calls import LOG, HelperReply, HelperRequest
from .channel import Channel

QUESTION_S = 60.0
"""A client waits at most this many seconds for an answer: NVML may need its whole deadline, and
other clients may come first."""

_decoder = msgspec.msgpack.Decoder(HelperReply)


class HelperConnection:
    """A connection to the helper, for one thread at a time."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.usable = True
        """Whether the answers to all requests on this connection have come."""

    def ask(self, request: HelperRequest, returns: Any, within_s: float = QUESTION_S) -> Any:
        """Send a request; returns the answer, decoded as ``returns``. Raises what the helper
        raised, TimeoutError after ``within_s`` seconds, EOFError and OSError if the helper has
        gone."""
        self.usable = False
        self.channel.socket.settimeout(within_s)
        self.channel.send(msgspec.msgpack.encode(request))
        raw = self.channel.receive()
        self.usable = True
        reply = _decoder.decode(raw)
        if isinstance(reply.error, tuple):
            raise from_wire(*reply.error)
        assert isinstance(reply.ok, Raw)
        return msgspec.msgpack.decode(reply.ok, type=returns)


class Closing(ABC):
    """Base of context managers that call :meth:`close` on exit."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def contact(during: str) -> Iterator[None]:
    """Raises Unreachable for an error of the connection while the with block runs."""
    try:
        yield
    except (OSError, EOFError) as error:
        said = "no answer in time" if isinstance(error, TimeoutError) else str(error)
        raise Unreachable(
            f"the GPU helper was lost during {during}: {said}",
            hint=f"Its log is {LOG} in the agent's run directory.",
        ) from error
