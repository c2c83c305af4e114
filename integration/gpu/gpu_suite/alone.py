# SPDX-License-Identifier: Apache-2.0
"""Runs a step in a process of its own, under a deadline, and ends all that it has started.

This process adopts what a step's processes leave behind (PR_SET_CHILD_SUBREAPER), so that they are
found however they detached themselves. What uses the GPU ends before whatever works on it from
outside: a caller of the driver that is killed in mid-operation can leave the driver out of step
(checkpoint-restore/criu#2547).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from .plan import Step
from .step import Outcome, read

_PR_SET_CHILD_SUBREAPER = 36
HELPER = "cuda_snapshot.helper"
LABS = "labs"
"""In a step's folder: names of the labs it has made, a line each."""


def adopt_orphans() -> None:
    """Be the parent of all orphans among our descendants."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run(step: Step, work: Path, environment: dict[str, str], deadline_s: float) -> Outcome:
    """The step's outcome; whatever happens in it, nothing of it runs afterwards."""
    work.mkdir(parents=True)
    began = time.monotonic()
    with (work / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "gpu_suite.step", step.name, str(work), str(deadline_s)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _clear(work, environment)
    process.wait()
    outcome = read(work)
    outcome.seconds = round(time.monotonic() - began, 1)
    if code is None:
        outcome.passed = False
        outcome.why = _joined(outcome.why, f"not done after {deadline_s:.0f} s")
    elif code != 0:
        outcome.passed = False
        outcome.why = _joined(outcome.why, f"its process ended with {code}: {_tail(work)}")
    return outcome


def _joined(*words: str) -> str:
    return "; ".join(word for word in words if word)


def _tail(work: Path) -> str:
    lines = (work / "output").read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "and said nothing"


def _clear(work: Path, environment: dict[str, str]) -> None:
    """End what the step has left: processes that use the GPU, labs, then helpers."""
    ours = psutil.Process()
    labs = (work / LABS).read_text().split() if (work / LABS).is_file() else []
    for lab in labs:
        down = [sys.executable, "-m", "liveshift.launcher", "lab", "down", lab]
        subprocess.run(down, env=environment, capture_output=True, timeout=60)
    everybody = ours.children(recursive=True)
    helpers = [each for each in everybody if _is_helper(each)]
    theirs = {child for helper in helpers for child in _children(helper)}
    _end([e for e in everybody if e not in helpers and e not in theirs], signal.SIGKILL, 10)
    _end(helpers, signal.SIGTERM, 15)
    _end(ours.children(recursive=True), signal.SIGKILL, 10)
    while True:  # those that were orphaned have no other parent who would take note of their end
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                break
        except ChildProcessError:
            break


def _is_helper(process: psutil.Process) -> bool:
    try:
        return any(HELPER in word for word in process.cmdline())
    except psutil.Error:
        return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = process.children(recursive=True)
        return found
    except psutil.Error:
        return []


def _end(processes: Iterable[psutil.Process], number: int, patience_s: float) -> None:
    living = list(processes)
    for each in living:
        try:
            each.send_signal(number)
        except psutil.Error:
            continue
    psutil.wait_procs(living, timeout=patience_s)
