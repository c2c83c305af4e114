# SPDX-License-Identifier: Apache-2.0
"""Asks and answers between an orchestrator and agents over real ZeroMQ with CURVE on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from liveshift.errors import LiveshiftError, NotFound, Refused, Unreachable
from liveshift.runtime import keys, messages
from liveshift.runtime.link import Line, Switchboard, Uplink
from liveshift.runtime.messages import Message

Handler = Callable[[str, Message], Awaitable[Message | None]]


@pytest.fixture
def key_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "keys"
    keys.init(directory, ["h0", "h1"])
    return directory


def free_address() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


async def until(true: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


async def nothing(_peer: str, _ask: Message) -> Message | None:
    return None


def beat(host: str = "h0") -> messages.Beat:
    return messages.Beat(host, 1 << 30, [])


class Ends:
    """The orchestrator's end, and agents that can be added and taken away."""

    def __init__(self, key_directory: Path, handler: Handler) -> None:
        self.keys = key_directory
        self.address = free_address()
        self.switchboard = Switchboard(self.address, key_directory, handler)
        self._tasks: dict[object, asyncio.Task[None]] = {}

    async def start(self) -> None:
        self._tasks[self.switchboard] = asyncio.create_task(self.switchboard.serve())

    async def agent(
        self, host: str, handler: Handler = nothing, keys: Path | None = None
    ) -> Uplink:
        uplink = Uplink(host, self.address, keys or self.keys, handler)
        self._tasks[uplink] = asyncio.create_task(uplink.serve())
        return uplink

    async def stop(self, end: object) -> None:
        task = self._tasks.pop(end)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def close(self) -> None:
        for end in list(self._tasks):
            await self.stop(end)


@asynccontextmanager
async def joined(key_directory: Path, handler: Handler = nothing) -> AsyncIterator[Ends]:
    ends = Ends(key_directory, handler)
    await ends.start()
    try:
        yield ends
    finally:
        await ends.close()


def test_either_side_asks_and_answers(key_directory: Path) -> None:
    async def orchestrator(peer: str, ask: Message) -> Message | None:
        assert isinstance(ask, messages.Hello)
        book = messages.Book(peer, 1, "10.99.0.0/24", {"10.99.0.1": (peer, 3)})
        return messages.Books([book])

    async def agent(peer: str, ask: Message) -> Message | None:
        assert isinstance(ask, messages.ReadOutput)
        return messages.Output(b"\x00\xff" * 500_000, ask.offset + 1, None)

    async def scene() -> None:
        async with joined(key_directory, orchestrator) as ends:
            uplink = await ends.agent("h0", agent)
            facts = messages.HostFacts("6.1", "x86_64", "cpu", ["avx"], "4.2.1", "0.1")
            hello = messages.Hello("h0", facts, {"gpt/1": 2}, "digest")
            books = await uplink.line.ask(hello, 10)
            assert isinstance(books, messages.Books)
            assert books.books[0].where == {"10.99.0.1": ("h0", 3)}
            answer = await ends.switchboard.ask("h0", messages.ReadOutput("gpt/1", 41, 0), 10)
            assert answer == messages.Output(b"\x00\xff" * 500_000, 42, None)

    asyncio.run(scene())


def test_errors_cross_with_their_kind_and_hint(key_directory: Path) -> None:
    async def agent(_peer: str, ask: Message) -> Message | None:
        assert isinstance(ask, messages.End)
        if ask.capsule == "gpt/7":
            raise NotFound("gpt/7 is not on h0", hint="look elsewhere")
        raise ZeroDivisionError("a slip")

    async def scene() -> None:
        async with joined(key_directory) as ends:
            uplink = await ends.agent("h0", agent)
            await uplink.line.ask(beat(), 10)
            with pytest.raises(NotFound, match="gpt/7 is not on h0") as caught:
                await ends.switchboard.ask("h0", messages.End("gpt/7"), 10)
            assert caught.value.hint == "look elsewhere"
            with pytest.raises(LiveshiftError, match="ZeroDivisionError: a slip"):
                await ends.switchboard.ask("h0", messages.End("gpt/8"), 10)
            with pytest.raises(Unreachable, match="h1 has not reported"):
                await ends.switchboard.ask("h1", messages.End("gpt/8"), 10)

    asyncio.run(scene())


def test_many_asks_at_once_each_get_their_own_answer(key_directory: Path) -> None:
    async def agent(_peer: str, ask: Message) -> Message | None:
        assert isinstance(ask, messages.ReadOutput)
        await asyncio.sleep(0.05 if ask.offset % 2 else 0)  # answers overtake one another
        return messages.Output(b"", ask.offset, None)

    async def scene() -> None:
        async with joined(key_directory) as ends:
            uplink = await ends.agent("h0", agent)
            await uplink.line.ask(beat(), 10)
            asks = [messages.ReadOutput("gpt/0", n, 0) for n in range(200)]
            answers = await asyncio.gather(*(ends.switchboard.ask("h0", a, 20) for a in asks))
            assert [a.next for a in answers if isinstance(a, messages.Output)] == list(range(200))

    asyncio.run(scene())


def test_a_silent_peer_is_unreachable_after_the_deadline_and_a_late_answer_harms_nobody(
    key_directory: Path,
) -> None:
    async def agent(_peer: str, ask: Message) -> Message | None:
        await asyncio.sleep(0.4)
        return messages.Named("late")

    async def scene() -> None:
        async with joined(key_directory) as ends:
            uplink = await ends.agent("h0", agent)
            await uplink.line.ask(beat(), 10)
            with pytest.raises(Unreachable, match=r"h0 did not answer End within 0.1 s"):
                await ends.switchboard.ask("h0", messages.End("gpt/1"), 0.1)
            await asyncio.sleep(0.5)
            answer = await ends.switchboard.ask("h0", messages.End("gpt/1"), 10)
            assert answer == messages.Named("late")

    asyncio.run(scene())


def test_an_agent_started_anew_takes_its_place_over(key_directory: Path) -> None:
    def named(name: str) -> Handler:
        async def agent(_peer: str, _ask: Message) -> Message | None:
            return messages.Named(name)

        return agent

    async def scene() -> None:
        async with joined(key_directory) as ends:
            first = await ends.agent("h0", named("first"))
            await first.line.ask(beat(), 10)
            await ends.stop(first)
            second = await ends.agent("h0", named("second"))
            await second.line.ask(beat(), 10)
            answer = await ends.switchboard.ask("h0", messages.End("gpt/1"), 10)
            assert answer == messages.Named("second")

    asyncio.run(scene())


def test_an_unknown_key_does_not_get_past_the_handshake(
    key_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = tmp_path / "stranger"
    keys.init(stranger, ["h0"])
    name = keys.ORCHESTRATOR
    shutil.copy(keys.public_path(key_directory, name), keys.public_path(stranger, name))
    heard: list[str] = []

    async def orchestrator(peer: str, _ask: Message) -> Message | None:
        heard.append(peer)
        return None

    async def scene() -> None:
        async with joined(key_directory, orchestrator) as ends:
            uplink = await ends.agent("h0", keys=stranger)
            with pytest.raises(Unreachable):
                await uplink.line.ask(beat(), 1)
            assert not heard
            assert not ends.switchboard.lines
            known = await ends.agent("h1")
            await known.line.ask(beat("h1"), 10)

    asyncio.run(scene())
    assert heard == ["h1"]
    assert "turned away a peer with an unknown key" in caplog.text


def test_a_host_that_speaks_under_another_name_is_not_heard_and_hears_nothing(
    key_directory: Path,
) -> None:
    """h1 calls itself h0: neither may it speak as h0, nor be told what h0 is to do."""
    heard: list[str] = []

    async def orchestrator(peer: str, _ask: Message) -> Message | None:
        heard.append(peer)
        return None

    async def agent(_peer: str, _ask: Message) -> Message | None:
        return messages.Named("the real h0")

    async def scene() -> None:
        async with joined(key_directory, orchestrator) as ends:
            real = await ends.agent("h0", agent)
            await real.line.ask(beat(), 10)
            context = zmq.asyncio.Context()
            fake = context.socket(zmq.DEALER)
            own = keys.load_private(key_directory, "h1")
            fake.identity = b"h0"
            fake.curve_serverkey = keys.public_keys(key_directory)[keys.ORCHESTRATOR]
            fake.curve_secretkey, fake.curve_publickey = own.secret, own.public
            fake.connect(f"tcp://{ends.address}")
            await fake.send(messages.encode_ask(1, beat("h0")))
            await asyncio.sleep(0.3)
            answer = await ends.switchboard.ask("h0", messages.End("gpt/1"), 5)
            assert answer == messages.Named("the real h0")
            assert set(heard) <= {"h0", "h1"}
            assert heard.count("h0") == 1
            while await fake.poll(0):  # at most the answer to its own ask, never h0's
                assert messages.decode(await fake.recv()).body is None
            context.destroy(0)

    asyncio.run(scene())


def test_a_frame_that_is_not_understood_is_dropped(
    key_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        async with joined(key_directory) as ends:
            uplink = await ends.agent("h0")
            for raw in (b"", b"\xc1", b"\x93\x01\x02\x03", messages.encode_answer(99, None)):
                await uplink._socket.send(raw)
            assert await uplink.line.ask(beat(), 10) is None

    asyncio.run(scene())
    assert caplog.text.count("a message that is not understood") == 3


def test_what_a_lost_peer_was_asked_fails_at_once() -> None:
    async def scene() -> None:
        line = Line("h0", lambda _raw: None, nothing, life=1, largest=1000)
        asked = asyncio.create_task(line.ask(messages.End("gpt/1"), 60))
        await asyncio.sleep(0)
        line.drop()
        with pytest.raises(Unreachable, match="lost contact to h0"):
            await asked
        line.take(messages.encode_error(1, ("Refused", "late", None)))  # nobody waits any more

    asyncio.run(scene())


def test_an_unknown_kind_of_error_is_still_an_error() -> None:
    async def scene() -> None:
        sent: list[bytes] = []
        line = Line("h0", sent.append, nothing, life=1, largest=1000)
        asked = asyncio.create_task(line.ask(messages.End("gpt/1"), 60))
        await until(lambda: sent)
        number = messages.decode(sent[0]).id
        line.take(messages.encode_error(number, ("FromTheFuture", "no way", "wait")))
        with pytest.raises(LiveshiftError, match="no way") as caught:
            await asked
        assert type(caught.value) is LiveshiftError
        assert not isinstance(caught.value, Refused)

    asyncio.run(scene())
