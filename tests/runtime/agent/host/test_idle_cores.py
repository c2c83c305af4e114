# SPDX-License-Identifier: Apache-2.0
"""Cores that nobody uses, by the real /proc, beside a busy loop."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from liveshift.cores import usable
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
