# SPDX-License-Identifier: Apache-2.0
"""Sends and receives whole messages, with file descriptors, over a UNIX stream socket."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

LENGTH = struct.Struct("<I")
CREDENTIALS = struct.Struct("3i")
LIMIT = 16 << 20
"""A message has at most this many bytes; it may list many thousands of allocations."""
MOST_DESCRIPTORS = 250
"""A message carries at most this many descriptors; the kernel takes at most 253 (SCM_MAX_FD)."""


class Channel:
    """One end of a connection. Two threads must not use it at once. Methods raise OSError
    (TimeoutError after the socket's own timeout), and EOFError if the peer has closed its end."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def send(self, raw: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message. The ``descriptors`` stay open here."""
        if len(raw) > LIMIT or len(descriptors) > MOST_DESCRIPTORS:
            raise ValueError(f"too large: {len(raw)} bytes and {len(descriptors)} descriptors")
        data = LENGTH.pack(len(raw)) + raw
        rights = []
        if descriptors:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        sent = self.socket.sendmsg([data], rights, socket.MSG_NOSIGNAL)
        if sent < len(data):
            self.socket.sendall(memoryview(data)[sent:], socket.MSG_NOSIGNAL)

    def receive(self) -> bytes:
        """The next message. Descriptors that come with it are closed, since the caller expects
        none."""
        raw, descriptors = self.receive_all()
        for descriptor in descriptors:
            os.close(descriptor)
        return raw

    def receive_all(self) -> tuple[bytes, list[int]]:
        """The next message and the descriptors that came with it. The caller must close them."""
        head, descriptors = b"", list[int]()
        try:
            while len(head) < LENGTH.size:
                part, more, _, _ = socket.recv_fds(
                    self.socket,
                    LENGTH.size - len(head),
                    MOST_DESCRIPTORS + 1,
                    socket.MSG_CMSG_CLOEXEC,
                )
                descriptors += more
                if not part:
                    raise EOFError("the connection was closed")
                head += part
            (length,) = LENGTH.unpack(head)
            if length > LIMIT:
                raise OSError(f"the message has {length} bytes, at most {LIMIT} are taken")
            return self._exactly(length), descriptors
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def _exactly(self, length: int) -> bytes:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            count = self.socket.recv_into(view)
            if not count:
                raise EOFError("the connection was closed in mid-message")
            view = view[count:]
        return bytes(data)

    def peer_gone(self) -> bool:
        """Whether the peer has closed its end. Does not read messages that it sent before."""
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The pid and uid of the process that made the connection, as the kernel reports them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(raw)
    return pid, uid


def connect(directory: Path, name: str) -> socket.socket:
    """Connect to the socket of that name in the directory. The path may be longer than the 108
    bytes of a socket's address. Raises OSError."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _by_folder(directory, name, made.connect)
    except BaseException:
        made.close()
        raise
    return made


def listen(directory: Path, name: str) -> socket.socket:
    """Listen on a new socket of that name in the directory, for this user only. Raises OSError."""
    (directory / name).unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        before = os.umask(0o177)  # no other thread makes files while the helper starts
        try:
            _by_folder(directory, name, made.bind)
        finally:
            os.umask(before)
        made.listen(64)
    except BaseException:
        made.close()
        raise
    return made


def _by_folder(directory: Path, name: str, use: Callable[[str], object]) -> None:
    folder = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        use(f"/proc/self/fd/{folder}/{name}")
    finally:
        os.close(folder)
