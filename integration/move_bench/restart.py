# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, a kill and a new start on the other host: what a job without migration does.

In its favour: the kill is noticed at once, a host is free, the checkpoint is read from this
machine's page cache, and what saving costs while it trains is not counted.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from functools import partial
from pathlib import Path

from host_programs import emptied, inside, on_host

from liveshift.launcher.lab import Lab

from .cases import Case, Effort
from .machine import PATIENCE_S, training
from .moves import Tell
from .record import Restart
from .steps import StepTail

FIRST = 4
"""The step after which the first checkpoint is made; then one every ``effort.every``."""


def measure(lab: Lab, case: Case, effort: Effort, out: Path, tell: Tell) -> list[Restart]:
    """Kill the case's job so often, and start it on the other host each time.

    One after the other: what was started anew is killed next, before its next checkpoint.
    """
    hosts = [lab.machine("h0"), lab.machine("h1")]
    checkpoint = emptied(out) / "checkpoint.pt"
    saving = ("--checkpoint", str(checkpoint), "--every", str(effort.every))
    argv = [*training(case, effort), *saving, "--after", str(FIRST)]
    found: list[Restart] = []
    before, killed = StepTail(out / "never"), 0.0
    for number, lost in enumerate([*kills(effort.restarts, effort.every), 0]):
        tell(f"restart {max(1, number)} of {effort.restarts}")
        place = out / str(number)
        log = StepTail(place / "rank0.jsonl")
        with on_host(hosts[number % 2], inside(place, argv), out / "output") as job:
            alive = partial(_alive, job, out)
            if number:
                reached = before.look()
                log.wait(reached, PATIENCE_S, alive)
                found.append(_redone(before, log, killed, reached, checkpoint))
            if lost:
                log.wait(FIRST + lost, PATIENCE_S, alive)
            job.kill()
            killed = time.time()
        before = log
    shutil.rmtree(out)
    return found


def kills(count: int, every: int) -> list[int]:
    """After so many steps since the checkpoint: evenly apart, so that their median is that of kills
    at any time."""
    middles = [(number + 0.5) * every / count for number in range(count)]
    return [max(1, min(every - 5, round(each))) for each in middles]


def _redone(
    before: StepTail, log: StepTail, killed: float, reached: int, checkpoint: Path
) -> Restart:
    assert log.numbers[0] == FIRST + 1, "it goes on from the only checkpoint"
    again = log.numbers.index(reached)
    assert log.losses[again] == before.losses[-1], "it does not compute the same again"
    return Restart(
        seconds=log.times[again] - killed,
        lost_steps=reached - FIRST,
        first_step_s=log.times[0] - killed,
        checkpoint_bytes=checkpoint.stat().st_size,
    )


def _alive(job: subprocess.Popen[str], out: Path) -> None:
    code = job.poll()
    assert code is None, f"it ended with {code}:\n{(out / 'output').read_text()}"
