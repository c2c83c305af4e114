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
from waits import until

from liveshift import proc_text
from liveshift.runtime.agent.host import run_time
from liveshift.runtime.agent.host.run_time import LOOK_S, RunTime, _Thread

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


class Watched:
    """The progress of some processes, and the moment of each look at them."""

    def __init__(self, pids: tuple[int, ...]) -> None:
        self.now = 0.0
        self._run_time = RunTime(lambda: pids, self._clock)

    def _clock(self) -> float:
        self.now = time.monotonic()
        return self.now

    def look(self) -> tuple[float, float]:
        """The seconds in which they got on, and the moment of that."""
        progress = self._run_time.progress(at_once=True)
        return progress / 1000, self.now


def shares(*groups: tuple[int, ...], seconds: float = WATCHED_S) -> list[float]:
    """Of groups of processes, watched at once: the part of some seconds in which each got on."""
    watched = [Watched(pids) for pids in groups]
    first = [each.look() for each in watched]
    assert [progress for progress, _ in first] == [0.0] * len(groups)
    last = first
    while last[-1][1] - first[0][1] < seconds:
        time.sleep(LOOK_S)
        last = [each.look() for each in watched]
    return [
        progress / (moment - began)
        for (progress, moment), (_, began) in zip(last, first, strict=True)
    ]


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


class Waits:
    """A thread that never sleeps: again and again it waits for a core, and then runs for a ninth of
    that. The kernel adds the whole of a wait once it is over (schedstat). ``now``: seconds since it
    began. ``known``: whether looks find that it does not sleep."""

    def __init__(self, waits: float, *, known: bool = False) -> None:
        self._waits, self._cycle, self._known = waits, waits * 10 / 9, known
        self.now = 0.0

    def ran(self) -> float:
        cycles, rest = divmod(self.now, self._cycle)
        return cycles * self._waits / 9 + max(0.0, rest - self._waits)

    def read(self, pid: int) -> Iterator[tuple[tuple[int, str], _Thread]]:
        cycles, rest = divmod(self.now, self._cycle)
        waited = (cycles + (rest >= self._waits)) * self._waits
        slept = 7 if self._known else None
        yield (pid, "1"), _Thread(int(self.ran() * 1e9), int(waited * 1e9), 1, 0, slept)


@pytest.mark.parametrize(
    ("waits", "known"), [(0.03, False), (0.11, False), (0.5, False), (1.3, False), (7.0, True)]
)
def test_a_wait_that_the_kernel_adds_late_counts(
    monkeypatch: pytest.MonkeyPatch, waits: float, known: bool
) -> None:
    """A look in the middle of a wait finds a thread that seems to sleep. The next one finds that it
    has waited for longer than the time between them."""
    thread = Waits(waits, known=known)
    monkeypatch.setattr(run_time, "_threads", thread.read)
    times = RunTime(lambda: [1], lambda: thread.now)
    seen = [times.progress()]
    while thread.now < 60:
        thread.now += LOOK_S
        seen.append(times.progress())
    assert seen == sorted(seen), "it never goes back"
    assert seen[-1] / 1000 == pytest.approx(thread.ran(), abs=0.1 + waits)


def test_a_thread_that_has_not_gone_to_sleep_waits_when_it_does_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel has not added that wait yet."""
    now = [0.0]
    count: list[int | None] = [3]

    def read(pid: int) -> Iterator[tuple[tuple[int, str], _Thread]]:
        yield (pid, "1"), _Thread(int(now[0] * 1e8), 5, 1, 0, count[0])

    monkeypatch.setattr(run_time, "_threads", read)
    times = RunTime(lambda: [1], lambda: now[0])
    seen = [times.progress()]
    for slept in (3, 3, None, None, 4, 5, 5):
        count[0] = slept
        now[0] += 1.0
        seen.append(times.progress())
    assert seen == pytest.approx([0, 100, 200, 1200, 2200, 3200, 4200, 4300], abs=2)


def test_a_late_wait_of_one_thread_does_not_count_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor do threads that want more cores than one make up for each other."""
    late, now = Waits(0.11), [0.0]

    def read(pid: int) -> Iterator[tuple[tuple[int, str], _Thread]]:
        late.now = now[0]
        yield from late.read(pid)
        for name in ("2", "3"):  # they run all the time
            yield (pid, name), _Thread(int(now[0] * 1e9), 0, 1, 0, 7)

    monkeypatch.setattr(run_time, "_threads", read)
    times = RunTime(lambda: [1], lambda: now[0])
    times.progress()
    while now[0] < 60:
        now[0] += LOOK_S
        times.progress()
    ran = late.ran() + 2 * now[0]
    assert times.progress() / 1000 == pytest.approx(ran / 3, rel=0.01)


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
        until(lambda: proc_text.read(f"/proc/{pid}/stat").rpartition(")")[2].split()[0] == "S")
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
