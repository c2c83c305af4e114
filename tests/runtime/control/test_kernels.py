# SPDX-License-Identifier: Apache-2.0
"""A kernel answers as long as it is there, whatever the program does that listens."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from waits import until_async

from liveshift.runtime.control import kernels
from liveshift.runtime.control.kernels import GREETING, Kernels

LIMIT_S = 5.0
UNACKED = 24
"""Where tcp_info (linux/tcp.h) has tcpi_unacked. Of a socket that listens it is the number of
connections that wait to be accepted (net/ipv4/tcp.c, tcp_get_info)."""


def at(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def waiting(server: socket.socket) -> int:
    info = server.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int(struct.unpack_from("I", info, UNACKED)[0])


@asynccontextmanager
async def accepted(server: socket.socket) -> AsyncIterator[socket.socket]:
    server.setblocking(False)
    made, _ = await asyncio.get_running_loop().sock_accept(server)
    with made:
        yield made


def run(scene: Callable[..., Awaitable[None]], *more: object) -> None:
    async def closed() -> None:
        with contextlib.closing(Kernels()) as asked:
            await scene(asked, *more)
        await asyncio.sleep(0)  # transports are closed in the next round

    asyncio.run(closed())


def test_a_kernel_answers_whether_a_program_listens_or_not() -> None:
    async def scene(asked: Kernels) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = at(server)
            assert await asked.answers(address, LIMIT_S)
            assert await asked.answers(address, LIMIT_S)
        for _ in range(2):
            assert await asked.answers(address, LIMIT_S), "it ends or refuses the connection now"

    run(scene)


def test_a_kernel_that_drops_a_connection_does_not_answer() -> None:
    """As of a host that is not there. A kernel drops what a full queue has no room for."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):  # the queue has room for one, or for two
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        assert not asyncio.run(Kernels().answers(at(full), 0.2))


def test_a_program_that_is_stopped_may_be_asked_about_for_long() -> None:
    """It accepts nothing, and its queue must not become full: its kernel would look dead."""

    async def scene(asked: Kernels, server: socket.socket) -> None:
        for _ in range(3 * len(GREETING)):
            assert await asked.answers(at(server), LIMIT_S)
        assert 1 <= waiting(server) <= 3

    with socket.create_server(("127.0.0.1", 0), backlog=4) as server:
        run(scene, server)


def test_what_is_sent_is_the_beginning_of_a_greeting() -> None:
    async def scene(asked: Kernels, server: socket.socket) -> None:
        for _ in range(1 + len(GREETING)):
            assert await asked.answers(at(server), LIMIT_S)
        async with accepted(server) as made:
            assert made.recv(100) == GREETING

    with socket.create_server(("127.0.0.1", 0)) as server:
        run(scene, server)


def test_a_new_connection_is_made_if_the_program_ends_the_one_there_was() -> None:
    """An agent does so after some seconds without a handshake."""

    async def scene(asked: Kernels, server: socket.socket) -> None:
        for _ in range(3):
            assert await asked.answers(at(server), LIMIT_S)
            async with accepted(server):
                pass
            await asyncio.sleep(0.05)
        assert await asked.answers(at(server), LIMIT_S)
        assert waiting(server) == 1

    with socket.create_server(("127.0.0.1", 0)) as server:
        run(scene, server)


def test_a_byte_that_is_not_acknowledged_is_no_answer() -> None:
    """As after the host has lost its power. Here the receiver has no room for what comes before."""

    async def scene(asked: Kernels, server: socket.socket) -> None:
        assert await asked.answers(at(server), LIMIT_S)
        (known,) = asked._open.values()
        known._writer.write(bytes(1 << 24))
        began = asyncio.get_running_loop().time()
        assert not await asked.answers(at(server), 0.3)
        assert 0.25 < asyncio.get_running_loop().time() - began < 2.0
        assert not asked._open
        assert await asked.answers(at(server), LIMIT_S), "by a new connection"

    with socket.create_server(("127.0.0.1", 0)) as server:
        run(scene, server)


def test_two_questions_at_once_have_one_connection_in_the_end() -> None:
    async def scene(asked: Kernels, server: socket.socket) -> None:
        for _ in range(10):
            both = await asyncio.gather(*(asked.answers(at(server), LIMIT_S) for _ in range(2)))
            assert both == [True, True]
        assert len(asked._open) == 1
        assert waiting(server) == 2

    with socket.create_server(("127.0.0.1", 0)) as server:
        run(scene, server)


def test_a_connection_is_closed_when_nobody_asks_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "IDLE_S", 0.3)

    async def scene(asked: Kernels, server: socket.socket) -> None:
        for _ in range(3):
            assert await asked.answers(at(server), LIMIT_S)
            await asyncio.sleep(0.15)
        assert waiting(server) == 1
        await until_async(lambda: not asked._open)

    with socket.create_server(("127.0.0.1", 0)) as server:
        run(scene, server)
