# SPDX-License-Identifier: Apache-2.0
"""Holds that the helper begins for clients that may end meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from liveshift.cuda_snapshot import threads
from liveshift.cuda_snapshot.helper.held_processes import HeldProcesses
from liveshift.errors import StepFailed


class Operations:
    """``restore_thread`` waits until it is let go."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()

    def restore_thread(self, pid: int) -> int:
        self.asked.set()
        assert self.go.wait(20)
        return 0  # no thread of the process


@pytest.fixture
def operations() -> Operations:
    return Operations()


@pytest.fixture
def pid() -> Iterator[int]:
    """Of a process that is no child of this one, as a held process must not be."""
    script = "sleep 600 >/dev/null & echo $!"
    found = int(subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE).stdout)
    yield found
    os.kill(found, signal.SIGKILL)


def test_a_hold_whose_client_has_gone_ends(operations: Operations, pid: int) -> None:
    held = HeldProcesses(cast(Any, operations))
    operations.go.set()
    with pytest.raises(StepFailed, match="its client has gone"):
        held.hold(pid, False, 10.0, 0.0, gone=lambda: True)
    assert not held.holds(pid)
    assert threads.tracer(pid) == 0


def test_who_asks_while_a_hold_begins_is_told_the_outcome(operations: Operations, pid: int) -> None:
    held, answers = HeldProcesses(cast(Any, operations)), list[bool]()
    holder = threading.Thread(target=held.hold, args=(pid, False, 10.0, 0.0))
    holder.start()
    assert operations.asked.wait(10)
    asker = threading.Thread(target=lambda: answers.append(held.holds(pid)))
    asker.start()
    asker.join(0.2)
    assert asker.is_alive(), "it could only have said no, and a moment later the process is held"
    operations.go.set()
    asker.join(10)
    holder.join(10)
    assert answers == [True]
    held.release(pid)
    assert not held.holds(pid)
