# SPDX-License-Identifier: Apache-2.0
"""E3: does the driver checkpoint a process whose reserved addresses have no memory behind them?

Reports conflict (half-unmapped: "checkpoint hangs"; elsewhere it works). Tried by hand, on
expendable processes under a deadline: all mapped, half, none; and none with the memory handed to
another process by descriptor and taken back, which is what the fast path does. Then what the
product's own probe says.
"""

from __future__ import annotations

import os

from .child import Child, WorkerFailed
from .resident import settled_helper
from .step import MIB, Step

VARIANTS = ("handed", "all", "half", "mapped")
"""What matters most comes first: it may hang."""
COUNT = 16
ACTIONS = ("Lock", "Checkpoint", "Restore", "Unlock")
DEADLINE_S = 25.0


def measure(step: Step) -> None:
    step.begin()
    size = 2 * MIB if step.simulated else 512 * MIB
    works = {}
    for variant in VARIANTS:
        try:
            works[variant] = _try(step, variant, size)
        except (WorkerFailed, AssertionError) as failed:
            works[variant] = False
            step.figure(f"{variant}/failed", str(failed))
    # That one works and another does not is an answer; that not even the plain one works is not.
    step.check(works["mapped"], "a process with mapped memory did not survive a checkpoint")
    for variant, works_ in works.items():
        step.figure(f"{variant}/works", works_)
    with step.part("the product's probe"):
        _, said = settled_helper(step)
        step.check(
            (said == "") == works["handed"],
            f"by hand memory given away {'works' if works['handed'] else 'does not work'}, "
            f'the product\'s probe says "{said or "available"}"',
        )


def _try(step: Step, variant: str, size: int) -> bool:
    """Whether the process came through it with its bytes; raises WorkerFailed."""
    name = f"liveshift-gpu-suite-{os.getpid()}"
    with (
        Child("outside", log=step.work) as caller,
        Child("keeper", size, name, log=step.work) as keeper,
    ):
        caller.answer(60)
        assert keeper.answer(60) == "ready"
        with Child("vmm", size, COUNT, variant, name, log=step.work) as child:
            step.figure(f"{variant}/unmapped", child.answer(60)["unmapped"])
            if variant == "handed":
                step.figure("handed/first words seen by the keeper", keeper.answer(30)["words"][:4])
            for action in ACTIONS:
                # A caller that hangs is killed only after the process that it works on.
                told = caller.ask([action, child.pid], min(DEADLINE_S, step.left_s))
                step.figure(f"{variant}/{action.lower()}", told)
                if told["result"] != 0:
                    return False
            after = child.ask("remap", 30)
            step.figure(f"{variant}/after", after)
            return bool(after["values_right"])
