# SPDX-License-Identifier: Apache-2.0
"""E5: a training process moves to another lab host and back; both see the one GPU.

A GPT of 1e8 parameters, bf16, AdamW, with torch.compile off and on, deterministic: its losses and
the SHA-256 of its parameters must be those of a run that nobody moved. Where torch has no CUDA, on
the doubles, jobs/device_train.py takes its place: parameters and optimizer state in device memory
only, computed on the CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gpu_lab import TRAIN

from .lab import in_capsule, lab
from .moved import compare
from .step import Step

GPT = Path(__file__).resolve().parent / "jobs" / "gpt.py"


def measure(step: Step) -> None:
    step.begin()
    python = sys.executable
    how = ("--out", "{out}", "--steps", "2000", "--enough", "{out}/enough")
    if step.machine.torch_cuda:
        training = (python, str(GPT), *how, "--pace", "0.1")
        jobs = {"eager": training, "compiled": (*training, "--compile")}
    else:
        step.remark("no torch with CUDA here: a job by ctypes, computed on the CPU, took the place")
        jobs = {"ctypes": (python, TRAIN, *how, "--pace", "0.05")}
    with lab(step, 2) as session:
        for name, job in jobs.items():
            with step.part(name):
                argv = (*in_capsule(step, OPENBLAS_NUM_THREADS="1"), *job)
                moved = compare(step, session, name, argv, [(0, ""), (0, "")])
                step.check(
                    "simulated" in moved.output() or not step.simulated, "on what did it run?"
                )
    step.check(step.outcome.bit_identical is not None, "no job was compared")
