# SPDX-License-Identifier: Apache-2.0
"""The local UNIX socket: where the command line reaches a daemon, authorised by the kernel.

A frame is a u32 little-endian length and a message (messages.py). The caller's uid comes from
SO_PEERCRED and cannot be claimed. Any user may connect; what each may do is decided by the
request's handler.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

from ..errors import LiveshiftError, to_wire
from .messages import Message, decode, encode_answer, encode_error

log = logging.getLogger("liveshift.local")

LENGTH = struct.Struct("<I")
CREDENTIALS = struct.Struct("3i")
LIMIT = 64 << 20
"""Bytes of one frame; an environment with long variables fits many times over."""

LocalHandler = Callable[[int, Message], Awaitable[Message | None]]
"""Called as handler(uid, ask)."""


async def serve(path: Path, handler: LocalHandler) -> asyncio.Server:
    """Listen on ``path`` (made anew, mode 0666) and answer asks one after the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer: socket.socket = writer.get_extra_info("socket")
        raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        uid = CREDENTIALS.unpack(raw)[1]
        try:
            while True:
                frame = await _read(reader)
                writer.write(await _answer(frame, uid, handler))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the caller has hung up
        finally:
            writer.close()

    server = await asyncio.start_unix_server(connected, path=str(path))
    os.chmod(path, 0o666)
    return server


async def _read(reader: asyncio.StreamReader) -> bytes:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > LIMIT:
        raise ConnectionError(f"a frame of {length} bytes")
    return await reader.readexactly(length)


async def _answer(frame: bytes, uid: int, handler: LocalHandler) -> bytes:
    number = 0
    try:
        decoded = decode(frame)
        number = decoded.id
        if decoded.body is None:
            raise LiveshiftError("the local socket takes asks only")
        raw = encode_answer(number, await handler(uid, decoded.body))
    except LiveshiftError as error:
        raw = encode_error(number, to_wire(error))
    except Exception as error:
        log.exception("local ask")
        raw = encode_error(number, to_wire(error))
    return LENGTH.pack(len(raw)) + raw
