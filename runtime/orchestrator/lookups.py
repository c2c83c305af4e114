# SPDX-License-Identifier: Apache-2.0
"""Looks up users and groups in threads of its own: only these wait if a directory service hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LOOKUPS = 2
"""This many threads look up users and groups."""

T = TypeVar("T")


class Lookups:
    """The threads for look-ups."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(LOOKUPS, "lookup")

    async def run(self, look_up: Callable[[], T]) -> T:
        """Return the result of a look-up, made in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, look_up)
