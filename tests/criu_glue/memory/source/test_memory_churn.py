# SPDX-License-Identifier: Apache-2.0
"""Memory that changes in every way while it is followed comes to the destination as it is."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from checkout import SUPPORT
from memory_subject import family, state
from page_chunks import Pages
from waits import until

from liveshift.criu_glue.memory.source.pulling import PullStopped
from liveshift.criu_glue.memory.source.tracker import MemoryTracker

PROGRAM = SUPPORT / "memory" / "memory_churn.py"
ROUNDS, MOST_ROUNDS = 12, 400


def stop_all(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            until(lambda pid=pid: state(pid) in "TZX")  # type: ignore[misc]


@pytest.mark.timeout(360)  # MOST_ROUNDS on a machine with much other work
@pytest.mark.root
@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_tree_does_meanwhile(seed: int) -> None:
    chance = random.Random(seed)
    pages = Pages()
    with subprocess.Popen(
        [sys.executable, PROGRAM, str(seed), "3"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        tasks = family(process.pid)
        late = [1e9]
        tracker = MemoryTracker(tasks, stopped=lambda: time.monotonic() > late[0], threads=3)
        try:
            processes = rounds = 0
            # On a busy machine it may be long before a child lives in a round, and shares pages.
            while rounds < ROUNDS or (
                rounds < MOST_ROUNDS and (processes < 2 or len(pages.kinds) < 3)
            ):
                rounds += 1
                if chance.random() < 0.3:  # given up in its middle, and taken up again
                    late[0] = time.monotonic() + chance.random() * 0.02
                with contextlib.suppress(PullStopped):
                    processes = max(processes, tracker.round(pages).processes)
                late[0] = 1e9
                if chance.random() < 0.2:
                    tracker.count_written()
                time.sleep(chance.random() * 0.03)
            stop_all([process.pid])  # its children begin no more
            everybody = tasks()
            stop_all(everybody)
            found = tracker.send_final_set(pages)
            for pid in everybody:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    if state(pid) == "T":
                        assert pages.differences(pid, pid, found.table) == []
                        assert pid in found.table
            assert tracker.send_final_set(pages).sent_bytes == 0
            assert process.poll() is None
            assert processes > 1
            assert min(pages.kinds.values()) > 100
            assert len(pages.kinds) == 3
        finally:
            tracker.close()
            for pid in tasks():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
