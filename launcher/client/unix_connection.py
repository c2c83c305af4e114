# SPDX-License-Identifier: Apache-2.0
"""Frames to and from a daemon's UNIX socket. The other end is runtime/control/local_socket.py.

A frame is a u32 little-endian length and a message. One request at a time is under way.
"""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress
from pathlib import Path

from ...errors import LiveshiftError, NotPermitted, Unreachable
from ...runtime.messages import Frame, decode

_LENGTH = struct.Struct("<I")
_LIMIT = 256 << 20  # bytes; no daemon of ours sends a longer answer


class UnixConnection:
    """A connection to the socket at ``path``, made when first needed and again after it broke."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.first = 1
        self._path = path
        self._socket: socket.socket | None = None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def exchange(self, number: int, frame: bytes, until: float) -> Frame:
        """Send a request and return its answer, before ``until`` (monotonic seconds).

        Raises TimeoutError, OSError or EOFError if the connection fails; Unreachable if no daemon
        listens; NotPermitted if we may not use the socket; LiveshiftError for too long an answer.
        """
        connection = self._socket or self._connect(until)
        _wait_until(connection, until)
        with suppress(BrokenPipeError):  # the daemon may have sent the reason before it hung up
            connection.sendall(_LENGTH.pack(len(frame)) + frame)
        (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size, until))
        if length > _LIMIT:
            raise LiveshiftError(f"{self.name} answered with a frame of {length} bytes")
        return decode(_receive(connection, length, until))

    def _connect(self, until: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _wait_until(connection, until)
            self._connect_to_daemon(connection)
        except BaseException:
            connection.close()
            raise
        self._socket = connection
        return connection

    def _connect_to_daemon(self, connection: socket.socket) -> None:
        try:
            connection.connect(self.name)
        except TimeoutError:
            raise
        except PermissionError as error:
            raise NotPermitted(
                f"cannot use {self.name}: permission denied",
                hint="its directory must be open to you (mode 0755), or run this as root",
            ) from error
        except (FileNotFoundError, NotADirectoryError) as error:
            raise Unreachable(f"no daemon listens: there is no {self.name}", hint=_START) from error
        except ConnectionRefusedError as error:
            raise Unreachable(
                f"no daemon listens on {self.name}, though the socket is there: it has ended",
                hint=_START,
            ) from error
        except OSError as error:  # the path is too long for a socket, or the file is none
            raise Unreachable(f"cannot reach {self.name}: {error}", hint=_START) from error


_START = (
    "`liveshift lab up --hosts 3` makes a cluster on this machine; on a real one:"
    " `systemctl status liveshift-orchestrator liveshift-agent`"
)


def _wait_until(connection: socket.socket, until: float) -> None:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)


def _receive(connection: socket.socket, length: int, until: float) -> bytes:
    """Return exactly ``length`` bytes. Raises EOFError if the peer hangs up first, TimeoutError."""
    parts = bytearray()
    while len(parts) < length:
        _wait_until(connection, until)
        part = connection.recv(min(length - len(parts), 1 << 20))
        if not part:
            raise EOFError("it hung up")
        parts += part
    return bytes(parts)
