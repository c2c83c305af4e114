# SPDX-License-Identifier: Apache-2.0
"""The job of jobs/kernel_objects.py under test: what it counts, its timers, and what it reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lab_session import JOBS, LabSession, eventually
from moving_job import Job

from liveshift.launcher import lab as labs

KERNEL_OBJECTS = ("python", str(JOBS / "kernel_objects.py"), "--out", "{out}")
_CONTEXTS = ("echoed by spawn", "echoed by forkserver")
_COUNTERS = ("counted", "shared", *_CONTEXTS, "typed")
_TIMERS = 7
_PORT = 7070


class KernelJob:
    """``server``: whether it talks to a server (``KERNEL_OBJECTS --server ADDRESS:PORT``)."""

    def __init__(self, job: Job, server: bool) -> None:
        self.job = job
        self._server = server
        self._counters = (*_COUNTERS, *(("blocks",) if server else ()))

    def progress(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.job.out / "progress.json").read_text())
        return found

    def arm(self) -> None:
        """Start its timers. Return once all that it does has begun."""
        eventually((self.job.out / "progress.json").exists, "the job's first progress")
        (self.job.out / "arm").touch()
        needed = {"armed", *_CONTEXTS, "typed"}
        eventually(lambda: needed <= self.progress().keys(), "the timers")
        for counter in self._counters:
            eventually(partial(self._beyond, counter, 0), f"{counter} to begin", 20)

    def goes_on(self) -> None:
        """It must hear signals, go on with all that it counts, and hear all of its timers."""
        main = min(self.job.seen(0).tasks.values())
        for _ in range(3):
            had = self.progress()["signals"]
            os.kill(main, signal.SIGUSR1)
            eventually(partial(self._beyond, "signals", had), "the signal handler", 10)
        after = self.progress()
        for counter in self._counters:
            eventually(partial(self._beyond, counter, after[counter]), f"{counter} to go on", 10)
        eventually(lambda: len(self.progress()["fired"]) == _TIMERS, "the timers to fire", 20)

    def assert_whole(self, stood_s: float) -> dict[str, Any]:
        """End the job: everything that the kernel kept for it is as it was. ``stood_s``: how long
        it may have stood still, at most; its timers are late by no more. Returns its report."""
        self.job.stop()
        report: dict[str, Any] = json.loads((self.job.out / "report.json").read_text())
        assert report["leap"] <= 0.05, "CLOCK_MONOTONIC leapt"
        assert report["armed"] < report["deadline"]
        for what, fired in report["fired"].items():
            late = fired - report["deadline"]
            early = -1.0 if what == "timerfd, absolute" else -0.02  # CRIU drops its nanoseconds
            assert early <= late < stood_s + 0.5, f"{what} fired {late:+.3f} s off its deadline"
        assert report["signals"] == 3
        if self._server:
            assert report["conversation"] == "whole"
        assert len(set(report["counters"])) == 1
        assert report["shm_after"] == report["shm"]
        assert report["epoll"] == [True], "the set holds a file that only a child has open"
        assert report["unlinked"] == "never had a name"
        assert report["tmp"] == "private to this capsule"
        assert (report["pipe"], report["socketpair"]) == ("in flight", "in a socket")
        assert report["half closed after"] == report["half closed"], "no error is reported of them"
        assert report["rest"] == ["", "sent before the close"]
        assert report["reserved"] == 1 << 40
        return report

    def _beyond(self, what: str, value: int) -> bool:
        return bool(self.progress()[what] > value)


@contextmanager
def counting_server(lab: LabSession, host: str, report: Path) -> Iterator[str]:
    """A server on a lab host, which must have seen one whole conversation; yields its address."""
    machine = lab.lab.hosts[host]
    serve = [sys.executable, str(JOBS / "counting_server.py"), machine.address, str(_PORT)]
    with subprocess.Popen(
        [*labs.entry(machine), *serve, str(report)], stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"listening\n"
        try:
            yield f"{machine.address}:{_PORT}"
        finally:
            server.terminate()
    talked = json.loads(report.read_text())
    assert talked["problem"] == "none"
    assert talked["peer"].startswith("10.99."), "seen under its mobile address"
