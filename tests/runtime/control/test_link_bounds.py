# SPDX-License-Identifier: Apache-2.0
"""What one peer sends, asks or does not read costs it alone, and no more than so much memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import zmq
from link_harness import heartbeat, host_key, joined, raw_peer
from waits import until_async
from zmq.utils.monitor import recv_monitor_message

from liveshift.errors import LiveshiftError, Refused
from liveshift.runtime import messages
from liveshift.runtime.messages import Message


def test_a_frame_that_is_too_long_costs_its_sender_the_connection_only(key_directory: Path) -> None:
    async def scene() -> None:
        async with joined(key_directory) as ends:
            good = await ends.agent("h0")
            await good.connection.request(heartbeat(), 10)
            with raw_peer(ends, host_key(key_directory, "h1")) as peer:
                events = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                await peer.send(b"x" * ((8 << 20) + 1))
                await recv_monitor_message(events)
            await good.connection.request(heartbeat(), 10)
            with pytest.raises(LiveshiftError, match=r"to the orchestrator has \d+ bytes"):
                await good.connection.request(messages.Relay(0, b"x" * (8 << 20)), 5)

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_a_peer_that_asks_too_much_at_once_is_refused_and_another_is_served(
    key_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("liveshift.runtime.control.served.MOST_REQUESTS", 10)
    go = asyncio.Event()

    async def orchestrator(peer: str, _ask: Message) -> Message | None:
        if peer == "h1":
            await go.wait()
        return None

    async def scene() -> None:
        async with joined(key_directory, orchestrator) as ends:
            greedy, other = await ends.agent("h1"), await ends.agent("h0")
            asks = [
                asyncio.create_task(greedy.connection.request(heartbeat("h1"), 20))
                for _ in range(30)
            ]
            await asyncio.wait(asks, timeout=20, return_when="FIRST_COMPLETED")
            await other.connection.request(heartbeat(), 10)
            await until_async(lambda: sum(task.done() for task in asks) == 20)
            for task in asks:
                if task.done():
                    with pytest.raises(Refused, match="h1 has asked for too much at once"):
                        await task
            go.set()
            served = await asyncio.gather(*asks, return_exceptions=True)
            assert served.count(None) == 10
            assert await greedy.connection.request(heartbeat("h1"), 10) is None

    asyncio.run(scene())


def test_a_peer_that_takes_nothing_holds_up_nobody_and_gets_no_more_than_fits(
    key_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for long answers and reads none of them."""
    monkeypatch.setattr("liveshift.runtime.control.send_queue.WAITING_BYTES", 20 << 20)
    served: list[str] = []

    async def orchestrator(peer: str, _ask: Message) -> Message | None:
        served.append(peer)
        return messages.Output(b"x" * (4 << 20), 0, None) if peer == "h1" else None

    async def scene() -> None:
        async with joined(key_directory, orchestrator) as ends:
            good = await ends.agent("h0")
            with raw_peer(ends, host_key(key_directory, "h1")) as peer:
                peer.rcvhwm = 1
                for number in range(60):
                    await peer.send(
                        messages.encode_request(number, messages.CapsuleEnded("gpt/0", 1, 0))
                    )
                held: list[int] = [0]

                def all_served() -> bool:
                    weight = ends.switchboard._weights.get("h1")
                    frames = weight._frames if weight else []
                    held.append(sum(size for tracker, size in frames if not tracker.done))
                    return served.count("h1") == 60

                await until_async(all_served)
                await good.connection.request(heartbeat(), 5)
                assert all_served()
                assert 0 < max(held) <= 20 << 20

    asyncio.run(scene())
