# SPDX-License-Identifier: Apache-2.0
"""What a command asks a daemon: over its local UNIX socket, or with an operator's key over TCP.

One ask at a time is under way; who wants to wait for several things opens several clients.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

from ...errors import LiveshiftError, Unreachable, from_wire
from ...runtime.messages import Frame, Message, encode_ask
from ...runtime.messages.words import request_to
from .context import Place, Remote

ANSWER_S = 30.0
"""How long an ask may take unless its caller knows better."""

A = TypeVar("A", bound=Message)


class Line(Protocol):
    """A way to a daemon; connects when first needed and again after it broke."""

    name: str  # as errors name the daemon
    first: int  # the number of the first ask

    def exchange(self, number: int, frame: bytes, until: float) -> Frame:
        """Send an ask and return its answer; raises TimeoutError at ``until`` (monotonic), OSError
        or EOFError when the connection breaks."""

    def close(self) -> None:
        """Hang up; the next exchange connects again."""


class Client:
    """Asks the daemon at ``place``: the path of its socket, or an address with a key.

    Not for several threads at once.
    """

    def __init__(self, place: Place | str | os.PathLike[str]) -> None:
        self.place = place if isinstance(place, Remote) else Path(place)
        self._line = _line(self.place)
        self._numbers = itertools.count(self._line.first)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up; the next ask connects again."""
        self._line.close()

    def ask(self, message: Message, timeout: float = ANSWER_S) -> Message | None:
        """Send an ask and return its answer, waiting at most ``timeout`` seconds.

        Raises the error that the daemon answered with; Unreachable when there is no daemon, when
        it hangs up, or when it takes too long; NotPermitted when it is not ours to ask.
        """
        number = next(self._numbers)
        kind, name = request_to(message), self._line.name
        until = time.monotonic() + timeout
        try:
            answer = self._line.exchange(number, encode_ask(number, message), until)
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
            self.close()  # whatever is still to come on it belongs to nobody
            raise
        if answer.error is not None:
            raise from_wire(*answer.error)
        if answer.id != number:
            self.close()
            raise LiveshiftError(f"{name} answered ask {answer.id} when asked {number}, {kind}")
        return answer.answer

    def get(self, answer: type[A], message: Message, timeout: float = ANSWER_S) -> A:
        """Like :meth:`ask`, for an answer of a known type; raises LiveshiftError for another."""
        got = self.ask(message, timeout)
        if not isinstance(got, answer):
            raise LiveshiftError(
                f"{self._line.name} answered {request_to(message)} with {type(got).__name__},"
                f" not {answer.__name__}"
            )
        return got


def _line(place: Place) -> Line:
    if isinstance(place, Remote):
        from .curve_line import CurveLine

        return CurveLine(place)
    from .unix_line import UnixLine

    return UnixLine(place)
