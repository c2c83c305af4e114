# SPDX-License-Identifier: Apache-2.0
"""What this user or this machine may lack, by marks of tests; pyproject.toml lists them.

`make test` counts a skipped test as failed. It excepts a test that needs one of the facts below on
a machine that lacks this fact, as no installation could bring it; it names such tests at its end.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import socket
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from checkout import ROOT

from liveshift.criu_glue.network.socket_diag import destroy

LACKS = "this machine has no "
"""Begins the reason of a test that needs one of the FACTS."""


def _linux(*version: int) -> bool:
    return tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= version


def _memory_controller() -> bool:
    """As integration/fault_matrix/memory.py looks for it."""
    top = Path("/sys/fs/cgroup")
    controllers = top / "cgroup.subtree_control"
    return (top / "memory/memory.limit_in_bytes").exists() or (
        controllers.exists() and "memory" in controllers.read_text()
    )


def _autogroup() -> bool:
    """Whether sessions have a weight of their own (sched(7)); the file is empty where not."""
    own = Path("/proc/self/autogroup")
    return own.exists() and bool(own.read_text())


def _destroys_sockets() -> bool:
    """Whether the kernel closes a socket on demand (CONFIG_INET_DIAG_DESTROY), as root may ask it:
    it looks for one that is not there only then."""
    try:
        destroy(os.getpid(), struct.pack("=BBBxI48x", socket.AF_INET, socket.IPPROTO_TCP, 0, 0))
    except OSError as error:
        return error.errno != errno.EOPNOTSUPP
    return True


def on_disk(*places: Path) -> Path | None:
    """The first of these folders, or else of others that tests may use, that is on no tmpfs."""
    for place in (*places, ROOT / "build", Path("/var/tmp")):
        if place.is_dir():
            words = ["stat", "--file-system", "--format=%T", str(place)]
            kind = subprocess.run(words, capture_output=True, text=True, check=True).stdout
            if kind.strip() not in ("tmpfs", "ramfs"):
                return place
    return None


FACTS: dict[str, Callable[[], bool]] = {
    "Linux 6.11 (MAP_DROPPABLE)": lambda: _linux(6, 11),
    "Linux 6.1 (tcp_child_ehash_entries)": lambda: _linux(6, 1),
    "br_netfilter": lambda: Path("/proc/sys/net/bridge/bridge-nf-call-iptables").exists(),
    "userfaultfd": lambda: Path("/proc/sys/vm/unprivileged_userfaultfd").exists(),
    "fanotify": lambda: Path("/proc/sys/fs/fanotify").exists(),
    "perf events": lambda: Path("/proc/sys/kernel/perf_event_paranoid").exists(),
    "autogroup": _autogroup,
    "SOCK_DESTROY": _destroys_sockets,
    "cgroup with a memory controller": _memory_controller,
    "folder on a disk": lambda: on_disk() is not None,
    "apt-get": lambda: shutil.which("apt-get") is not None,
}
"""What a test may need of the kernel, the hardware or the distribution, and whether it is here."""


def needs_fact(fact: str) -> None:
    """Skip a test, as one that `make test` excepts, where this machine lacks one of the FACTS."""
    if not FACTS[fact]():
        pytest.skip(LACKS + fact)


def lacked(reason: str) -> str:
    """The fact for whose lack a test was skipped; empty where it is none of the FACTS, or this
    machine has it."""
    fact = reason.removeprefix("Skipped: ").removeprefix(LACKS)
    return fact if fact in FACTS and reason.endswith(LACKS + fact) and not FACTS[fact]() else ""


def skip_where_lacking(item: pytest.Item) -> None:
    """To be called before a test is set up."""
    if os.geteuid() != 0 and any(item.get_closest_marker(name) for name in ("root", "lab")):
        pytest.skip("only root can run this test")
    for mark in item.iter_markers("needs"):
        if shutil.which(mark.args[0]) is None:
            pytest.skip(f"the program {mark.args[0]} is not installed")
    for mark in item.iter_markers("machine"):
        needs_fact(mark.args[0])
