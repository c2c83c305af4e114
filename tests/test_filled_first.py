# SPDX-License-Identifier: Apache-2.0
"""A capsule that runs without all of its memory yet is not moved on before it has it."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from liveshift.errors import Refused
from liveshift.runtime.source import Source

PATIENCE_S = 0.3


def ask(filled_after_s: float) -> float:
    """Seconds until its source looks at it."""
    timeouts = SimpleNamespace(suspicion=PATIENCE_S)
    house: Any = SimpleNamespace(cluster=SimpleNamespace(timeouts=timeouts))
    resident: Any = SimpleNamespace(filling=True, spec=SimpleNamespace(name="gpt/1"))
    porter: Any = SimpleNamespace()

    async def look() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(filled_after_s, lambda: setattr(resident, "filling", False))
        await Source(house, porter, porter)._filled(resident)

    began = time.monotonic()
    asyncio.run(look())
    return time.monotonic() - began


def test_its_source_waits_a_moment() -> None:
    assert ask(0.0) < PATIENCE_S / 3
    assert ask(PATIENCE_S / 2) >= PATIENCE_S / 2


def test_then_it_is_refused() -> None:
    with pytest.raises(Refused, match=r"gpt/1 .* without all of its memory yet"):
        ask(60.0)
