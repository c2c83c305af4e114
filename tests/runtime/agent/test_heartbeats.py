# SPDX-License-Identifier: Apache-2.0
"""What a heartbeat says of the host's memory."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from snapshot_stage import CLUSTER

from liveshift.runtime.agent.heartbeats import Heartbeats
from liveshift.runtime.agent.host import data_link
from liveshift.runtime.model import link_rates

TOTAL = 1000


def test_copies_that_give_way_in_a_moment_count_as_memory_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = SimpleNamespace(available=10, total=TOTAL)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(data_link, "read_link", lambda *_: None)
    monkeypatch.setattr(link_rates, "load", lambda _run: {})
    offered: list[int] = []
    table: Any = SimpleNamespace(idle=SimpleNamespace(heartbeat=lambda: None), capsules={})
    registry: Any = SimpleNamespace(gpus_taken=list)
    gpus: Any = SimpleNamespace(seats=lambda _taken: [], errors=lambda _within: [])
    destination: Any = SimpleNamespace(memory_offered=lambda gives_way: offered.append(gives_way))
    holding: Any = SimpleNamespace(own_bytes=lambda: 30, own_bytes_soon=lambda: 90)
    beats = Heartbeats(CLUSTER, "h0", table, registry, gpus, destination, holding)
    beat = asyncio.run(beats.make())
    assert beat.memory_left == 100 / TOTAL
    assert offered == [30], "a Reserve would refuse more"
