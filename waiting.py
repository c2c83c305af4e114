# SPDX-License-Identifier: Apache-2.0
"""Waiting for descriptors by poll(2): select(2) knows none above 1023, a daemon may have more."""

from __future__ import annotations

import math
import select
from typing import Protocol


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def readable(seconds: float, *of: int | HasDescriptor) -> list[int]:
    """Those that can be read, are at their end or have failed; waits so long for the first."""
    poll = select.poll()
    for each in of:
        poll.register(each, select.POLLIN)
    return [fd for fd, _ in poll.poll(math.ceil(max(0.0, seconds) * 1000))]
