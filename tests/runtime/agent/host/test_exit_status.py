# SPDX-License-Identifier: Apache-2.0
"""How a process ended, seen from outside: while it is a zombie, and after its parent has waited."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from liveshift.runtime.agent.host import exit_status
from liveshift.runtime.agent.host.exit_status import HAS_EXIT, INFO

END = {
    "code": "raise SystemExit(3)",
    "well": "pass",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "segv": "import ctypes; ctypes.string_at(8)",
}


def ended(how: str) -> tuple[subprocess.Popen[bytes], int]:
    """A process that has ended and is not waited for, and its pidfd."""
    limits = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0));"
    process = subprocess.Popen([sys.executable, "-c", limits + END[how]])
    pidfd = os.pidfd_open(process.pid)
    assert select.select([pidfd], [], [], 30)[0]
    return process, pidfd


@pytest.mark.parametrize(
    ("how", "status"),
    [("code", 3 << 8), ("well", 0), ("killed", signal.SIGKILL), ("segv", signal.SIGSEGV)],
)
def test_a_zombie_shows_how_it_ended(how: str, status: int) -> None:
    process, pidfd = ended(how)
    try:
        assert exit_status.exit_status(pidfd, process.pid) == status
    finally:
        process.wait()
        os.close(pidfd)


def test_the_pidfd_of_one_that_was_waited_for_shows_it_too() -> None:
    """Only from Linux 6.15 on; before that it is not known, and nothing else is said."""
    process, pidfd = ended("killed")
    process.wait()
    try:
        known = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 15)
        found = exit_status.exit_status(pidfd, process.pid)
        assert found == (signal.SIGKILL if known else None)
    finally:
        os.close(pidfd)


def test_a_process_that_runs_has_no_status() -> None:
    pidfd = os.pidfd_open(os.getpid())
    try:
        assert exit_status.exit_status(pidfd, os.getpid()) is None
    finally:
        os.close(pidfd)


def test_the_structure_is_the_kernel_s() -> None:
    """PIDFD_INFO_SIZE_VER0 of include/uapi/linux/pidfd.h is 64."""
    assert INFO.size == 64
    assert HAS_EXIT == 8
