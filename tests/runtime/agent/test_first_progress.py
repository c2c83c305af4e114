# SPDX-License-Identifier: Apache-2.0
"""What the destination takes for a sign that a job goes on after its move: a collective, or, where
these are rare, time on a core."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from liveshift.runtime.agent import destination_handlers
from liveshift.runtime.agent.host import run_time


class Restored:
    """Stands in for a capsule that was just let run: what its counters show at each look."""

    def __init__(self, finished: list[int], ran: list[float], code: int | None = None) -> None:
        self.finished = {1001: finished[0]}
        self.sandbox = self  # only handed on
        self.code = code
        self._finished, self._ran = finished[1:], ran

    def look(self) -> dict[int, int]:
        return {1001: self._finished.pop(0) if len(self._finished) > 1 else self._finished[0]}

    def ran_s(self) -> float:
        return self._ran.pop(0) if len(self._ran) > 1 else self._ran[0]


def first_progress(
    restored: Restored, monkeypatch: pytest.MonkeyPatch, limit: float = 1.0, rare: float = 0.05
) -> tuple[str, float]:
    """What is said, and after how many seconds."""
    monkeypatch.setattr(
        destination_handlers, "finished_by_pid", lambda sandbox, of=None: sandbox.look()
    )
    monkeypatch.setattr(destination_handlers, "RARE_S", rare)
    serving: Any = object.__new__(destination_handlers.DestinationHandlers)
    began = time.monotonic()
    said = asyncio.run(serving._first_progress(restored, limit))
    return said, time.monotonic() - began


def test_a_collective_is_waited_for_where_it_comes_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a job that computes meanwhile."""
    restored = Restored([7, 7, 7, 8], [1.0, 2.0])
    said, _ = first_progress(restored, monkeypatch, limit=90, rare=60)
    assert said == "until the first collective"


def test_where_collectives_are_rare_computing_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    said, seconds = first_progress(Restored([7, 7], [1.0, 1.2]), monkeypatch, limit=30)
    assert said.startswith("it computes; no collective within 0.")
    assert 0.05 < seconds < 5


def test_a_tree_that_only_sleeps_is_waited_for_no_longer_than_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said, seconds = first_progress(Restored([7, 7], [1.0, 1.001]), monkeypatch, limit=0.3)
    assert said == "no collective within 0.3 s"
    assert seconds > 0.3


def test_a_command_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said, _ = first_progress(Restored([7, 7], [1.0], code=0), monkeypatch, limit=30)
    assert said == "its command ended before the next collective"


def test_a_job_without_collectives_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said, _ = first_progress(Restored([0, 0], [1.0]), monkeypatch, limit=30)
    assert said == "no collectives in this job"


@pytest.fixture
def pids() -> Iterator[dict[str, int]]:
    """One process that computes and one that sleeps."""
    told = {"computes": "while True: pass", "sleeps": "import time\ntime.sleep(600)"}
    running = {
        name: subprocess.Popen(
            [sys.executable, "-c", f"print(flush=True)\n{code}"], stdout=subprocess.PIPE
        )
        for name, code in told.items()
    }
    for process in running.values():
        assert process.stdout is not None
        process.stdout.readline()
    yield {name: process.pid for name, process in running.items()}
    for process in running.values():
        process.kill()
        process.communicate()


def test_seconds_on_a_core_are_those_of_the_kernel(pids: dict[str, int]) -> None:
    before = {name: run_time.ran_s([pid]) for name, pid in pids.items()}
    until = time.monotonic() + 20
    while run_time.ran_s([pids["computes"]]) - before["computes"] < 0.2:
        assert time.monotonic() < until, "it computes, and no time is counted"
        time.sleep(0.02)
    assert run_time.ran_s([pids["sleeps"]]) - before["sleeps"] < destination_handlers.COMPUTES_S
    assert run_time.ran_s([os.getpid(), 2**22 - 1]) > 0, "a process that has gone counts nothing"
