# SPDX-License-Identifier: Apache-2.0
"""Looks up users and groups in threads of its own: only these wait if a directory service hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_THREADS = ThreadPoolExecutor(2, "lookup")


async def look_up(find: Callable[[], T]) -> T:
    """Return what ``find`` returns, which runs in one of the threads."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, find)
