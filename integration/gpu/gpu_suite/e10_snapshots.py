# SPDX-License-Identifier: Apache-2.0
"""E10: the pause of a snapshot per GiB of device memory, and a rewind after a rank is killed.

A training process by ctypes with two sizes of further device memory, which it writes once. Two
snapshots are taken of each; then its rank gets SIGKILL, and its job goes back to the newest one, on
the one GPU. The losses and each byte of device memory must be those of a run that nobody disturbed.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Sequence

from gpu_lab import TRAIN
from lab_session import LabSession, eventually
from moving_job import Job
from protected_job import events

from .lab import in_capsule, lab
from .moved import AFTER, BEFORE, undisturbed
from .step import MIB, Step

EVERY_S = 3.0
SIZES = (1, 4)
"""GiB on a GPU. On the doubles SIMULATED_MIB stand for each."""
SIMULATED_MIB = 32
SNAPSHOTS = 2

_COMPLETE = re.compile(r"(s\d+) of (\S+): complete, .*, paused for ([\d.]+) s \(([^)]*)\)")


def measure(step: Step) -> None:
    step.begin()
    if step.simulated:
        step.remark("on the simulated driver: these are no seconds of a GPU")
    training = (sys.executable, TRAIN, "--out", "{out}", "--steps", "2000", "--pace", "0.05")
    pauses: dict[int, float] = {}
    with lab(step, 2, "--snapshots", f"every={EVERY_S:g}") as session:
        for size in SIZES:
            mib = size * (SIMULATED_MIB if step.simulated else 1024)
            name = f"{mib}mib"
            with step.part(name):
                enough = ("--enough", "{out}/enough", "--ballast", str(mib))
                argv = (*in_capsule(step, OPENBLAS_NUM_THREADS="1"), *training, *enough)
                pauses[mib] = _job(step, session, name, argv)
    if len(pauses) == len(SIZES):
        (small, short), (large, long) = sorted(pauses.items())
        step.figure("pause per GiB_s", (long - short) / ((large - small) / 1024))
    step.check(step.outcome.bit_identical is not None, "no job was compared")


def _job(step: Step, session: LabSession, name: str, argv: Sequence[str]) -> float:
    """Let one job be snapshotted and killed; return the seconds of its last pause before that."""
    job = session.start(name, argv, nnodes=1)
    job.wait_step(BEFORE, timeout=step.left_s)
    eventually(lambda: len(_told(session, name)) >= SNAPSHOTS, "snapshots", step.left_s)
    for number, (pause, parts) in enumerate(_told(session, name)[:SNAPSHOTS], 1):
        step.figure(f"{name}/snapshot {number}/pause_s", pause)
        for part, seconds in parts.items():
            step.figure(f"{name}/snapshot {number}/{part}_s", seconds)
    row = job.protection()
    step.figure(f"{name}/images_bytes", row.bytes)
    step.check(row.bytes > int(name.removesuffix("mib")) * MIB, f"{name}: no device memory came")
    _kill(step, job)
    (job.out / "enough").touch()
    result = job.result(1)
    wanted = undisturbed(step, argv, 1, len(result.losses[0]))
    same = result == wanted
    step.figure(f"{name}/bit_identical", same)
    step.check(same, f"{name}: not what the undisturbed run computed")
    step.outcome.bit_identical = same and step.outcome.bit_identical is not False
    return pause


def _kill(step: Step, job: Job) -> None:
    """Kill the rank with SIGKILL, and wait until it trains again from its snapshot."""
    (pid,) = job.seen(0).tasks.values()
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    (rewound,) = eventually(lambda: events(job, "rewound"), "the rewind", step.left_s)
    job.go_on(AFTER)
    first = min(made["time"] for made in job.steps(0) if made["time"] > killed)
    step.figure(f"{job.name}/kill to the first new step_s", first - killed)
    step.figure(f"{job.name}/rewind", rewound.text)
    step.check("was ended by SIGKILL" in events(job, "rewinding")[0].text, "why was it rewound?")


def _told(session: LabSession, name: str) -> list[tuple[float, dict[str, float]]]:
    """The pause of each snapshot of a job so far, with its parts, in seconds."""
    found = _COMPLETE.findall(session.lab.log("ctl").read_text())
    return [
        (float(pause), {part: float(s) for part, s in map(str.split, parts.split(", "))})
        for _, job, pause, parts in found
        if job == name
    ]
