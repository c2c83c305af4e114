# SPDX-License-Identifier: Apache-2.0
"""How large real processes are, as the kernel tells."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from liveshift.criu_glue.survey.footprint import measure
from liveshift.criu_glue.survey.found import Footprint

MIB = 1 << 20

PROGRAM = """
import mmap, os, sys, threading
private = mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
private.write(bytes([7]) * (64 << 20))
shared = mmap.mmap(-1, 16 << 20, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
shared.write(bytes([7]) * (16 << 20))
child = os.fork()
if child:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    print(child, flush=True)
sys.stdin.read()
"""


@contextmanager
def processes() -> Iterator[list[int]]:
    """A process of 64 MiB private and 16 MiB shared memory with two threads, and its child."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        yield [parent.pid, int(parent.stdout.readline())]


@pytest.mark.root
def test_what_processes_share_counts_once() -> None:
    with processes() as pids:
        alone, both = measure(pids[:1]), measure(pids)
    assert (both.processes, both.threads) == (2, 3)
    assert both.mappings > alone.mappings > 10
    assert 64 * MIB <= both.private < 64 * MIB + 24 * MIB
    assert 16 * MIB <= both.shared < 20 * MIB
    assert alone.private < both.private
    assert both.copied >= 2 * 64 * MIB
    assert (alone.shared_mappings, both.shared_mappings) == (1, 2)


def test_what_has_ended_is_left_out() -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    assert measure([ended.pid]) == Footprint(0, 0, 0, 0, 0)
