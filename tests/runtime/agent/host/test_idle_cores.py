# SPDX-License-Identifier: Apache-2.0
"""Idle cores are counted from the real /proc beside a busy loop, and from a /proc/pressure/cpu that
a test writes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from liveshift.cores import usable
from liveshift.runtime.agent.host import idle_cores
from liveshift.runtime.agent.host.idle_cores import IdleCores
from liveshift.runtime.agent.host.reading_cost import ReadingCost


@contextmanager
def busy(loops: int) -> Iterator[None]:
    code = "print(flush=True)\nwhile True: pass"
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(loops)
    ]
    try:
        for loop in started:
            assert loop.stdout is not None
            loop.stdout.readline()
        yield
    finally:
        for loop in started:
            loop.kill()
            loop.communicate()


def test_where_every_core_is_busy_none_is_idle() -> None:
    with busy((os.cpu_count() or 1) + 1):
        seen = IdleCores(ReadingCost())
        time.sleep(1.0)
        found = seen.cores()
    assert found.usable == usable()
    assert 0 <= found.idle < 0.15
    assert found.boot
    assert found.per_byte == ReadingCost().per_byte


def test_what_was_busy_before_the_window_is_forgotten() -> None:
    seen = IdleCores()
    with busy((os.cpu_count() or 1) + 1):
        time.sleep(0.5)
        seen.heartbeat()
    seen.heartbeat()
    assert 0 <= seen.cores().idle <= usable()


def test_the_first_look_waits_for_one_that_tells() -> None:
    began = time.monotonic()
    found = IdleCores().cores()
    assert time.monotonic() - began >= 0.2
    assert 0 <= found.idle <= found.usable


@pytest.mark.parametrize(("waited", "idle"), [(0.0, 1.0), (0.5, 0.5), (1.0, 0.0), (None, 1.0)])
def test_idle_time_while_a_task_waits_for_a_core_does_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, waited: float | None, idle: float
) -> None:
    """One core is idle all the time, and for a share of that time, ``waited``, some task waits.
    None: a kernel without PSI."""
    pressure = tmp_path / "cpu"
    some = "some avg10=3.00 avg60=2.00 avg300=1.00 total={}\nfull avg10=0.00 total=0\n"
    now = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if waited is not None:  # microseconds
            pressure.write_text(some.format(round(now * waited * 1e6)))

    sleep(0)
    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(idle_cores, "time", clock)
    monkeypatch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(idle=now))
    monkeypatch.setattr(idle_cores, "PRESSURE", pressure)
    assert IdleCores().cores().idle == pytest.approx(min(idle, usable()), abs=0.001)
