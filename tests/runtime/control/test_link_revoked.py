# SPDX-License-Identifier: Apache-2.0
"""Keys of hosts that are revoked: who has none any more is out, and the others do not notice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import zmq
from link_harness import heartbeat, host_key, joined, raw_peer
from waits import until_async
from zmq.utils.monitor import recv_monitor_message

from liveshift.errors import Unreachable
from liveshift.runtime import messages
from liveshift.runtime.control import keys, link
from liveshift.runtime.messages import Message


def test_a_revoked_host_loses_its_connection_and_the_others_do_not_notice(
    key_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[str] = []

    async def orchestrator(peer: str, _ask: Message) -> Message | None:
        heard.append(peer)
        return None

    async def scene() -> None:
        async with joined(key_directory, orchestrator) as ends:
            bad, good = await ends.agent("h1"), await ends.agent("h0")
            await bad.connection.request(heartbeat("h1"), 10)
            await good.connection.request(heartbeat(), 10)
            keys.revoke(key_directory, "h1")
            heard.clear()
            with pytest.raises(Unreachable):
                await bad.connection.request(heartbeat("h1"), 1)
            # The agent says so.
            await until_async(lambda: "turned away the key of h1" in caplog.text)
            for _ in range(5):
                await good.connection.request(heartbeat(), 10)
            with pytest.raises(Unreachable):
                await bad.connection.request(heartbeat("h1"), 0.5)
            assert set(heard) == {"h0"}
            with pytest.raises(Unreachable):
                await ends.switchboard.request("h1", messages.End("gpt/0", 1), 0.5)

    asyncio.run(scene())
    assert "the keys of h1 are gone: all connect again" in caplog.text


def test_a_peer_that_only_listens_loses_its_connection_too(key_directory: Path) -> None:
    """It has shown its key and never said a word: nobody knows its connection by name."""

    async def scene() -> None:
        async with joined(key_directory) as ends:
            with raw_peer(ends, host_key(key_directory, "h1")) as peer:
                events = peer.get_monitor_socket()
                await until_event(events, zmq.EVENT_HANDSHAKE_SUCCEEDED)
                keys.revoke(key_directory, "h1")
                await until_event(events, zmq.EVENT_DISCONNECTED)
                await until_event(events, zmq.EVENT_HANDSHAKE_FAILED_AUTH)

    async def until_event(events: Any, wanted: int) -> None:
        while (await recv_monitor_message(events))["event"] != wanted:
            pass

    asyncio.run(asyncio.wait_for(scene(), 20))


def test_a_host_with_a_new_key_comes_back(key_directory: Path) -> None:
    async def scene() -> None:
        async with joined(key_directory) as ends:
            old = await ends.agent("h1")
            await old.connection.request(heartbeat("h1"), 10)
            keys.revoke(key_directory, "h1")
            keys.add_host(key_directory, "h1")
            with pytest.raises(Unreachable):
                await old.connection.request(heartbeat("h1"), 1.5)
            new = await ends.agent("h1")
            await new.connection.request(heartbeat("h1"), 10)

    asyncio.run(scene())


def test_an_agent_that_was_turned_away_comes_again_by_itself(
    key_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key reaches the orchestrator later than the agent does."""
    monkeypatch.setattr(link, "TURNED_AWAY_S", 0.1)
    half = keys.public_path(key_directory, "h1")
    content = half.read_bytes()

    async def scene() -> None:
        async with joined(key_directory) as ends:
            uplink = await ends.agent("h1")
            half.unlink()
            ends.switchboard._known.holders()
            with pytest.raises(Unreachable):
                await uplink.connection.request(heartbeat("h1"), 0.5)
            half.write_bytes(content)
            for _ in range(50):
                try:
                    await uplink.connection.request(heartbeat("h1"), 0.5)
                    return
                except Unreachable:
                    continue
            raise AssertionError("it did not come back")

    asyncio.run(scene())
