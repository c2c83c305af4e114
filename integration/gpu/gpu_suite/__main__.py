# SPDX-License-Identifier: Apache-2.0
"""``integration/gpu/run``: the steps, one after the other, within one budget."""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from json import dumps
from pathlib import Path

import liveshift

from . import alone, plan, xid
from .machine import Machine, from_json
from .report import Report
from .step import Outcome

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
BUILD = ROOT / "build" / "gpu-suite"
RESULTS = HERE.parent / "results"
SIMULATED_GPUS = "GPU-51c0da00-0000-4000-8000-000000000001:H200:3GiB"


def main() -> int:
    """0 when every step that the machine allowed has passed, and one was allowed."""
    parser = argparse.ArgumentParser(prog="integration/gpu/run", description=__doc__)
    parser.add_argument("steps", nargs="*", metavar="STEP", help="of E1 … E10; all without any")
    parser.add_argument("--deadline", type=float, default=1e6, help="seconds for one step")
    parser.add_argument("--budget", type=float, default=plan.BUDGET_S, help="seconds in all")
    parser.add_argument("--simulated", action="store_true", help="the doubles, even with a GPU")
    parser.add_argument("--short", action="store_true", help="as few repetitions as tell anything")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--commit", help="of this tree, where it is a copy without its history")
    parser.add_argument("--keep", action="store_true", help="leave the steps' folders in build/")
    args = parser.parse_args()
    try:
        args.steps = plan.named(args.steps)
    except KeyError as unknown:
        parser.error(f"no step {unknown}; there are {', '.join(s.name for s in plan.STEPS)}")
    work = BUILD / f"run-{os.getpid()}"
    work.mkdir(parents=True)
    alone.adopt_orphans()
    try:
        ours = _run(args, work)
    finally:
        if not args.keep:
            shutil.rmtree(work)
    ran = [outcome for outcome in ours if outcome.ran]
    return 0 if ran and all(outcome.passed for outcome in ran) else 1


def _run(args: argparse.Namespace, work: Path) -> list[Outcome]:
    """The steps, one after the other; the results are written after each."""
    began = float(os.environ.get("LIVESHIFT_GPU_SUITE_BEGAN", time.time()))
    environment = _environment(args.short)
    machine = None if args.simulated else _machine(environment)
    if machine is None:
        environment |= _doubles()
        machine = _machine(environment)
    if machine is None:
        raise SystemExit("error: no CUDA driver here, and the simulated one does not start")
    path = environment.get("LD_LIBRARY_PATH")
    environment["LD_LIBRARY_PATH"] = ":".join(filter(None, (machine.library_path, path)))
    (work / "machine.json").write_text(dumps(asdict(machine)))
    _say(f"{machine.gpu}, driver {machine.driver}, torch {machine.torch or 'none'}")
    folder = args.out or (BUILD / "results" if machine.simulated else RESULTS)
    if machine.simulated and folder.resolve() == RESULTS:
        raise SystemExit("error: the doubles give no result of a GPU: it does not go there")

    today = datetime.date.today().isoformat()
    report = Report(machine, liveshift.__version__, args.commit or _commit(), today, {})
    report.take_over(folder)
    written, ours = folder, []
    for step in args.steps:
        left = began + args.budget - time.time()
        lacking = [machine.lacks[need] for need in step.needs if need in machine.lacks]
        if lacking:
            outcome = Outcome(why="; ".join(lacking))
        elif left < (1 if machine.simulated else step.least_s):
            outcome = Outcome(why=f"{left:.0f} s of the budget were left")
        else:
            patience = step.deadline_s * (3 if machine.simulated else 1)  # few cores do it all
            limit = min(patience, left, args.deadline)
            earlier = xid.errors()
            outcome = alone.run(step, work / step.name, environment, limit)
            outcome.remarks += sorted(xid.errors() - earlier)
        ours.append(outcome)
        report.record(step.name, outcome)
        report.seconds = time.time() - began
        written = report.write(folder)
        told = "passed" if outcome.passed else "FAILED" if outcome.ran else "not run"
        _say(f"{step.name} {told:7} {outcome.seconds:6.1f} s  {step.title}  {outcome.why}")
    print(written)
    return ours


def _environment(short: bool) -> dict[str, str]:
    """What every step's processes get."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LD_PRELOAD", "SIMCUDA_"))}
    return kept | ({"LIVESHIFT_GPU_SUITE_SHORT": "1"} if short else {})


def _machine(environment: dict[str, str]) -> Machine | None:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gpu_suite.machine"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    except subprocess.TimeoutExpired:
        _say("the CUDA driver here does not answer")
        return None
    return from_json(done.stdout) if done.returncode == 0 else None


def _doubles() -> dict[str, str]:
    """The simulated libraries, built; what lets processes find them."""
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        from doubles.gpu.build import build
        from doubles.gpu.build_nccl import build_nccl
    finally:
        sys.path.pop(0)
    place = BUILD / "doubles"
    folders = [build(place).folder, build_nccl(place).parent]
    return {
        "LD_LIBRARY_PATH": ":".join(map(str, folders)),
        "SIMCUDA_DEVICES": SIMULATED_GPUS,
    }


def _commit() -> str:
    """Of this tree, "+" when it was changed since; "" where it is no checkout."""
    asked = ["git", "-c", "safe.directory=*", "-C", str(ROOT)]
    try:
        head = subprocess.run([*asked, "rev-parse", "--short=12", "HEAD"], capture_output=True)
        changed = subprocess.run([*asked, "status", "--porcelain"], capture_output=True)
    except OSError:
        return ""
    return head.stdout.decode().strip() + ("+" if changed.stdout else "")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
