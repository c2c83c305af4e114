# SPDX-License-Identifier: Apache-2.0
"""E6: of two NCCL ranks on one GPU (each its own NCCL_HOSTID, so by sockets) one moves.

Quiesced at a collective boundary, communicators torn down, moved, rebuilt: DDP, then FSDP2, bit by
bit what an undisturbed run computes. Where torch has no CUDA, jobs/device_ddp.py takes the place.
"""

from __future__ import annotations

import sys

from lab_session import JOBS

from .e5_training import GPT
from .lab import in_capsule, lab
from .moved import compare
from .step import Step


def measure(step: Step) -> None:
    step.begin()
    python, out = sys.executable, ("--out", "{out}")
    how = (*out, "--steps", "2000", "--enough", "{out}/enough")
    if step.machine.torch_cuda:
        training = (python, str(GPT), *how, "--pace", "0.1", "--depth", "4")
        jobs = {how: (*training, "--wrap", how) for how in ("ddp", "fsdp")}
    else:
        step.remark("no torch with CUDA here: DDP by ctypes, computed on the CPU; no FSDP2")
        script = str(JOBS / "device_ddp.py")
        jobs = {"ctypes": (python, script, *out, "--steps", "120", "--pace", "0.05")}
    with lab(step, 3) as session:
        for name, job in jobs.items():
            with step.part(name):
                argv = (*in_capsule(step), *job)
                moved = compare(step, session, name, argv, [(1, "")], ranks=2)
                _rebuilt(step, name, moved.moves)
    step.check(step.outcome.bit_identical is not None, "no job was compared")


def _rebuilt(step: Step, name: str, moves: list) -> None:  # type: ignore[type-arg]
    """The move found a boundary of NCCL's clocks, and made the communicators again."""
    for row in moves:
        detail = {phase.name: phase.detail for phase in row.phases}
        step.check("of nccl" in detail.get("quiesce", ""), f"{name}: no boundary: {detail}")
        step.check("rebuilt" in detail.get("reopen", ""), f"{name}: nothing was rebuilt: {detail}")
