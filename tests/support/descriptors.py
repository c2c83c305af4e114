# SPDX-License-Identifier: Apache-2.0
"""A test's part leaves no descriptor open in this process.

A count would not do: the garbage collector may close at any moment what an earlier test of this
process left, such as the three descriptors of an event loop, and the count falls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def open_descriptors() -> set[tuple[str, str]]:
    """Number and target of each, as /proc/self/fd shows them: two sockets differ in their inode."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
        except FileNotFoundError:  # it was the one of the list itself
            continue
    return found


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Raises AssertionError if something is open at the end that was not open at the beginning."""
    before = open_descriptors()
    yield
    left = sorted(open_descriptors() - before)
    assert not left, f"left open: {left}"
