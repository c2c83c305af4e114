# SPDX-License-Identifier: Apache-2.0
"""The command line's end of a daemon's local UNIX socket (the other: runtime/local_socket.py).

A frame is a u32 little-endian length and a message. One ask at a time is under way on a
connection; who wants to wait for several things opens several clients.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from ..errors import LiveshiftError, NotPermitted, Unreachable, from_wire
from ..runtime.messages import Message, decode, encode_ask

_LENGTH = struct.Struct("<I")
_LIMIT = 256 << 20  # bytes; a longer answer is not one of ours

ANSWER_S = 30.0
"""How long an ask may take unless its caller knows better."""

A = TypeVar("A", bound=Message)


class Client:
    """A connection to the socket at ``path``, made when first needed and again after it broke.

    Not for several threads at once.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._socket: socket.socket | None = None
        self._numbers = itertools.count(1)

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
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def ask(self, message: Message, timeout: float = ANSWER_S) -> Message | None:
        """Send an ask and return its answer, waiting at most ``timeout`` seconds.

        Raises the error that the daemon answered with; Unreachable when there is no daemon, when
        it hangs up, or when it takes too long; NotPermitted when the socket is not ours to use.
        """
        number = next(self._numbers)
        kind = type(message).__name__
        until = time.monotonic() + timeout
        try:
            line = self._socket or self._connect(until)
            frame = encode_ask(number, message)
            _wait_until(line, until)
            line.sendall(_LENGTH.pack(len(frame)) + frame)
            (length,) = _LENGTH.unpack(_receive(line, _LENGTH.size, until))
            if length > _LIMIT:
                raise LiveshiftError(f"{self.path} answered {kind} with a frame of {length} bytes")
            answer = decode(_receive(line, length, until))
        except TimeoutError:
            self.close()
            raise Unreachable(
                f"{self.path} did not answer {kind} within {timeout:g} s",
                hint="the daemon listens but is busy or stuck; its log says more",
            ) from None
        except (OSError, EOFError) as error:
            self.close()
            why = (isinstance(error, OSError) and error.strerror) or str(error)
            raise Unreachable(
                f"lost contact with the daemon at {self.path} during {kind}: {why}",
                hint="it may have been restarted: try again; jobs are not touched by that",
            ) from error
        except BaseException:
            self.close()  # whatever is still to come on it belongs to nobody
            raise
        if answer.error is not None:
            raise from_wire(*answer.error)
        if answer.id != number:
            self.close()
            raise LiveshiftError(
                f"{self.path} answered ask {answer.id} when asked {number} ({kind})"
            )
        return answer.answer

    def get(self, answer: type[A], message: Message, timeout: float = ANSWER_S) -> A:
        """Like :meth:`ask`, for an answer of a known type; raises LiveshiftError for another."""
        got = self.ask(message, timeout)
        if not isinstance(got, answer):
            raise LiveshiftError(
                f"{self.path} answered {type(message).__name__} with {type(got).__name__},"
                f" not {answer.__name__}"
            )
        return got

    def _connect(self, until: float) -> socket.socket:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _wait_until(line, until)
            line.connect(str(self.path))
        except PermissionError as error:
            line.close()
            raise NotPermitted(
                f"cannot use {self.path}: permission denied",
                hint="its directory must be open to you (mode 0755), or run this as root",
            ) from error
        except (FileNotFoundError, NotADirectoryError) as error:
            line.close()
            raise Unreachable(f"no daemon listens: there is no {self.path}", hint=_START) from error
        except ConnectionRefusedError as error:
            line.close()
            raise Unreachable(
                f"no daemon listens on {self.path}, though the socket is there: it has ended",
                hint=_START,
            ) from error
        except TimeoutError:
            line.close()
            raise
        except OSError as error:  # a path too long for a socket, a file that is none
            line.close()
            raise Unreachable(f"cannot reach {self.path}: {error}", hint=_START) from error
        self._socket = line
        return line


_START = (
    "`liveshift lab up --hosts 3` makes a cluster on this machine; on a real one:"
    " `systemctl status liveshift-orchestrator liveshift-agent`"
)


def _wait_until(line: socket.socket, until: float) -> None:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    line.settimeout(left)


def _receive(line: socket.socket, length: int, until: float) -> bytes:
    """Exactly ``length`` bytes; EOFError when the peer hangs up first."""
    parts = bytearray()
    while len(parts) < length:
        _wait_until(line, until)
        part = line.recv(min(length - len(parts), 1 << 20))
        if not part:
            raise EOFError("it hung up")
        parts += part
    return bytes(parts)
