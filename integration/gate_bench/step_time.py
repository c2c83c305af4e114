# SPDX-License-Identifier: Apache-2.0
"""A job's step time with and without the library.

Three jobs live at once, and only one of them runs at a time, for some steps, in turns: with the
library, without, and without again. The last two show what of a ratio is chance. They are started
anew several times, since processes differ for as long as they live by how their memory lies. The
instructions that the ranks executed are told as well: other work on the machine disturbs them less.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from liveshift.interposer import page_directory
from liveshift.interposer.library import library_path

JOB = Path(__file__).resolve().parents[1] / "jobs" / "step_job.py"
GOAL = 1.002
RANKS = 2


class Job:
    """The ranks of one job, doing steps when told to."""

    def __init__(self, ranks: list[subprocess.Popen[str]]) -> None:
        self._ranks = ranks

    def answers(self) -> list[str]:
        lines = []
        for rank in self._ranks:
            assert rank.stdout is not None
            lines.append(rank.stdout.readline().strip())
        assert all(lines), "a rank has ended"
        return lines

    def steps(self, count: int) -> tuple[float, float]:
        """Seconds of one step, of the slowest rank; instructions of all ranks, 0 where the
        machine does not count them."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{count}\n")
            rank.stdin.flush()
        told = [[float(word) / count for word in line.split()] for line in self.answers()]
        return max(wall for wall, _ in told), sum(count for _, count in told)


@contextmanager
def job(pages: Path | None, folder: Path, name: str) -> Iterator[Job]:
    """A job of two ranks on loopback; with the library if it has a folder for pages."""
    with ExitStack() as cleanup:
        ranks = []
        for rank in range(RANKS):
            environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"} | {
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            }
            if pages is not None:
                environment |= {"LD_PRELOAD": str(library_path()), "LIVESHIFT_PAGES": str(pages)}
            process = subprocess.Popen(
                [sys.executable, JOB, folder / name],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            ranks.append(cleanup.enter_context(process))
            cleanup.callback(process.kill)
        started = Job(ranks)
        started.answers()
        yield started
        for process in ranks:
            assert process.stdin is not None
            process.stdin.close()
        for process in ranks:
            assert process.wait(60) == 0


def measure(launches: int = 12, turns: int = 60, steps: int = 3) -> dict[str, Any]:
    """``step_time_ratio``: the median of with / without; ``…_null``: of without / without."""
    wall: dict[str, list[float]] = {"with": [], "null": []}
    work: dict[str, list[float]] = {"with": [], "null": []}
    by_launch: list[float] = []
    step_s: list[float] = []
    for _ in range(launches):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name, ExitStack() as cleanup:
            folder = Path(name)
            (folder / "pages").mkdir()
            jobs = {
                which: cleanup.enter_context(job(pages, folder, which))
                for which, pages in (("with", folder / "pages"), ("without", None), ("null", None))
            }
            for each in jobs.values():
                each.steps(10)  # warm
            order = list(jobs)
            for _ in range(turns):
                random.shuffle(order)
                took = {which: jobs[which].steps(steps) for which in order}
                alone = took["without"]
                for which in wall:
                    wall[which].append(took[which][0] / alone[0])
                    if alone[1]:
                        work[which].append(took[which][1] / alone[1])
                step_s.append(alone[0])
            by_launch.append(round(statistics.median(wall["with"][-turns:]), 5))
            counted = [
                each.begun["gloo.allreduce"] for each in page_directory.pages(folder / "pages")
            ]
            assert len(counted) == RANKS, "the library was not there"
            assert min(counted) >= turns * steps, "the library did not see the job"
    return {
        "step_time_ratio": round(statistics.median(wall["with"]), 5),
        "step_time_ratio_null": round(statistics.median(wall["null"]), 5),
        "step_time_ratio_by_launch": by_launch,
        "step_instructions_ratio": _median(work["with"]),
        "step_instructions_ratio_null": _median(work["null"]),
        "step_time_s": round(statistics.median(step_s), 6),
        "step_time_pairs": len(step_s),
        "allreduces_per_step": round(min(counted) / (turns * steps + 10), 1),
        "goal_step_time_ratio": GOAL,
    }


def _median(ratios: list[float]) -> float | None:
    return round(statistics.median(ratios), 5) if ratios else None
