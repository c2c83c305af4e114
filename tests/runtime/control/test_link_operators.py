# SPDX-License-Identifier: Apache-2.0
"""Operators at the link: known by name and role, served where there is a desk, and let go of."""

from __future__ import annotations

import asyncio
from pathlib import Path

import zmq
from link_harness import heartbeat, joined, nothing, raw_peer
from zmq.utils.monitor import recv_monitor_message

from liveshift.runtime import messages
from liveshift.runtime.config.access import Role
from liveshift.runtime.control import keys
from liveshift.runtime.control.keyring import Holder
from liveshift.runtime.messages import Message


def test_an_operator_asks_and_is_known_by_name_and_role(key_directory: Path) -> None:
    heard: list[tuple[Holder, Message]] = []

    async def operators(holder: Holder, ask: Message) -> Message | None:
        heard.append((holder, ask))
        return messages.Named(holder.name)

    async def hosts(_peer: str, _ask: Message) -> Message | None:
        raise AssertionError("an operator is no host")

    async def scene() -> None:
        async with joined(key_directory, hosts, operators) as ends:
            with raw_peer(ends, key_directory / "operators/ops.key") as peer:
                await peer.send(messages.encode_request(1, messages.Here(7)))
                there = messages.decode(await peer.recv()).answer
                assert isinstance(there, messages.There)
                for _ in range(2):  # twice: served once
                    await peer.send(messages.encode_request(2, messages.GetStatus()))
                    assert messages.decode(await peer.recv()).answer == messages.Named("ops")
                for raw in (b"", messages.encode_answer(5, None)):
                    await peer.send(raw)
                    refused = messages.decode(await peer.recv())
                    assert (refused.id, (refused.error or ("",))[0]) == (0, "LiveshiftError")
                await peer.send(messages.encode_request(3, heartbeat()))
                assert messages.decode(await peer.recv()).id == 3
        assert heard == [
            (Holder("ops", Role.OPERATE), messages.GetStatus()),
            (Holder("ops", Role.OPERATE), heartbeat()),
        ]
        assert not ends.switchboard.connections

    asyncio.run(scene())


def test_a_revoked_operator_is_out(key_directory: Path) -> None:
    async def operators(_holder: Holder, _ask: Message) -> Message | None:
        return None

    async def scene() -> None:
        async with joined(key_directory, nothing, operators) as ends:
            with raw_peer(ends, key_directory / "operators/ops.key") as peer:
                events = peer.get_monitor_socket()
                await peer.send(messages.encode_request(2, messages.GetStatus()))
                await peer.recv()
                keys.revoke(key_directory, "ops")
                await peer.send(messages.encode_request(3, messages.GetStatus()))
                while True:
                    event = (await recv_monitor_message(events))["event"]
                    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                        break
                assert not await peer.poll(0), "the ask after the revocation was not answered"

    asyncio.run(asyncio.wait_for(scene(), 20))
