# SPDX-License-Identifier: Apache-2.0
"""Who cannot be reached is named with its address, the cause and what to look at."""

from __future__ import annotations

import asyncio
import shutil
import socket
from pathlib import Path

import pytest
import zmq
from link_harness import Ends, connected, free_address, heartbeat, joined, nothing
from waits import until_async

from liveshift.errors import Unreachable
from liveshift.runtime import messages
from liveshift.runtime.control import connection, keys, reach
from liveshift.runtime.control.link import Uplink
from liveshift.runtime.messages.base import Answer, Message
from liveshift.runtime.messages.request_text import TEXTS


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RECONNECT_S", 0.3)


async def said(uplink: Uplink) -> Unreachable:
    """What an ask of an agent comes to whose orchestrator is not connected."""
    serving = asyncio.create_task(uplink.serve())
    try:
        with pytest.raises(Unreachable) as caught:
            await uplink.connection.request(heartbeat(), 10)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    return caught.value


def test_nobody_listens(key_directory: Path) -> None:
    address = free_address()

    async def scene() -> Unreachable:
        return await said(Uplink("h0", address, key_directory, nothing))

    error = asyncio.run(scene())
    assert str(error) == (
        f"the orchestrator is not connected: {address} refuses connections: nothing listens there"
    )
    assert "systemctl status liveshift-orchestrator" in str(error.hint)


def test_another_program_or_another_key(key_directory: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    keys.init(other, ["h0"])

    async def scene() -> Unreachable:
        ends = Ends(other, nothing)
        await ends.start()
        try:
            return await said(Uplink("h0", ends.address, key_directory, nothing))
        finally:
            await ends.close()

    error = asyncio.run(scene())
    assert "the handshake with it does not come about" in str(error)
    assert "compare public/orchestrator.pub" in str(error.hint)


def test_a_key_that_is_turned_away(key_directory: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(key_directory, mine)
    keys.revoke(key_directory, "h0")

    async def scene() -> Unreachable:
        ends = Ends(key_directory, nothing)
        await ends.start()
        try:
            uplink = Uplink("h0", ends.address, mine, nothing)
            watch = asyncio.create_task(uplink._watch())
            await until_async(lambda: uplink._turned_away)
            watch.cancel()
            return await said(uplink)
        finally:
            await ends.close()

    error = asyncio.run(scene())
    assert str(error).endswith("turned away the key of h0: unknown there, or revoked")
    assert "liveshift keys list" in str(error.hint)


def test_no_way_there(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_route(*_: object) -> None:
        raise OSError(113, "No route to host")

    monkeypatch.setattr(asyncio, "open_connection", no_route)
    cause, look = asyncio.run(reach.why_not("10.1.2.3:7400"))
    assert cause == "10.1.2.3:7400 cannot be reached: No route to host"
    assert "cluster.orchestrator" in look


def test_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    async def dropped(*_: object) -> None:
        await asyncio.sleep(10)

    monkeypatch.setattr(asyncio, "open_connection", dropped)
    monkeypatch.setattr(reach, "PROBE_S", 0.05)
    cause, look = asyncio.run(reach.why_not("10.1.2.3:7400"))
    assert cause == "10.1.2.3:7400 does not answer within 0.05 s"
    assert "firewall" in look


# ---- the other way: an orchestrator and a host's agent ----


async def asked_of_gone_agent(key_directory: Path, agents: dict[str, str]) -> Unreachable:
    """What an ask of the orchestrator comes to whose agent has gone."""
    async with joined(key_directory, agents=agents) as ends:
        uplink = await ends.agent("h0")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connection, "RECONNECT_S", 10.0)
            await uplink.connection.request(heartbeat(), 10)
        await ends.stop(uplink)
        while True:  # the closing of a connection takes a moment to be seen
            with pytest.raises(Unreachable) as caught:
                await ends.switchboard.request("h0", messages.Freeze("m1", "gpt/0", 1.0), 5)
            if "is not connected" in str(caught.value):
                return caught.value


def test_an_agent_that_does_not_run(key_directory: Path) -> None:
    address = free_address()
    error = asyncio.run(asked_of_gone_agent(key_directory, {"h0": address}))
    assert str(error) == (
        f"h0 is not connected: {address} refuses connections: nothing listens there"
    )
    assert error.hint == "on h0: `systemctl status liveshift-agent`; its log says why"


def test_an_agent_that_does_not_find_the_orchestrator(key_directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = "{}:{}".format(*listening.getsockname())
        error = asyncio.run(asked_of_gone_agent(key_directory, {"h0": address}))
    assert str(error).endswith(f"its agent listens on {address} and has no connection to here")
    assert "another address in its cluster.orchestrator, or a key" in str(error.hint)


def test_an_agent_that_takes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_raw: bytes) -> None:
        raise zmq.ZMQError(zmq.EAGAIN)

    async def scene() -> None:
        there = connected(full)
        with pytest.raises(Unreachable, match="h0 is connected, but has not taken the last") as no:
            await there.request(messages.Forget("gpt"), 5)
        assert no.value.hint == "its log says more"

    asyncio.run(scene())


def test_every_request_has_words() -> None:
    def below(kind: type[Message]) -> set[type[Message]]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    asks = below(Message) - below(Answer) - {Message}
    assert {kind.__name__ for kind in asks if kind.__module__.startswith("liveshift.")} == set(
        TEXTS
    )
    assert not [words for words in TEXTS.values() if any(letter.isupper() for letter in words[:1])]
