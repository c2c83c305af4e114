# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, a kill and a new start on the other host: what a job without migration does.

In its favour: the kill is noticed at once, a host is free, the checkpoint is read from this
machine's page cache, and what saving costs while it trains is not counted.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from pathlib import Path

from liveshift.launcher.lab import Lab

from .cases import Case, Effort
from .machine import PATIENCE_S, emptied, inside, on_host, training
from .moves import Tell
from .record import Restart
from .steps import StepTail

FIRST = 4
"""The step after which the first checkpoint is made; then one every ``effort.every``."""


def measure(lab: Lab, case: Case, effort: Effort, out: Path, tell: Tell) -> list[Restart]:
    """Kill the case's job so often at a random step, and start it on the other host."""
    hosts = [lab.machine("h0"), lab.machine("h1")]
    chance = random.Random(case.kind + str(case.gb))
    found = []
    for number in range(effort.restarts):
        tell(f"restart {number + 1} of {effort.restarts}")
        lost = chance.randrange(1, effort.every)
        emptied(out)
        checkpoint = out / "checkpoint.pt"
        saving = ("--checkpoint", str(checkpoint), "--every", str(effort.every))
        argv = [*training(case, effort), *saving, "--after", str(FIRST)]
        first, second = StepTail(out / "a/rank0.jsonl"), StepTail(out / "b/rank0.jsonl")
        with on_host(hosts[0], inside(out / "a", argv), out / "output") as job:
            first.wait(FIRST + lost, PATIENCE_S, lambda: _alive(job, out))
            job.kill()
            killed = time.time()
        reached = first.look()
        with on_host(hosts[1], inside(out / "b", argv), out / "output") as job:
            second.wait(reached, PATIENCE_S, lambda: _alive(job, out))
        assert second.numbers[0] == FIRST + 1 + (reached - FIRST) // effort.every * effort.every
        again = second.numbers.index(reached)
        assert second.losses[again] == first.losses[-1], "it does not compute the same again"
        began, ended = second.times[0], second.times[again]
        step_s = (ended - began) / again if again else 0.0
        first_step_s = began - killed
        found.append(
            Restart(
                seen_s=ended - killed,
                expected_s=first_step_s + (effort.every / 2 - 1) * step_s,
                lost_steps=reached - second.numbers[0] + 1,
                first_step_s=first_step_s,
                step_s=step_s,
                checkpoint_bytes=checkpoint.stat().st_size,
            )
        )
        shutil.rmtree(out)
    return found


def _alive(job: subprocess.Popen[str], out: Path) -> None:
    code = job.poll()
    assert code is None, f"it ended with {code}:\n{(out / 'output').read_text()}"
