# SPDX-License-Identifier: Apache-2.0
"""An agent says which other hosts it reaches."""

from __future__ import annotations

import asyncio

import pytest
from rewind_scene import CLUSTER

from liveshift.runtime.agent.try_hosts import try_hosts
from liveshift.runtime.control.kernels import Kernels
from liveshift.runtime.messages import HostsReached, TryHosts


def test_those_whose_kernels_answer_within_the_limit_are_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All are tried at once, where they listen for images."""
    tried: dict[str, float] = {}
    all_are_tried = asyncio.Event()

    async def answers(_: Kernels, address: str, limit: float) -> bool:
        tried[address] = limit
        if len(tried) == 3:
            all_are_tried.set()
        await all_are_tried.wait()
        return "10.88.0.12" not in address

    monkeypatch.setattr(Kernels, "answers", answers)
    request = TryHosts(["h0", "h2", "gone", "h3"], 0.5)
    found = asyncio.run(asyncio.wait_for(try_hosts(CLUSTER, Kernels(), request), 20))
    assert found == HostsReached(["h0", "h3"])
    assert tried == {str(CLUSTER.host(name).data): 0.5 for name in ("h0", "h2", "h3")}
