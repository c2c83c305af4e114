# SPDX-License-Identifier: Apache-2.0
"""Who cannot be reached is named with its address, the cause and what to look at."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from link_harness import Ends, beat, free_address, nothing, until

from liveshift.errors import Unreachable
from liveshift.runtime import keys, line, reach
from liveshift.runtime.link import Uplink


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "RECONNECT_S", 0.3)


async def said(uplink: Uplink) -> Unreachable:
    """What an ask of an agent comes to whose orchestrator is not connected."""
    serving = asyncio.create_task(uplink.serve())
    try:
        with pytest.raises(Unreachable) as caught:
            await uplink.line.ask(beat(), 10)
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
            await until(lambda: uplink._turned_away)
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
