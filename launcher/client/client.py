# SPDX-License-Identifier: Apache-2.0
"""Sends a command's requests to a daemon: over its UNIX socket, or over TCP with an operator's key.

A client has one request under way at a time. To wait for several answers, open several clients.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ...errors import LiveshiftError, Unreachable, from_wire
from ...runtime.messages import Message, encode_request
from ...runtime.messages.request_text import request_to
from .context import Place, Remote

if TYPE_CHECKING:
    from .curve_connection import CurveConnection
    from .unix_connection import UnixConnection

ANSWER_S = 30.0
"""A request may take this many seconds, unless its caller gives another time."""

A = TypeVar("A", bound=Message)


class Client:
    """Sends requests to the daemon at ``place``: the path of its socket, or an address with a key.

    Only one thread at a time may use it.
    """

    def __init__(self, place: Place | str | os.PathLike[str]) -> None:
        self.place = place if isinstance(place, Remote) else Path(place)
        self._connection = _connect(self.place)
        self._numbers = itertools.count(self._connection.first)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the next request connects again."""
        self._connection.close()

    def request(self, message: Message, timeout: float = ANSWER_S) -> Message | None:
        """Send a request and return its answer, waiting at most ``timeout`` seconds.

        Raises the error with which the daemon answered; Unreachable if there is no daemon, if it
        hangs up, or if it takes too long; NotPermitted if the socket or the key is refused to us.
        """
        number = next(self._numbers)
        kind, name = request_to(message), self._connection.name
        until = time.monotonic() + timeout
        try:
            answer = self._connection.exchange(number, encode_request(number, message), until)
        except TimeoutError:
            self.close()
            raise Unreachable(
                f"{name} did not answer {kind} within {timeout:g} s",
                hint="the daemon listens but is busy or stuck; its log says more",
            ) from None
        except (OSError, EOFError) as error:
            self.close()
            why = (isinstance(error, OSError) and error.strerror) or str(error)
            raise Unreachable(
                f"lost contact with the daemon at {name} during {kind}: {why}",
                hint="it may have been restarted: try again; jobs are not touched by that",
            ) from error
        except BaseException:
            self.close()  # no later request may get the answer to this one
            raise
        if answer.error is not None:
            raise from_wire(*answer.error)
        if answer.id != number:
            self.close()
            raise LiveshiftError(f"{name} answered request {answer.id} instead of {number}, {kind}")
        return answer.answer

    def get(self, answer: type[A], message: Message, timeout: float = ANSWER_S) -> A:
        """Like :meth:`request`, for an answer of a known type. Raises LiveshiftError for
        another."""
        got = self.request(message, timeout)
        if not isinstance(got, answer):
            raise LiveshiftError(
                f"{self._connection.name} answered {request_to(message)} with {type(got).__name__},"
                f" not {answer.__name__}"
            )
        return got


def _connect(place: Place) -> CurveConnection | UnixConnection:
    if isinstance(place, Remote):
        from .curve_connection import CurveConnection

        return CurveConnection(place)
    from .unix_connection import UnixConnection

    return UnixConnection(place)
