# SPDX-License-Identifier: Apache-2.0
"""The steps, in the order in which they are done: what the design hangs on comes first."""

from __future__ import annotations

from dataclasses import dataclass

LAB = ("root", "namespaces", "tools", "criu")


@dataclass(frozen=True)
class Step:
    """One step; ``gpu_suite.<module>`` has its ``measure(step)``."""

    name: str
    module: str
    title: str
    deadline_s: float
    """For all of it, on a GPU; less where the budget has less."""
    least_s: float
    """With less than this left it is not begun."""
    needs: tuple[str, ...] = ()
    """Of machine.Machine.lacks."""


STEPS = (
    Step("E3", "e3_unmapped", "checkpoint with device memory given away", 75, 20),
    Step("E2", "e2_ring", "copies through the pinned ring, against the link", 45, 15),
    Step("E1", "e1_plain", "the driver's own checkpoint", 110, 30),
    Step("E4", "e4_fast", "the fast path, whole", 80, 30, ("interposer",)),
    Step("E5", "e5_training", "a training process moves to another host and back", 180, 60, LAB),
    Step("E6", "e6_nccl", "one of two NCCL ranks moves", 240, 45, (*LAB, "nccl")),
    Step("E10", "e10_snapshots", "pause of a snapshot per GiB, and a rewind", 200, 60, LAB),
    Step("E7", "e7_contract", "what the doubles claim, on this driver and NCCL", 60, 15),
    Step("E9", "e9_overhead", "what the interposer and its allocator cost", 120, 40, ("nccl",)),
    Step("E8", "e8_refusals", "what cannot move is refused in words", 60, 25),
)
BUDGET_S = 520.0
"""All of it is to end within nine minutes on the reference machine (one H200)."""


def named(names: list[str]) -> list[Step]:
    """The steps of these names in the plan's order, all without any; raises KeyError with the one
    unknown."""
    known = {step.name: step for step in STEPS}
    wanted = {known[name.upper()].name for name in names} or set(known)
    return [step for step in STEPS if step.name in wanted]
