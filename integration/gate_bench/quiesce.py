# SPDX-License-Identifier: Apache-2.0
"""Seconds from closing the gates of real ranks to the boundary, without agents and messages.

This process is agent and orchestrator in one: it drives the pages by the same HostGate and
CollectiveClock. What had begun when the gates closed has to come to its end first; that part is
told apart as ``in_flight_s``, up to the moment when the last operation of the cut came back.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liveshift.interposer.library import library_path
from liveshift.interposer.orders import OrderedPage, open_ordered
from liveshift.runtime.model.collective_clock import CollectiveClock
from liveshift.runtime.quiesce.host_gate import HostGate

JOB = Path(__file__).resolve().parents[1] / "jobs" / "quiesce_job.py"
LEASE_MS = 20_000
DEADLINE_S = 15.0
LOOK_S = 0.001


@dataclass(frozen=True)
class Boundary:
    """One that was reached. ``rounds``: versions of the targets."""

    seconds: float
    in_flight_s: float
    rounds: int


def to_boundary(pages: list[OrderedPage], attempt: int) -> Boundary:
    """Closes the gates, finds the boundary, holds it for a moment and opens again.

    Raises AssertionError, with the pending operations, when there is none within the deadline.
    """
    clock = CollectiveClock(["here"])
    began = time.monotonic()
    gate = HostGate(attempt, LEASE_MS, LEASE_MS)
    for page in pages:
        gate.admit(page)
    try:
        while (begun := gate.announced()) is None:
            _wait(gate, began)
        clock.add_report("here", begun)
        returned, last_return = -1, began
        while True:
            for host in clock.due():
                aim = clock.aim(host)
                gate.aim(aim.version, aim.targets, aim.pairs)
            back = sum(c.returned for page in gate.pages for c in page.clocks())
            if back != returned:
                returned, last_return = back, time.monotonic()
            clock.add_report("here", gate.report())
            if clock.converged:
                gate.close()
                if gate.report().reached:
                    break
            _wait(gate, began)
        done = time.monotonic()
        return Boundary(done - began, last_return - began, clock.version)
    finally:
        for page in pages:
            page.open()


def _wait(gate: HostGate, began: float) -> None:
    if time.monotonic() - began > DEADLINE_S:
        pending = gate.pending_returns(lambda page: page.pid)
        obstacles = [obstacle.text for obstacle in gate.obstacles()]
        raise AssertionError(f"no boundary after {DEADLINE_S:.0f} s: {pending} {obstacles}")
    gate.heartbeat()
    time.sleep(LOOK_S)


def run(size: int, boundaries: int, gap_s: float = 0.2) -> dict[str, Any]:
    """A job of that many ranks, brought to that many boundaries."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name, ExitStack() as cleanup:
        folder = Path(name)
        pages = folder / "pages"
        pages.mkdir()
        ranks = []
        for rank in range(size):
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LD_PRELOAD": str(library_path()),
                "LIVESHIFT_PAGES": str(pages),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            }
            process = subprocess.Popen(
                [sys.executable, JOB, folder / "store"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            ranks.append(cleanup.enter_context(process))
            cleanup.callback(process.kill)
        said = [_line(process) for process in ranks]
        assert said == ["training"] * size, said
        directory = os.open(pages, os.O_RDONLY | os.O_DIRECTORY)
        cleanup.callback(os.close, directory)
        opened = [open_ordered(path, directory) for path in sorted(pages.iterdir())]
        for page in opened:
            cleanup.callback(page.close)
        assert len(opened) == size
        reached = []
        for attempt in range(1, boundaries + 1):
            reached.append(to_boundary(opened, attempt))
            time.sleep(gap_s * (1 + attempt % 7 / 7))  # at another place of the step each time
        for process in ranks:
            assert process.stdin is not None
            process.stdin.close()
        ends = [_line(process).split() for process in ranks]
        assert len({end[2] for end in ends}) == 1, "the ranks' parameters differ"
        assert all(process.wait(60) == 0 for process in ranks)
    steps, seconds = int(ends[0][0]), float(ends[0][1])
    beyond = sorted(each.seconds - each.in_flight_s for each in reached)
    return {
        "ranks": size,
        "boundaries": len(reached),
        "quiesce_s": round(statistics.median(each.seconds for each in reached), 5),
        "quiesce_worst_s": round(max(each.seconds for each in reached), 5),
        "in_flight_s": round(statistics.median(each.in_flight_s for each in reached), 5),
        "beyond_s": round(statistics.median(beyond), 5),
        "beyond_worst_s": round(beyond[-1], 5),
        "rounds": max(each.rounds for each in reached),
        "step_s": round((seconds - sum(e.seconds for e in reached)) / steps, 5),
    }


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def measure(sizes: tuple[int, ...] = (2, 4, 8), boundaries: int = 20) -> dict[str, Any]:
    """``quiesce``: a row per number of ranks."""
    return {"quiesce": [run(size, boundaries) for size in sizes]}
