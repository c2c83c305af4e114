# SPDX-License-Identifier: Apache-2.0
"""An agent beats on while the files of a capsule go by: its loop is never kept for long."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from liveshift.criu_glue.files import trees
from liveshift.criu_glue.files.unpacking import Unpacker
from liveshift.criu_glue.network import network_lock
from liveshift.runtime.agent.departure import freeze_obstacles
from liveshift.runtime.agent.departure.outgoing_memory import OutgoingWire
from liveshift.runtime.agent.departure.outgoing_migration import OutgoingMigration
from liveshift.runtime.agent.host.capsule_table import CapsuleTable
from liveshift.runtime.config.timeouts import Timeouts
from liveshift.runtime.messages import Moved

MB, GB = 1 << 20, 1 << 30
PLAIN, SPARSE = 600, 300  # MB of data
TICK_S = 0.01


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A capsule's /tmp with 900 MB of data, some of it spread over a file of 64 GB."""
    top = tmp_path / "tmp"
    top.mkdir()
    block = os.urandom(MB)
    with (top / "plain").open("wb") as file:
        for _ in range(PLAIN):
            file.write(block)
    with (top / "sparse").open("wb") as file:
        for n in range(SPARSE):
            os.pwrite(file.fileno(), block, n * (64 * GB // SPARSE))
        file.truncate(64 * GB)
    for n in range(2000):
        (top / str(n)).touch()
    yield top
    for path in tmp_path.iterdir():  # pytest would keep it
        shutil.rmtree(path)


def leaving(top: Path, unpacker: Unpacker, sent: list[int]) -> OutgoingMigration:
    """A departure that has files alone, on a wire that leads straight to the destination's disk."""
    plan = SimpleNamespace(tmp=top, log=top.parent / "log")
    sandbox: Any = SimpleNamespace(plan=plan, init=0, root=top.parent)
    resident: Any = SimpleNamespace(sandbox=sandbox, spec=SimpleNamespace(name="gpt/1"))
    factory: Any = SimpleNamespace(
        host="h0",
        cluster=SimpleNamespace(precopy=None),
        placement=SimpleNamespace(carried=[]),
        images=lambda _migration: top.parent / "images",
    )

    def send(_stream: str, data: bytes) -> None:
        sent.append(len(data))
        if data:
            unpacker.write(data)

    wire: Any = SimpleNamespace(send=send, finish=unpacker.finish, bytes=0)
    no_lanes: Any = None
    gone = OutgoingMigration("m1", resident, factory, OutgoingWire(wire, no_lanes, no_lanes))
    output: Any = SimpleNamespace(send_new=lambda _send: None)
    gone._files._output = output
    return gone


def test_the_loop_goes_round_while_a_gigabyte_is_packed_and_unpacked(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_lock, "prepare_lock", lambda _init: None)
    monkeypatch.setattr(freeze_obstacles, "passing", lambda *_: [])
    sent: list[int] = []
    (tmp_path / "there").mkdir()
    gone = leaving(full, Unpacker(tmp_path / "there"), sent)
    request: Any = SimpleNamespace(deadline=600.0, full_dump="it is small", sooner=0.0)
    no_criu: Any = None
    monkeypatch.setattr(gone._frozen.tree, "start_ahead", lambda *_: None)
    capsule_table: Any = SimpleNamespace(_locks=defaultdict(asyncio.Lock))

    async def beat_beside() -> tuple[float, float]:
        """The longest time between two turns of the loop, and what the files took."""
        began = last = time.monotonic()
        precopy = partial(gone.precopy, request, began, no_criu)
        work: asyncio.Task[Moved] = asyncio.ensure_future(
            CapsuleTable.blocking(capsule_table, "gpt/1", precopy)
        )
        longest = 0.0
        while not work.done():
            await asyncio.sleep(TICK_S)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        await work
        return longest, last - began

    longest, took = asyncio.run(beat_beside())
    assert (PLAIN + SPARSE) * MB < sum(sent) < (PLAIN + SPARSE + 20) * MB
    assert trees.listing(trees.Tree("", tmp_path / "there")).keys() >= {"plain", "sparse"}
    assert longest < Timeouts().heartbeat
    assert longest < took / 2, "it was kept for as long as the files took"
