# SPDX-License-Identifier: Apache-2.0
"""A client's connection to the helper: an ask, and what it is answered with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import msgspec
from msgspec import Raw

from ...errors import Unreachable, from_wire
from .calls import LOG, Ask, Reply
from .channel import Channel

QUESTION_S = 60.0
"""NVML may take its whole deadline, and be asked by others before."""

_decoder = msgspec.msgpack.Decoder(Reply)


class Line:
    """A connection to the helper, for one thread at a time."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.usable = True
        """No answer is outstanding on it."""

    def ask(self, ask: Ask, returns: Any, within_s: float = QUESTION_S) -> Any:
        """The answer, decoded as ``returns``. Raises what the helper raised, TimeoutError after
        ``within_s`` seconds, EOFError and OSError where the helper has gone."""
        self.usable = False
        self.channel.socket.settimeout(within_s)
        self.channel.send(msgspec.msgpack.encode(ask))
        raw = self.channel.receive()
        self.usable = True
        reply = _decoder.decode(raw)
        if isinstance(reply.error, tuple):
            raise from_wire(*reply.error)
        assert isinstance(reply.ok, Raw)
        return msgspec.msgpack.decode(reply.ok, type=returns)


class Closing(ABC):
    """A context manager that is closed on exit."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def contact(during: str) -> Iterator[None]:
    """What goes wrong with a connection meanwhile is raised as Unreachable."""
    try:
        yield
    except (OSError, EOFError) as error:
        said = "no answer in time" if isinstance(error, TimeoutError) else str(error)
        raise Unreachable(
            f"the GPU helper was lost during {during}: {said}",
            hint=f"Its log is {LOG} in the agent's run directory.",
        ) from error
