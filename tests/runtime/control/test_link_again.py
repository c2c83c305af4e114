# SPDX-License-Identifier: Apache-2.0
"""Connections that break, frames that come twice: nothing is lost, nothing is served twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from link_harness import Handler, heartbeat, host_key, joined, raw_peer
from waits import until_async

from liveshift.errors import Unreachable
from liveshift.runtime import messages
from liveshift.runtime.control import keys, link
from liveshift.runtime.messages import Message

# ---- twice ----


def test_the_same_frame_twice_is_served_once_and_answered_twice(key_directory: Path) -> None:
    served: list[Message] = []

    async def orchestrator(_peer: str, ask: Message) -> Message | None:
        served.append(ask)
        return messages.Named(f"the {len(served)}.")

    async def scene() -> None:
        async with joined(key_directory, orchestrator) as ends:
            with raw_peer(ends, host_key(key_directory)) as peer:
                frame = messages.encode_request(41, messages.CapsuleEnded("gpt/0", 1, 0))
                answers = []
                for _ in range(3):
                    await peer.send(frame)
                    answers.append(await peer.recv())
                assert len(set(answers)) == 1
                assert messages.decode(answers[0]).answer == messages.Named("the 1.")
                await peer.send(messages.encode_request(42, messages.CapsuleEnded("gpt/0", 1, 0)))
                assert messages.decode(await peer.recv()).answer == messages.Named("the 2.")
            with raw_peer(ends, host_key(key_directory)) as again:  # and over another connection
                await again.send(frame)
                assert await again.recv() == answers[0]
        assert len(served) == 2

    asyncio.run(scene())


def test_a_frame_that_comes_again_while_it_is_served_is_answered_where_it_came_from_last(
    key_directory: Path,
) -> None:
    served: list[Message] = []
    go = asyncio.Event()

    async def orchestrator(_peer: str, ask: Message) -> Message | None:
        served.append(ask)
        await go.wait()
        return None

    async def scene() -> None:
        async with joined(key_directory, orchestrator) as ends:
            frame = messages.encode_request(41, messages.CapsuleEnded("gpt/0", 1, 0))
            with raw_peer(ends, host_key(key_directory)) as peer:
                await peer.send(frame)
                await until_async(lambda: served)
            with raw_peer(ends, host_key(key_directory)) as again:
                await again.send(frame)
                await again.send(messages.encode_request(42, messages.Here(1)))
                assert messages.decode(await again.recv()).id == 42  # so 41 has come before
                go.set()
                assert messages.decode(await again.recv()).id == 41
        assert len(served) == 1

    asyncio.run(scene())


def test_answers_that_nobody_waits_for_and_old_ones_change_nothing(key_directory: Path) -> None:
    """Replayed answers: of an ask that is over, of one that never was."""

    async def scene() -> None:
        async with joined(key_directory) as ends:
            with raw_peer(ends, host_key(key_directory)) as peer:
                await peer.send(messages.encode_request(1, heartbeat()))
                await peer.recv()
                asked = asyncio.create_task(
                    ends.switchboard.request("h0", messages.End("a/0", 1), 10)
                )
                number = messages.decode(await peer.recv()).id
                await peer.send(messages.encode_answer(number, messages.Named("first")))
                assert await asked == messages.Named("first")
                asked = asyncio.create_task(
                    ends.switchboard.request("h0", messages.End("a/0", 1), 10)
                )
                second = messages.decode(await peer.recv()).id
                for late in (number, number - 1, second + 1):
                    await peer.send(messages.encode_answer(late, messages.Named("replayed")))
                await peer.send(messages.encode_answer(second, messages.Named("second")))
                assert await asked == messages.Named("second")

    asyncio.run(scene())


# ---- connections that break ----


async def rebound(ends: Any, key_directory: Path) -> None:
    """All connections break: the key of h1, which nobody here uses, is revoked."""
    before = set(ends.switchboard._routes.items())
    keys.revoke(key_directory, "h1")
    routes = ends.switchboard._routes
    await until_async(lambda: routes and before.isdisjoint(routes.items()))


def test_asks_under_way_either_way_survive_a_rebind(
    key_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "WATCH_S", 0.05)
    served: list[str] = []
    go = asyncio.Event()

    async def orchestrator(_peer: str, ask: Message) -> Message | None:
        if isinstance(ask, messages.CapsuleEnded):
            served.append("orchestrator")
            await go.wait()
            return messages.Named("from the orchestrator")
        return None

    async def agent(_peer: str, _ask: Message) -> Message | None:
        served.append("agent")
        await go.wait()
        return messages.Named("from the agent")

    async def scene() -> None:
        async with joined(key_directory, orchestrator) as ends:
            uplink = await ends.agent("h0", agent)
            await uplink.connection.request(heartbeat(), 10)
            up = asyncio.create_task(
                uplink.connection.request(messages.CapsuleEnded("gpt/0", 1, 0), 20)
            )
            down = asyncio.create_task(ends.switchboard.request("h0", messages.End("gpt/0", 1), 20))
            await until_async(lambda: len(served) == 2)
            await rebound(ends, key_directory)
            go.set()
            assert await up == messages.Named("from the orchestrator")
            assert await down == messages.Named("from the agent")
            assert sorted(served) == ["agent", "orchestrator"]

    asyncio.run(scene())


def test_an_answer_that_was_lost_with_its_connection_is_sent_again(
    key_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both handlers answer while nobody is connected."""
    monkeypatch.setattr(link, "WATCH_S", 0.05)
    served: list[str] = []
    go = asyncio.Event()

    async def answer(peer: str, ask: Message) -> Message | None:
        if isinstance(ask, messages.Heartbeat):
            return None
        served.append(peer)
        await go.wait()
        return messages.Named(peer)

    async def scene() -> None:
        async with joined(key_directory, answer) as ends:
            uplink = await ends.agent("h0", answer)
            await uplink.connection.request(heartbeat(), 10)
            up = asyncio.create_task(
                uplink.connection.request(messages.CapsuleEnded("gpt/0", 1, 0), 20)
            )
            down = asyncio.create_task(ends.switchboard.request("h0", messages.End("gpt/0", 1), 20))
            await until_async(lambda: len(served) == 2)
            uplink.connection.disconnected()
            ends.switchboard.connections["h0"].disconnected()
            for line in (  # where answers go is gone
                uplink.connection,
                ends.switchboard.connections["h0"],
            ):
                for asked in line._served._under_way.values():
                    asked.reply = line._transmit
            go.set()
            await until_async(lambda: not uplink.connection._served._under_way)
            await until_async(lambda: not ends.switchboard.connections["h0"]._served._under_way)
            assert not up.done()
            assert not down.done()
            await rebound(ends, key_directory)
            assert (await up, await down) == (
                messages.Named("h0"),
                messages.Named(uplink.connection.peer),
            )
            assert len(served) == 2

    asyncio.run(scene())


def test_what_an_earlier_life_was_asked_fails_and_is_not_asked_of_the_next(
    key_directory: Path,
) -> None:
    """An orchestrator that was restarted does not get the asks of the one before."""
    heard: list[str] = []

    def named(name: str) -> Handler:
        async def orchestrator(_peer: str, ask: Message) -> Message | None:
            heard.append(f"{name} {type(ask).__name__}")
            if isinstance(ask, messages.CapsuleEnded):
                await asyncio.sleep(60)
            return messages.Named(name)

        return orchestrator

    async def scene() -> None:
        async with joined(key_directory, named("first")) as ends:
            uplink = await ends.agent("h0")
            await uplink.connection.request(heartbeat(), 10)
            boot_id = uplink.connection.peer_boot_id
            asked = asyncio.create_task(
                uplink.connection.request(messages.CapsuleEnded("gpt/0", 1, 0), 60)
            )
            await until_async(lambda: "first CapsuleEnded" in heard)
            await ends.stop(ends.switchboard)
            await until_async(lambda: uplink.connection._send is None)  # it has noticed
            # This one was sent to nobody yet.
            waiting = asyncio.create_task(uplink.connection.request(heartbeat(), 60))
            await asyncio.sleep(0)
            await ends.start(named("second"))
            with pytest.raises(
                Unreachable,
                match="lost contact to the orchestrator during the request to take note",
            ):
                await asked
            assert await waiting == messages.Named("second")
            assert uplink.connection.peer_boot_id != boot_id
            assert heard == ["first Heartbeat", "first CapsuleEnded", "second Heartbeat"]

    asyncio.run(scene())


def test_what_an_earlier_agent_was_asked_fails_when_the_next_one_comes(key_directory: Path) -> None:
    heard: list[str] = []

    def named(name: str) -> Handler:
        async def agent(_peer: str, ask: Message) -> Message | None:
            heard.append(f"{name} {type(ask).__name__}")
            await asyncio.sleep(60)
            return None

        return agent

    async def scene() -> None:
        async with joined(key_directory) as ends:
            first = await ends.agent("h0", named("first"))
            await first.connection.request(heartbeat(), 10)
            asked = asyncio.create_task(
                ends.switchboard.request("h0", messages.End("gpt/0", 1), 60)
            )
            await until_async(lambda: heard)
            await ends.stop(first)
            second = await ends.agent("h0", named("second"))
            await second.connection.request(heartbeat(), 10)
            with pytest.raises(
                Unreachable, match="lost contact to h0 during the request to end a c"
            ):
                await asked
            assert heard == ["first End"]

    asyncio.run(scene())


def test_a_peer_that_stays_away_is_not_waited_for_to_the_deadline(
    key_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("liveshift.runtime.control.connection.RECONNECT_S", 0.2)

    async def scene() -> None:
        async with joined(key_directory) as ends:
            uplink = await ends.agent("h0")
            await uplink.connection.request(heartbeat(), 10)
            await ends.stop(uplink)

            async def gone() -> bool:
                try:
                    await ends.switchboard.request("h0", messages.End("gpt/0", 1), 0.5)
                except Unreachable as error:
                    return "is not connected" in str(error)
                return False

            while not await gone():
                pass  # the closing of a connection takes a moment to be seen

    asyncio.run(asyncio.wait_for(scene(), 20))


def test_a_late_frame_of_a_broken_connection_costs_no_ask(key_directory: Path) -> None:
    """The route goes back to the old connection for a moment; the next frame brings it here."""

    async def agent(_peer: str, _ask: Message) -> Message | None:
        return messages.Named("the agent")

    async def scene() -> None:
        async with joined(key_directory) as ends:
            uplink = await ends.agent("h0", agent)
            await uplink.connection.request(heartbeat(), 10)
            with raw_peer(ends, host_key(key_directory)) as old:
                await old.send(messages.encode_request(1, heartbeat()))
                await old.recv()
            routes = ends.switchboard._routes
            stale = routes["h0"]

            async def gone() -> bool:
                asked = asyncio.create_task(
                    ends.switchboard.request("h0", messages.End("a/0", 1), 10)
                )
                await asyncio.sleep(0)
                (entry,) = ends.switchboard.connections["h0"]._pending.values()
                if entry.sent:
                    asked.cancel()
                    await asyncio.gather(asked, return_exceptions=True)
                    return False
                # No Here: it has been connected all the time.
                await uplink.connection.request(heartbeat(), 10)
                assert await asked == messages.Named("the agent")
                return True

            while not await gone():
                assert routes["h0"] == stale

    asyncio.run(asyncio.wait_for(scene(), 20))
