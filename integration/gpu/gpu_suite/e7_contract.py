# SPDX-License-Identifier: Apache-2.0
"""E7: the contract programs, on the driver, runtime and NCCL of this machine.

What the doubles claim CUDA and NCCL to do is written in integration/gpu/contract/*.c; the tests
hold the doubles to it. A program that fails on a GPU has found a bug in the doubles.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

from contract import run, run_nccl

from .step import CannotRun, Step

Result = dict[str, Any]
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
    run_nccl.TIMEOUT_S = min(PATIENCE_S, step.left_s)
    work: list[tuple[str, Callable[[], Result]]] = [
        (name, partial(_cuda, step, name, cuda)) for name in run.PROGRAMS
    ]
    if machine.libnccl:
        libraries = run_nccl.Libraries(Path(machine.libcuda), Path(machine.libnccl))
        work += [(name, partial(_nccl, step, name, libraries)) for name in run_nccl.PROGRAMS]
    else:
        step.remark("no libnccl.so.2 here: NCCL's programs were left out")
    failed = []
    # Some wait for moments to pass: never more at a time than there are cores to spare.
    with ThreadPoolExecutor(max(1, machine.cores // 4)) as pool:
        under_way = {pool.submit(program): name for name, program in work}
        for done in as_completed(under_way):
            name, result = under_way[done], done.result()
            for what, value in result.items():
                step.figure(f"{name}/{what}", value)
            if not result["passed"]:
                failed.append(name)
    if not step.simulated:
        step.check(not failed, f"the doubles claim what is not so: {', '.join(failed)}")
    else:
        step.check(not failed, f"the doubles break their contract: {', '.join(failed)}")


def _cuda(step: Step, name: str, libraries: list[Path]) -> Result:
    try:
        result = run.run(name, step.work, libraries, timeout=min(PATIENCE_S, step.left_s))
    except subprocess.CalledProcessError as error:
        return {"passed": False, "output": f"does not compile or link here: {error}"}
    except subprocess.TimeoutExpired as error:
        return _hung(error)
    where = "simulated" if step.simulated else "real"
    right = result.code == 0 and f"on {where}:" in result.output
    told: Result = {"passed": right, "claims that hold": len(result.passed), **_notes(result)}
    return told if right else told | {"output": result.output.splitlines()[-LINES:]}


def _notes(result: run.Result) -> Result:
    """What a program asked of which nothing is claimed: "note WORDS: NUMBER"."""
    lines = [line for line in result.output.splitlines() if line.startswith("note ")]
    return {
        what.removeprefix("note "): value for what, _, value in (x.rpartition(": ") for x in lines)
    }


def _nccl(step: Step, name: str, libraries: run_nccl.Libraries) -> Result:
    try:
        lines = run_nccl.run_program(name, libraries, step.work)
    except subprocess.TimeoutExpired as error:
        return _hung(error)
    except subprocess.CalledProcessError as error:
        said = (error.stdout or "").splitlines()
        return {"passed": False, "output": [str(error), *said[-LINES:]]}
    claims = len([line for line in lines if line.startswith("ok ")])
    return {"passed": True, "claims that hold": claims}


def _hung(error: subprocess.TimeoutExpired) -> Result:
    said = error.stdout or b""
    text = said.decode(errors="replace") if isinstance(said, bytes) else said
    lines = [f"hung for {error.timeout:.0f} s", *text.splitlines()[-LINES:]]
    return {"passed": False, "output": lines}
