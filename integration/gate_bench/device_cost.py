# SPDX-License-Identifier: Apache-2.0
"""What an NCCL collective and a pair of cudaMalloc and cudaFree cost more with the interposer.

On the doubles of CUDA and NCCL, whose streams are threads: what these execute differs from run to
run. So only the instructions inside the interposer are counted, as callgrind tells them by object.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from liveshift.interposer.library import LIBRARY, library_path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "tests"
CASES = {
    "allreduce": "nccl_collective",
    "malloc": "allocation",
    "malloc-large": "large_allocation",
    "malloc-large arena": "arena_allocation",
}
"""What the loop does, on the arena or not, and the end of a result's name."""
CALLS = 2_000


def build(folder: Path) -> tuple[Path, str]:
    """The loop, and where its libraries are."""
    sys.path.insert(0, str(TESTS))
    try:
        from doubles.gpu.build import build as build_cuda
        from doubles.gpu.build import program
        from doubles.gpu.build_nccl import build_nccl
    finally:
        sys.path.remove(str(TESTS))
    cuda, nccl = build_cuda(folder), build_nccl(folder)
    libraries = [nccl, cuda.libcudart, cuda.libcuda]
    loop = program(HERE / "loop_device.c", folder / "loop_device", libraries)
    return loop, f"{cuda.folder}:{nccl.parent}"


def self_cost(text: str) -> Counter[str]:
    """Instructions by object (the file's name), calls of others not included; see callgrind's
    manual on its format: costs follow their object; the line after "calls=" is the callee's."""
    names: dict[str, str] = {}
    costs: Counter[str] = Counter()
    current, of_callee = "", False
    for line in text.splitlines():
        if named := re.match(r"(c?)ob=\((\d+)\)(?: (.*))?", line):
            if named[3]:
                names[named[2]] = Path(named[3]).name
            if not named[1]:
                current = names[named[2]]
        elif line.startswith("calls="):
            of_callee = True
        elif re.match(r"[+\-*\d]", line):
            if not of_callee:
                costs[current] += int(line.split()[1])
            of_callee = False
    return costs


def instructions(loop: Path, case: str, environment: dict[str, str], folder: Path) -> float:
    """Of the interposer, per operation."""
    counts = []
    for calls in (CALLS, 2 * CALLS):
        out = folder / "callgrind.out"
        subprocess.run(
            [
                "valgrind",
                "--quiet",
                "--tool=callgrind",
                f"--callgrind-out-file={out}",
                loop,
                case.split()[0],
                str(calls),
            ],
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        counts.append(self_cost(out.read_text())[LIBRARY])
    return (counts[1] - counts[0]) / CALLS


def measure(pairs: int = 9, calls: int = 50_000) -> dict[str, Any]:
    """``instructions_per_nccl_collective``, ``…_per_allocation`` (a pair; of a large one with the
    arena off, and on it), and nanoseconds."""
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        loop, libraries = build(folder)
        (folder / "pages").mkdir()
        bare = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        bare |= {"LD_LIBRARY_PATH": libraries}
        for case, what in CASES.items():
            hooked = bare | {
                "LD_PRELOAD": str(library_path()),
                "LIVESHIFT_PAGES": str(folder / "pages"),
                "LIVESHIFT_DEVICE_ARENA": "1" if case.endswith("arena") else "0",
            }
            result[f"instructions_per_{what}"] = round(instructions(loop, case, hooked, folder), 1)
            more = []
            for _ in range(pairs):
                took = [
                    float(
                        subprocess.run(
                            [loop, case.split()[0], str(calls)],
                            env=env,
                            check=True,
                            capture_output=True,
                        ).stdout
                    )
                    for env in (bare, hooked)
                ]
                more.append(took[1] - took[0])
            result[f"ns_per_{what}"] = round(statistics.median(more), 1)
    return result
