# SPDX-License-Identifier: Apache-2.0
"""Stopping a process."""

from __future__ import annotations

import subprocess

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
