# SPDX-License-Identifier: Apache-2.0
"""Waits for descriptors with poll(2): select(2) fails above 1023, and a daemon may have more."""

from __future__ import annotations

import math
import select
from typing import Protocol


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def readable(seconds: float, *of: int | HasDescriptor) -> list[int]:
    """Wait up to ``seconds`` for the first ready descriptor; return all that can be read, are at
    their end, or have failed."""
    poll = select.poll()
    for each in of:
        poll.register(each, select.POLLIN)
    return [fd for fd, _ in poll.poll(math.ceil(max(0.0, seconds) * 1000))]
