# SPDX-License-Identifier: Apache-2.0
"""E7: the contract programs, on the driver, runtime and NCCL of this machine.

What the doubles claim CUDA and NCCL to do is written in integration/gpu/contract/*.c; the tests
hold the doubles to it. A program that fails on a GPU has found a bug in the doubles.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from contract import run, run_nccl

from .step import CannotRun, Step

PATIENCE_S = 40.0
"""For one program; the real NCCL takes seconds for a communicator."""
LINES = 12
"""Of a failed program's output, the last ones."""


def measure(step: Step) -> None:
    machine = step.machine
    if not machine.libcudart:
        raise CannotRun("there is no libcudart.so.13 here, neither in the toolkit nor beside torch")
    step.begin()
    cuda = [Path(machine.libcuda), Path(machine.libcudart)]
    failed = []
    for name in run.PROGRAMS:
        if not _cuda(step, name, cuda):
            failed.append(name)
    if machine.libnccl:
        libraries = run_nccl.Libraries(Path(machine.libcuda), Path(machine.libnccl))
        for name in run_nccl.PROGRAMS:
            if not _nccl(step, name, libraries):
                failed.append(name)
    else:
        step.remark("no libnccl.so.2 here: NCCL's programs were left out")
    if not step.simulated:
        step.check(not failed, f"the doubles claim what is not so: {', '.join(failed)}")
    else:
        step.check(not failed, f"the doubles break their contract: {', '.join(failed)}")


def _cuda(step: Step, name: str, libraries: list[Path]) -> bool:
    try:
        result = run.run(name, step.work, libraries, timeout=min(PATIENCE_S, step.left_s))
    except subprocess.CalledProcessError as error:
        step.figure(f"{name}/failed", f"does not compile or link here: {error}")
        return False
    except subprocess.TimeoutExpired as error:
        return _hung(step, name, error)
    where = "simulated" if step.simulated else "real"
    right = result.code == 0 and f"on {where}:" in result.output
    step.figure(f"{name}/passed", right)
    step.figure(f"{name}/claims that hold", len(result.passed))
    if not right:
        step.figure(f"{name}/output", result.output.splitlines()[-LINES:])
    return right


def _nccl(step: Step, name: str, libraries: run_nccl.Libraries) -> bool:
    run_nccl.TIMEOUT_S = min(PATIENCE_S, step.left_s)
    try:
        lines = run_nccl.run_program(name, libraries, step.work)
    except subprocess.TimeoutExpired as error:
        return _hung(step, name, error)
    except subprocess.CalledProcessError as error:
        step.figure(f"{name}/passed", False)
        said = (error.stdout or "").splitlines()
        step.figure(f"{name}/output", [str(error), *said[-LINES:]])
        return False
    step.figure(f"{name}/passed", True)
    step.figure(f"{name}/claims that hold", len([line for line in lines if line.startswith("ok ")]))
    return True


def _hung(step: Step, name: str, error: subprocess.TimeoutExpired) -> bool:
    said = error.stdout or b""
    text = said.decode(errors="replace") if isinstance(said, bytes) else said
    step.figure(f"{name}/passed", False)
    step.figure(f"{name}/output", [f"hung for {error.timeout:.0f} s", *text.splitlines()[-LINES:]])
    return False
