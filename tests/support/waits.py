# SPDX-License-Identifier: Apache-2.0
"""Waiting until something is true, in a thread or in a task; both fail after so many seconds.

How long they wait says nothing of the product: on a machine with a load of 15, what takes a second
alone takes more than ten."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

POLL_S = 0.002
PATIENCE_S = 30.0


def until(
    true: Callable[[], object], seconds: float = PATIENCE_S, what: str = "what a test waits for"
) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"it did not happen within {seconds:g} s: {what}"
        time.sleep(POLL_S)


async def until_async(true: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Other tasks go on meanwhile."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"it did not happen within {seconds:g} s"
        await asyncio.sleep(POLL_S)
