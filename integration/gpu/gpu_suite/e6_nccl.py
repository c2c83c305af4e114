# SPDX-License-Identifier: Apache-2.0
"""E6: of two NCCL ranks on one GPU (each its own NCCL_HOSTID, so by sockets) one moves.

Quiesced at a collective boundary, communicators torn down, moved, rebuilt: a pipeline whose ranks
use the GPU in turns, then DDP and FSDP2, bit by bit what an undisturbed run computes. Where torch
has no CUDA, jobs/device_ddp.py takes the place.

DDP and FSDP2 need a GPU that switches between the ranks in the middle of a kernel. Where the bare
driver cannot do that with a process that it has restored (sharing.py), they are left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lab_session import JOBS
from moving_job import Job

from liveshift.criu_glue.capsule.sandboxes import PAGES
from liveshift.interposer.page import opened
from liveshift.interposer.page_directory import paths

from . import sharing
from .e5_training import GPT
from .lab import in_capsule, lab
from .moved import compare
from .step import Step

TURNS = GPT.with_name("turns.py")


def measure(step: Step) -> None:
    step.begin()
    python, out = sys.executable, ("--out", "{out}")
    how = (*out, "--steps", "2000", "--enough", "{out}/enough")
    jobs: dict[str, tuple[str, ...]]
    if step.machine.torch_cuda:
        jobs = {"in turns": (python, str(TURNS), *how, "--pace", "0.1")}
        training = (python, str(GPT), *how, "--pace", "0.1", "--depth", "4")
        shares = False
        with step.part("sharing"):
            shares = sharing.works(step)
        if shares:
            jobs |= {how: (*training, "--wrap", how) for how in ("ddp", "fsdp")}
        else:
            step.remark(
                "no DDP, no FSDP2: after the bare driver's checkpoint a process of this GPU cannot"
                " share it any more; they need a GPU for each rank"
            )
    else:
        step.remark("no torch with CUDA here: DDP by ctypes, computed on the CPU; no FSDP2")
        script = str(JOBS / "device_ddp.py")
        jobs = {"ctypes": (python, script, *out, "--steps", "300", "--pace", "0.05")}
    with lab(step, 3) as session:
        for name, job in jobs.items():
            with step.part(name):
                argv = (*in_capsule(step, OPENBLAS_NUM_THREADS="1"), *job)
                moved = compare(step, session, name, argv, [(1, "")], ranks=2, after=_slowest)
                _rebuilt(step, name, moved)
    step.check(step.outcome.bit_identical is not None, "no job was compared")


def _slowest(step: Step, where: str, job: Job) -> None:
    """What the ranks' own service threads took for all their communicators, the slower of them."""
    took = {"drained_ns": 0.0, "torn_down_ns": 0.0, "rebuilt_ns": 0.0}
    count = 0
    for index in range(job.nnodes):
        pid = next(iter(job.seen(index).tasks.values()))
        for path in paths(Path(f"/proc/{pid}/root{PAGES}")):
            with opened(path) as page:
                answer = page.answer()
                count = max(count, len(page.communicators()))
                took = {name: max(value, answer[name] / 1e9) for name, value in took.items()}
    step.figure(f"{where}/communicators", count)
    step.figure(f"{where}/streams drained_s", took["drained_ns"])
    for name in ("torn_down_ns", "rebuilt_ns"):
        what = name.removesuffix("_ns").replace("_", " ")
        step.figure(f"{where}/{what}, a communicator_s", took[name] / max(1, count))


def _rebuilt(step: Step, name: str, job: Job) -> None:
    """The move found a boundary of NCCL's clocks, and made the communicators again."""
    for row in job.moves:
        detail = {phase.name: phase.detail for phase in row.phases}
        step.check("of nccl" in detail.get("quiesce", ""), f"{name}: no boundary: {detail}")
        step.check("rebuilt" in detail.get("reopen", ""), f"{name}: nothing was rebuilt: {detail}")
