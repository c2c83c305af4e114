# SPDX-License-Identifier: Apache-2.0
"""A process of the capsule ends while we read about it.

If it ends between our open(2) of a file in /proc and our read(2), the kernel answers ESRCH
(fs/proc/base.c), and not ENOENT. A signal for the command, and a round, go on without it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from liveshift.criu_glue.capsule.tree import inner_pid
from liveshift.criu_glue.survey import gpu_tasks
from liveshift.runtime.agent.departure.capsule_tracker import untrusted
from liveshift.runtime.agent.host import running_capsule
from liveshift.runtime.agent.host.running_capsule import RunningCapsule


def test_the_kernel_says_so() -> None:
    child = subprocess.Popen(["sleep", "60"])
    with open(f"/proc/{child.pid}/status", "rb", buffering=0) as status:
        child.kill()
        child.wait()
        with pytest.raises(ProcessLookupError):
            status.read()
    with pytest.raises(FileNotFoundError):
        inner_pid(child.pid)


def test_the_command_gets_its_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    first = 1 << 22  # above the highest pid there can be: no process has it
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as command:

        def inner(pid: int) -> int:
            if pid == first:
                raise ProcessLookupError(3, "No such process")
            return running_capsule.ROOT_PID

        listed = [SimpleNamespace(pid=first), SimpleNamespace(pid=command.pid)]
        monkeypatch.setattr(running_capsule, "tasks", lambda sandbox: listed)
        monkeypatch.setattr(running_capsule, "inner_pid", inner)
        capsule = RunningCapsule(None, 1, None, None)  # type: ignore[arg-type]
        try:
            capsule.send_signal(15)
            assert command.wait(10) == -15
        finally:
            command.kill()


def test_a_round_trusts_the_page_tables_of_what_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: object) -> None:
        raise ProcessLookupError(3, "No such process")

    monkeypatch.setattr(gpu_tasks, "look", ended)
    assert untrusted(os.getpid()) is False
