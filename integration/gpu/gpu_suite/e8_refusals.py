# SPDX-License-Identifier: Apache-2.0
"""E8: what cannot move is refused in words before anything is frozen, and goes on.

Managed memory, memory shared by IPC, a graph with NCCL in it, a forked worker that holds the
driver's files; beside them one process with nothing of the kind, which must not be refused. Then
what the bare driver says when it is made to checkpoint such processes.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

from lab_session import LabSession, eventually

from .child import Child
from .lab import in_capsule, lab
from .step import Step

JOB = Path(__file__).resolve().parent / "jobs" / "unmovable.py"
WORDS = {
    "managed": "managed memory",
    "ipc": "IPC",
    "graph": "graphs",
    "forked": "fork",
    "nothing": "",
}
"""What the refusal must speak of."""
REFUSED = 5


def measure(step: Step) -> None:
    step.begin()
    with lab(step, 2, "--slots", str(len(WORDS))) as session:
        kinds = [kind for kind in WORDS if kind != "forked" or not step.simulated]
        if len(kinds) < len(WORDS):
            step.remark("the doubles have no device files that a forked worker could hold")
        for kind in kinds:
            out = step.work / kind
            command = [*in_capsule(step), sys.executable, str(JOB), kind, str(out)]
            session.cli("run", "--detach", "--name", kind, "--", *command)
        for kind in kinds:
            with step.part(kind):
                _asked(step, session, kind, WORDS[kind])
    for kind in ("managed", "ipc"):
        with step.part(f"the driver, {kind}"):
            _driver(step, kind)


def _asked(step: Step, session: LabSession, kind: str, word: str) -> None:
    """``migrate --dry-run`` on a job that is under way."""
    out = step.work / kind
    eventually(lambda: out.exists() and out.stat().st_size, f"{kind} to start", 60)
    if not word:
        session.cli("migrate", f"{kind}/0", "--dry-run")
        step.figure(f"{kind}/said", "it can move")
        return
    said = session.refused("migrate", f"{kind}/0", "--dry-run", code=REFUSED)
    step.figure(f"{kind}/said", said)
    step.check(
        re.search(word, said) is not None, f"{kind}: the refusal does not say {word}: {said}"
    )
    step.check("hint" in said, f"{kind}: no remedy is named")
    size = out.stat().st_size
    eventually(lambda: out.stat().st_size > size, f"{kind} to go on", 20)


def _driver(step: Step, kind: str) -> None:
    """What it says itself, to an expendable process: for the facts, not for a verdict."""
    out = step.work / f"bare-{kind}"
    program = "gpu_suite.jobs.unmovable"
    with Child("outside", log=step.work) as caller, Child(program, kind, out, log=step.work) as it:
        caller.answer(60)
        until = time.monotonic() + 60
        while not out.exists() and time.monotonic() < until:
            time.sleep(0.05)
        for action in ("Lock", "Checkpoint", "Restore", "Unlock"):
            told = caller.ask([action, it.pid], min(30, step.left_s))
            step.figure(f"{kind}/driver, {action.lower()}", told)
            if told["result"] != 0:
                break
