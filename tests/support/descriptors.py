# SPDX-License-Identifier: Apache-2.0
"""Checks that a part of a test leaves no descriptor open and closes no foreign one.

It compares sets. A count would not change if the part left one open and closed a foreign one.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

OF_ZMQ = ("socket:", "anon_inode:")
"""libzmq's threads close descriptors of these kinds some time after a test has closed a socket."""


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
    """Raises AssertionError unless the same descriptors are open at the end as at the beginning.

    The garbage collector rests meanwhile, because it would close what an earlier test of this
    process left, such as the three descriptors of an event loop. It runs once if descriptors seem
    to be left. A run at each call would take longer than most inputs of the fuzzer."""
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
    assert not closed, f"closed foreign descriptors: {closed}"
