# SPDX-License-Identifier: Apache-2.0
"""A test's part leaves no descriptor open in this process, and closes none that it did not open.

A count would not do: who leaves one open and closes another's would not be seen.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

OF_ZMQ = ("socket:", "anon_inode:")
"""What libzmq's threads may close at any moment for a socket that an earlier test has closed."""


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
    """Raises AssertionError if something is open at the end that was not open at the beginning, or
    the other way round.

    Meanwhile the garbage collector rests: it could close at any moment what an earlier test of this
    process left, such as the three descriptors of an event loop. It runs only before something is
    said to be left, because a run takes longer than most of what the fuzzer does between."""
    collects = gc.isenabled()
    gc.disable()
    try:
        before = open_descriptors()
        yield
        after = open_descriptors()
        closed = [each for each in sorted(before - after) if not each[1].startswith(OF_ZMQ)]
        if left := sorted(after - before):
            gc.collect()
            left = sorted(open_descriptors() - before)
    finally:
        if collects:
            gc.enable()
    assert not left, f"left open: {left}"
    assert not closed, f"closed, though another's: {closed}"
