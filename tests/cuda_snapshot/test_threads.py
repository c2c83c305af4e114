# SPDX-License-Identifier: Apache-2.0
"""Stopping a process, and threads that sleep."""

from __future__ import annotations

import subprocess
import sys

import pytest

from liveshift.cuda_snapshot import threads
from liveshift.errors import StepFailed


def test_a_process_that_has_ended_is_said_to_have_ended_at_once() -> None:
    with subprocess.Popen(["true"]) as process:
        while threads.state(process.pid) != "Z":
            pass
        with pytest.raises(StepFailed, match=f"process {process.pid} ended before it was stopped"):
            threads.stop(process.pid, 60.0)
    with pytest.raises(StepFailed, match="ended before"):
        threads.stop(process.pid, 60.0)


def test_a_stop_that_comes_too_late_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        monkeypatch.setattr(threads, "stopped", lambda _: False)
        with pytest.raises(StepFailed, match="did not stop within 0 s"):
            threads.stop(process.pid, 0.0)
        monkeypatch.undo()
        assert not threads.stopped(process.pid)
        process.kill()


def test_what_never_runs_is_asleep_and_what_runs_now_and_then_is_not() -> None:
    loop = "import time\nwhile True: time.sleep(0.01)"
    with (
        subprocess.Popen(["sleep", "600"]) as sleeps,
        subprocess.Popen([sys.executable, "-c", loop]) as wakes,
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) as runs,
    ):
        for process in (sleeps, wakes):
            while threads.state(process.pid) != "S":
                pass
        try:
            tids = [each.pid for each in (sleeps, wakes, runs)]
            assert threads.asleep(tids, 1.0) == {sleeps.pid}
        finally:
            for process in (sleeps, wakes, runs):
                process.kill()
    assert threads.asleep([sleeps.pid], 0.01) == set(), "it has ended"


def test_a_thread_that_ran_between_two_looks_was_not_asleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine stood still for all of the time but a moment."""
    seen = iter(["1", "1", "1", "2", *["2"] * threads.LOOKS])
    monkeypatch.setattr(threads, "run_so_far", lambda _: next(seen))
    assert threads.asleep([7], 0.01) == set()
