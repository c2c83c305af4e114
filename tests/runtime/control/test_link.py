# SPDX-License-Identifier: Apache-2.0
"""Asks and answers between an orchestrator and agents over real ZeroMQ with CURVE on loopback."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import msgspec
import pytest
from link_harness import Handler, connected, heartbeat, joined, raw_peer
from waits import until_async

from liveshift.errors import LiveshiftError, NotFound, Refused, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.config.values import ORCHESTRATOR
from liveshift.runtime.control import keys
from liveshift.runtime.messages import VERSION, Message, decode


def test_either_side_asks_and_answers(key_directory: Path) -> None:
    async def orchestrator(peer: str, ask: Message) -> Message | None:
        assert isinstance(ask, messages.Register)
        book = messages.Book(peer, 1, "10.99.0.0/24", {"10.99.0.1": (peer, 3)})
        return messages.Books([book])

    async def agent(peer: str, ask: Message) -> Message | None:
        assert isinstance(ask, messages.ReadOutput)
        return messages.Output(b"\x00\xff" * 500_000, ask.offset + 1, None)

    async def scene() -> None:
        async with joined(key_directory, orchestrator) as ends:
            uplink = await ends.agent("h0", agent)
            facts = messages.HostFacts("6.1", "x86_64", "cpu", ["avx"], "4.2.1", "0.1")
            register = messages.Register("h0", facts, {"gpt/1": 2}, "digest")
            books = await uplink.connection.request(register, 10)
            assert isinstance(books, messages.Books)
            assert books.books[0].where == {"10.99.0.1": ("h0", 3)}
            answer = await ends.switchboard.request("h0", messages.ReadOutput("gpt/1", 41, 0), 10)
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
            await uplink.connection.request(heartbeat(), 10)
            with pytest.raises(NotFound, match="gpt/7 is not on h0") as caught:
                await ends.switchboard.request("h0", messages.End("gpt/7", 1), 10)
            assert caught.value.hint == "look elsewhere"
            with pytest.raises(LiveshiftError, match="ZeroDivisionError: a slip"):
                await ends.switchboard.request("h0", messages.End("gpt/8", 1), 10)
            with pytest.raises(Unreachable, match="h1 has not reported"):
                await ends.switchboard.request("h1", messages.End("gpt/8", 1), 10)

    asyncio.run(scene())


def test_many_asks_at_once_each_get_their_own_answer(key_directory: Path) -> None:
    async def agent(_peer: str, ask: Message) -> Message | None:
        assert isinstance(ask, messages.ReadOutput)
        await asyncio.sleep(0.05 if ask.offset % 2 else 0)  # answers overtake one another
        return messages.Output(b"", ask.offset, None)

    async def scene() -> None:
        async with joined(key_directory) as ends:
            uplink = await ends.agent("h0", agent)
            await uplink.connection.request(heartbeat(), 10)
            asks = [messages.ReadOutput("gpt/0", n, 0) for n in range(200)]
            answers = await asyncio.gather(*(ends.switchboard.request("h0", a, 20) for a in asks))
            assert [a.next for a in answers if isinstance(a, messages.Output)] == list(range(200))

    asyncio.run(scene())


def test_a_silent_peer_is_unreachable_after_the_deadline_and_a_late_answer_harms_nobody(
    key_directory: Path,
) -> None:
    asked: list[Message] = []
    go = asyncio.Event()

    async def agent(_peer: str, ask: Message) -> Message | None:
        asked.append(ask)
        name = f"answer {len(asked)}"
        await go.wait()
        return messages.Named(name)

    async def scene() -> None:
        async with joined(key_directory) as ends:
            uplink = await ends.agent("h0", agent)
            await uplink.connection.request(heartbeat(), 10)
            with pytest.raises(
                Unreachable, match=r"h0 did not answer the request to end a capsule within 0.1 s"
            ):
                await ends.switchboard.request("h0", messages.End("gpt/1", 1), 0.1)
            request = ends.switchboard.request("h0", messages.End("gpt/1", 1), 30)
            second = asyncio.create_task(request)
            await until_async(lambda: len(asked) == 2)
            go.set()  # the late answer comes while the second one is waited for
            assert await second == messages.Named("answer 2")

    asyncio.run(scene())


def test_an_agent_started_anew_takes_its_place_over(key_directory: Path) -> None:
    def named(name: str) -> Handler:
        async def agent(_peer: str, _ask: Message) -> Message | None:
            return messages.Named(name)

        return agent

    async def scene() -> None:
        async with joined(key_directory) as ends:
            first = await ends.agent("h0", named("first"))
            await first.connection.request(heartbeat(), 10)
            await ends.stop(first)
            second = await ends.agent("h0", named("second"))
            await second.connection.request(heartbeat(), 10)
            answer = await ends.switchboard.request("h0", messages.End("gpt/1", 1), 10)
            assert answer == messages.Named("second")

    asyncio.run(scene())


def test_an_unknown_key_does_not_get_past_the_handshake(
    key_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = tmp_path / "stranger"
    keys.init(stranger, ["h0"])
    name = ORCHESTRATOR
    shutil.copy(keys.public_path(key_directory, name), keys.public_path(stranger, name))
    heard: list[str] = []

    async def orchestrator(peer: str, _ask: Message) -> Message | None:
        heard.append(peer)
        return None

    async def scene() -> None:
        async with joined(key_directory, orchestrator) as ends:
            uplink = await ends.agent("h0", keys=stranger)
            with pytest.raises(Unreachable):
                await uplink.connection.request(heartbeat(), 1)
            assert not heard
            assert not ends.switchboard.connections
            known = await ends.agent("h1")
            await known.connection.request(heartbeat("h1"), 10)

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
            await real.connection.request(heartbeat(), 10)
            with raw_peer(ends, keys.secret_path(key_directory, "h1"), identity=b"h0") as fake:
                await fake.send(messages.encode_request(1, heartbeat("h0")))
                assert messages.decode(await fake.recv()).id == 1  # its own ask is served, as h1's
                answer = await ends.switchboard.request("h0", messages.End("gpt/1", 1), 5)
                assert answer == messages.Named("the real h0")
                assert heard == ["h0", "h1"]
                assert not await fake.poll(0), "it hears nothing of h0's"

    asyncio.run(scene())


def test_a_frame_that_is_not_understood_is_dropped(
    key_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        async with joined(key_directory) as ends:
            with raw_peer(ends, keys.secret_path(key_directory, "h0")) as peer:
                for raw in (b"", b"\xc1", b"\x93\x01\x02\x03", messages.encode_answer(99, None)):
                    await peer.send(raw)
                await peer.send_multipart([b"two", b"parts"])
                await peer.send(messages.encode_request(7, heartbeat()))
                refused = messages.decode(await peer.recv())
                assert refused.error is not None, "of the first one, of the others nothing is said"
                assert messages.decode(await peer.recv()).id == 7

    asyncio.run(scene())
    assert caplog.text.count("a message that is not understood") == 3
    assert "a message of 3 parts" in caplog.text


def test_a_peer_of_another_version_hears_so_once_for_each_connection() -> None:
    """So an agent of another version has the reason in its own log, and no refusal is refused."""
    sent: list[bytes] = []
    other = msgspec.msgpack.encode({"v": VERSION - 1, "id": 7, "body": {"t": "Here", "boot_id": 1}})

    async def run() -> None:
        line = connected(sent.append)
        line.receive(other)
        line.receive(other)
        assert len(sent) == 1
        line.connected(sent.append)
        line.receive(other)

    asyncio.run(run())
    assert len(sent) == 2
    for raw in sent:
        error = decode(raw).error
        assert error is not None
        assert f"version {VERSION - 1}, this is version {VERSION}" in error[1]


def test_an_unknown_kind_of_error_is_still_an_error() -> None:
    async def scene() -> None:
        sent: list[bytes] = []
        line = connected(sent.append)
        asked = asyncio.create_task(line.request(messages.End("gpt/1", 1), 60))
        await until_async(lambda: sent)
        number = messages.decode(sent[0]).id
        line.receive(messages.encode_error(number, ("FromTheFuture", "no way", "wait")))
        with pytest.raises(LiveshiftError, match="no way") as caught:
            await asked
        assert type(caught.value) is LiveshiftError
        assert not isinstance(caught.value, Refused)

    asyncio.run(scene())
