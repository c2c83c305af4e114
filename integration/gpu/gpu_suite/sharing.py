# SPDX-License-Identifier: Apache-2.0
"""Whether a process that the driver has checkpointed and restored can still share its GPU.

Two NCCL ranks on one GPU wait for each other inside their kernels, so the GPU has to switch from
one process to the other in the middle of a kernel. On driver 580.159 the restored rank ended with
Xid 109 (context switch timeout) 4.3 s after the move. Here two processes run one long kernel each
at the same time, before and after one of them was checkpointed by the bare driver. No part
of liveshift is involved.
"""

from __future__ import annotations

from typing import Any

from .child import Child, WorkerFailed
from .step import Step

SPIN_S = 6.0
"""Longer than the driver waits for a switch."""
ACTIONS = ("Lock", "Checkpoint", "Restore", "Unlock")


def works(step: Step) -> bool:
    """Try it, and set the figures; False also if the restored process fails by itself."""
    with (
        Child("outside", log=step.work) as caller,
        Child("spin", log=step.work) as one,
        Child("spin", log=step.work) as other,
    ):
        caller.answer(60)
        for child in (one, other):
            child.answer(60)
        before = _together(step, "before", one, other)
        for action in ACTIONS:
            told = caller.ask([action, other.pid], 30)
            step.check(told["result"] == 0, f"{action} gave {told}")
        alone = _told(step, "restored, alone", other)
        after = _together(step, "restored, together", one, other)
    step.check(before, "two processes cannot share this GPU even before a checkpoint")
    return alone and after


def _together(step: Step, when: str, *children: Child) -> bool:
    for child in children:
        child.say(SPIN_S)
    answers = [_answer(child) for child in children]
    step.figure(f"sharing/{when}", answers)
    return all("s" in answer for answer in answers)


def _told(step: Step, when: str, child: Child) -> bool:
    child.say(SPIN_S)
    answer = _answer(child)
    step.figure(f"sharing/{when}", answer)
    return "s" in answer


def _answer(child: Child) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = child.answer(4 * SPIN_S)
    except WorkerFailed as failed:
        return {"error": str(failed)}
    return answer
