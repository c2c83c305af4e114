# SPDX-License-Identifier: Apache-2.0
"""Finds out whether the kernels of hosts answer, also where the program that listens does not.

A kernel accepts connections for a program that is stopped, or that hangs on its disk, until the
program's queue is full (listen(2)). After that it drops them, as if the host were dead. So what is
asked again and again must not fill the queue. Here one connection to each address stays open, and
each further question is one byte on it. The other kernel acknowledges the byte, and no program
needs to read it (tcp(7), SIOCOUTQ).

The bytes are the beginning of a ZMTP greeting, so a listener of ours waits for the rest of it.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
import time

POLL_S = 0.01
IDLE_S = 30.0
"""A connection on which nothing was asked for so long is closed."""

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""64 bytes: signature, version, mechanism, as-server and filler (ZMTP 3.1, 0MQ RFC 37)."""


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to HOST:PORT by plain TCP. Raises OSError."""
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host.strip("[]"), int(port))


class Kernels:
    """The kernels that one process asks. All calls must come from one event loop."""

    def __init__(self) -> None:
        self._open: dict[str, _Connection] = {}  # by address

    async def answers(self, address: str, limit_s: float) -> bool:
        """Whether the kernel at HOST:PORT answers within ``limit_s`` seconds. It does so if it
        accepts a connection, or refuses one, or acknowledges a byte."""
        try:
            async with asyncio.timeout(limit_s):
                return await self._acknowledges(address) or await self._connects(address)
        except TimeoutError:
            return False

    def close(self) -> None:
        """Close all connections. A process that ends need not do so."""
        for address, known in list(self._open.items()):
            self._close(address, known)

    async def _acknowledges(self, address: str) -> bool:
        """False if no connection is open, or the one that was is closed now."""
        if (known := self._open.get(address)) is None:
            return False
        yes = False
        try:
            yes = await known.acknowledges()
        finally:
            if not yes:  # also if it takes too long
                self._close(address, known)
        return yes

    async def _connects(self, address: str) -> bool:
        try:
            made = _Connection(*await connect(address))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        if (other := self._open.get(address)) is not None:  # made for a question at the same time
            self._close(address, other)
        self._open[address] = made
        self._close_when_idle(address, made)
        return True

    def _close_when_idle(self, address: str, known: _Connection) -> None:
        left = known.used + IDLE_S - time.monotonic()
        if left > 0:
            asyncio.get_running_loop().call_later(left, self._close_when_idle, address, known)
        else:
            self._close(address, known)

    def _close(self, address: str, known: _Connection) -> None:
        known.close()
        if self._open.get(address) is known:
            del self._open[address]


class _Connection:
    """``used``: when it was last asked; monotonic seconds."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._left = iter(GREETING)
        self.used = time.monotonic()

    async def acknowledges(self) -> bool:
        """Send a byte, and return True once it is acknowledged. False if the connection has ended,
        or has no byte left; then a new one must show whether the kernel answers."""
        self.used = time.monotonic()
        byte = next(self._left, None)
        if byte is None or self._ended():
            return False
        self._writer.write(bytes([byte]))
        while not self._ended():
            if self._unacknowledged() == 0:
                return True
            await asyncio.sleep(POLL_S)
        return False

    def close(self) -> None:
        self._writer.transport.abort()

    def _ended(self) -> bool:
        return self._reader.at_eof() or self._writer.is_closing()

    def _unacknowledged(self) -> int:
        """Return how many bytes the other kernel has not acknowledged yet."""
        socket = self._writer.get_extra_info("socket")
        (sent,) = struct.unpack("i", fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, bytes(4)))
        return int(sent) + self._writer.transport.get_write_buffer_size()
