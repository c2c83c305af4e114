# SPDX-License-Identifier: Apache-2.0
"""How much of the time in which it wants to compute a process does; the kernel's own count."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from liveshift.runtime.agent.host.run_time import LOOK_S, RunTime

SPIN = "while True: pass"
SLEEP = "import time; time.sleep(600)"
FAULT = """
import mmap
memory = mmap.mmap(-1, 64 << 20)
memory.madvise(mmap.MADV_NOHUGEPAGE)
while True:
    for page in range(0, len(memory), 4096):
        memory[page] = 1
    memory.madvise(mmap.MADV_DONTNEED)
"""
WATCHED_S = 3.0


@contextmanager
def running(script: str, core: int | None = None) -> Iterator[int]:
    """The pid of a Python that runs a script, on one core if named."""
    pin = f"import os; os.sched_setaffinity(0, [{core}])\n" if core is not None else ""
    said = "print(flush=True)\n"
    with subprocess.Popen(
        [sys.executable, "-c", pin + said + script], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def shares(*groups: tuple[int, ...], seconds: float = WATCHED_S) -> list[float]:
    """Of groups of processes, watched at once: the part of some seconds in which each got on."""
    now = time.monotonic()
    times = [RunTime(lambda pids=pids: pids, lambda: now) for pids in groups]  # type: ignore[misc]

    def look() -> list[int]:
        # One moment for all groups. On a busy machine this process may wait for a core between two
        # lines, and that is no time of the groups.
        nonlocal now
        now = time.monotonic()
        return [each.progress() for each in times]

    assert look() == [0] * len(groups)
    began = now
    while now - began < seconds:
        time.sleep(LOOK_S / 2)
        look()
    time.sleep(LOOK_S)
    return [progress / 1000 / (now - began) for progress in look()]


def test_one_that_sleeps_is_not_held_up() -> None:
    with running(SLEEP) as pid:
        assert shares((pid,)) == [pytest.approx(1.0, abs=0.05)]


def computed(pid: int) -> float:
    """Seconds that it has been in user mode (proc(5), utime)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK")


def test_two_on_one_core_get_what_each_computes() -> None:
    """At most half of the core each; less where something else runs on it, too."""
    core = min(os.sched_getaffinity(0))
    with running(SPIN, core) as one, running(SPIN, core) as other:
        began, before = time.monotonic(), [computed(one), computed(other)]
        alone, both = shares((one,), (one, other))
        took = time.monotonic() - began
        had = [(computed(pid) - cpu) / took for pid, cpu in zip((one, other), before, strict=True)]
    assert alone == pytest.approx(had[0], abs=0.05)
    assert both == pytest.approx(sum(had) / 2, abs=0.05)
    assert 0 < both < 0.6


def test_what_faults_is_held_up_by_the_kernel() -> None:
    """Unlike one that only spins on the same core, of which each gets the same."""
    core = max(os.sched_getaffinity(0))
    with running(SPIN, core) as spins, running(FAULT, core) as faults:
        one, other = shares((spins,), (faults,))
    assert other < 0.9 * one


def test_one_that_begins_or_ends_meanwhile() -> None:
    pids: list[int] = []
    now = [0.0]
    run_time = RunTime(lambda: list(pids), lambda: now[0])

    def later(seconds: float) -> int:
        now[0] += seconds
        return run_time.progress()

    assert later(0) == 0  # nothing runs: nothing is known
    assert later(10) == 0
    with running(SLEEP) as pid:
        pids.append(pid)
        assert later(10) == 0
        assert later(10) == pytest.approx(10_000, abs=100)
        assert later(LOOK_S / 2) == pytest.approx(10_000, abs=100)  # too soon to look again
        assert later(10) == pytest.approx(20_200, abs=200)
    before = run_time.progress()
    assert later(10) == before
    assert later(10) == before


@pytest.mark.parametrize("pids", [(), (2**22 + 1,)])
def test_of_what_is_not_there_nothing_is_known(pids: tuple[int, ...]) -> None:
    assert shares(pids, seconds=2 * LOOK_S) == [0]
