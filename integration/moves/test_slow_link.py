# SPDX-License-Identifier: Apache-2.0
"""A job that writes faster than a link carries is not stopped for a move that could not end."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest
from lab_session import LabSession, NewLab, eventually

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(240)]

SIZE = 180_000_000
BUSY = """
import random, sys, time
memory = bytearray({size})
def ran_or_waited_s():
    with open("/proc/self/schedstat") as file:
        ran_ns, waited_ns, _ = map(int, file.read().split())
    return (ran_ns + waited_ns) / 1e9
with open(sys.argv[1], "w", buffering=1) as log:
    while True:
        memory[:] = random.randbytes({size})
        print(time.time() - ran_or_waited_s(), file=log)
"""
"""Writes all of its memory again and again, with what nothing compresses. It notes the time, less
that in which it ran or waited for a core: what is left grows while it is stopped."""


@pytest.fixture
def lab(new_lab: NewLab) -> LabSession:
    """A freeze may take 12 s."""
    return new_lab("--hosts", "2", "--timeouts", "collective=60,suspicion=2")


def longest_pause(log: Path) -> float:
    """The longest time between two lines in which the job neither ran nor waited for a core."""
    times = [float(line) for line in log.read_text().splitlines()]
    return max(later - earlier for earlier, later in pairwise(times))


def test_it_is_told_before_the_job_is_stopped(lab: LabSession) -> None:
    job = lab.start("busy", ("python", "-c", BUSY.format(size=SIZE), "{out}/log"))
    log = job.out / "log"
    eventually(lambda: log.exists() and len(log.read_text().splitlines()) > 5, "it to run", 30)
    before = job.seen(0)
    to = "h1" if before.host == "h0" else "h0"
    lab.cli("lab", "link", to, "--rate", "100mbit")
    asked = time.time()
    said = lab.cli("migrate", "busy/0", "--to", to, code=5, timeout=200)
    told = " ".join(said.err.split())
    assert "a freeze may take 12 s (timeouts.freeze). It was not stopped" in told
    assert time.time() - asked > 2 * SIZE / 12.5e6, "it was tried: some rounds went over"
    assert job.seen(0) == before, "the very same process, where it was"
    assert longest_pause(log) < 2, "and it was not stopped"
    lab.cli("lab", "link", to, "--rate", "none")
    row = job.migrate(0, to)
    assert row.image_bytes > SIZE / 2
