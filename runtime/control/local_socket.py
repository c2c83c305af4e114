# SPDX-License-Identifier: Apache-2.0
"""The local UNIX socket over which the command line reaches a daemon, authorised by the kernel.

A frame is a u32 little-endian length and a message (runtime/messages). The caller's uid comes from
SO_PEERCRED, so a caller cannot forge it. Any user may connect; the handler decides what a user may
do.

No user can fill our memory or lock out other users. Connections and long frames are counted by uid,
and a caller that does not send or take a frame in time is disconnected.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import LiveshiftError, Refused, to_wire
from ..messages import Message, decode, encode_answer, encode_error

log = logging.getLogger("liveshift.local")

LENGTH = struct.Struct("<I")
CREDENTIALS = struct.Struct("3i")
LIMIT = 7 << 20
"""A request has at most this many bytes. That is more than Linux allows for a program's arguments
and environment, and less than an agent can pass on (send_queue.TO_ORCHESTRATOR)."""

MOST_CONNECTIONS = 4096
MOST_OF_A_USER = 512
"""One user has at most this many connections: a command needs one for each capsule whose output it
follows, and one more. So neither a few large jobs nor two users can take all."""

LONG = 64 << 10
MOST_LONG = 8
"""One user has at most this many frames above LONG bytes in transfer, both directions together."""
TRANSFER_S = 30.0
"""A frame that has begun, in either direction, must be complete after this many seconds."""

LocalHandler = Callable[[int, Message], Awaitable[Message | None]]
"""Called as handler(uid, request)."""


@dataclass
class _User:
    connections: int = 0
    long: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_LONG))


def listen(path: Path) -> socket.socket:
    """Make a socket at ``path`` (mode 0666). Callers that connect wait until it is served.

    It replaces a socket at which no process listens. Raises Refused where a process listens at
    ``path``: its socket stays. Raises LiveshiftError on other failures, with nothing left at
    ``path``.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if there := _holder(path):
            raise Refused(
                f"{there} listens on {path} already",
                hint="it goes on, and nothing was changed. A second cluster on this machine needs"
                " its own paths.run",
            )
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        os.chmod(path, 0o666)  # noqa: S103 (any user may connect; the kernel says who it is)
        listener.listen(MOST_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise LiveshiftError(f"cannot listen on {path}: {error}") from error
    except Refused:
        listener.close()
        raise
    return listener


def _holder(path: Path) -> str:
    """The process that listens at ``path``; "" for none, as after a killed daemon."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # its backlog is full, so a process listens
            return "another process"
        except OSError:
            return ""
        raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        return f"pid {CREDENTIALS.unpack(raw)[0]}"


async def serve_on(listener: socket.socket, path: Path, handler: LocalHandler) -> asyncio.Server:
    """Serve a socket that :func:`listen` has made at ``path``: answer the requests of each
    connection one after the other."""
    users: dict[int, _User] = {}

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer: socket.socket = writer.get_extra_info("socket")
        raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        uid = CREDENTIALS.unpack(raw)[1]
        user = users.setdefault(uid, _User())
        everybody = sum(one.connections for one in users.values())
        user.connections += 1
        try:
            if uid != 0 and (user.connections > MOST_OF_A_USER or everybody >= MOST_CONNECTIONS):
                full = Refused(
                    f"{path} has {everybody} connections, {user.connections - 1} of them from uid"
                    f" {uid}, and takes no more",
                    hint="end some of the commands that wait or follow",
                )
                await _write(writer, user, encode_error(0, to_wire(full)))
                return
            await _converse(reader, writer, uid, user, handler)
        except (asyncio.IncompleteReadError, TimeoutError, ConnectionError):
            pass  # the caller has hung up, or is too slow
        finally:
            user.connections -= 1
            if not user.connections:
                del users[uid]
            if writer.transport.get_write_buffer_size():  # drop what the caller does not read
                writer.transport.abort()
            writer.close()

    return await asyncio.start_unix_server(connected, sock=listener, backlog=MOST_CONNECTIONS)


async def _converse(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    uid: int,
    user: _User,
    handler: LocalHandler,
) -> None:
    while True:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if length > LIMIT:
            long = Refused(f"the request has {length} bytes, at most {LIMIT} are taken")
            await _write(writer, user, encode_error(0, to_wire(long)))
            return
        async with _passing(user, length):
            frame = await reader.readexactly(length)
        await _write(writer, user, await _answer(frame, uid, handler))


async def _write(writer: asyncio.StreamWriter, user: _User, raw: bytes) -> None:
    async with _passing(user, len(raw)):
        writer.write(LENGTH.pack(len(raw)) + raw)
        await writer.drain()


@asynccontextmanager
async def _passing(user: _User, size: int) -> AsyncIterator[None]:
    """Surrounds the transfer of one frame; raises TimeoutError when that takes too long."""
    async with user.long if size > LONG else nullcontext():
        async with asyncio.timeout(TRANSFER_S):
            yield


async def _answer(frame: bytes, uid: int, handler: LocalHandler) -> bytes:
    number = 0
    try:
        decoded = decode(frame)
        number = decoded.id
        if decoded.body is None:
            raise LiveshiftError("the local socket takes requests only")
        return encode_answer(number, await handler(uid, decoded.body))
    except LiveshiftError as error:
        return encode_error(number, to_wire(error))
    except Exception as error:
        log.exception("local request")
        return encode_error(number, to_wire(error))
