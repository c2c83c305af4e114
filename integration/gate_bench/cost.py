# SPDX-License-Identifier: Apache-2.0
"""What one collective costs more with the interposer, its gate open: instructions and nanoseconds.

The call goes to a double that does nothing, so that what is counted is the hook's own. Instructions
are callgrind's, by the difference between two lengths of the same loop; they are the same in every
run. Nanoseconds are medians of paired runs.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import liveshift
from liveshift.errors import NotFound
from liveshift.interposer.library import library_path

HERE = Path(__file__).resolve().parent
INTERPOSER = HERE.parent.parent / "interposer"
CALLS = 10_000
GOAL = 60
"""Instructions per collective."""


@dataclass(frozen=True)
class Programs:
    """What was built: the loop, and the interposer with a context that has an identity."""

    loop: Path
    identified: Path


def build(folder: Path) -> Programs:
    """Compiles into ``folder``; the interposer as meson builds it, plus identify.c."""
    cc = [
        *os.environ.get("CC", "cc").split(),
        "-std=gnu11",
        "-D_GNU_SOURCE",
        "-O2",
        f"-I{INTERPOSER}",
    ]
    double = folder / "libtorch_cpu.so"
    shared = ["-shared", "-fPIC"]
    subprocess.run(
        [*cc, *shared, "-Wl,-soname,libtorch_cpu.so", "-o", double, HERE / "double.c"], check=True
    )
    loop = folder / "loop"
    subprocess.run([*cc, "-o", loop, HERE / "loop.c", double, f"-Wl,-rpath,{folder}"], check=True)
    identified = folder / "identified.so"
    subprocess.run(
        [
            *cc,
            *shared,
            "-fvisibility=hidden",
            "-fexceptions",
            "-pthread",
            f'-DLIVESHIFT_VERSION="{liveshift.__version__}"',
            "-o",
            identified,
            *sorted(INTERPOSER.rglob("*.c")),
            HERE / "identify.c",
        ],
        check=True,
    )
    return Programs(loop, identified)


def _environment(preload: Path | None, pages: Path) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "LIVESHIFT_PAGES")}
    return clean | ({"LD_PRELOAD": str(preload), "LIVESHIFT_PAGES": str(pages)} if preload else {})


def instructions(loop: Path, preload: Path | None, folder: Path) -> float:
    """Instructions per call. Raises NotFound without valgrind."""
    if shutil.which("valgrind") is None:
        raise NotFound("there is no valgrind to count by", hint="apt-get install valgrind")
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
                str(calls),
            ],
            env=_environment(preload, folder),
            check=True,
            stdout=subprocess.DEVNULL,
        )
        total = re.search(r"^(?:summary|totals): (\d+)", out.read_text(), re.MULTILINE)
        assert total is not None, "callgrind wrote no total"
        counts.append(int(total[1]))
    return (counts[1] - counts[0]) / CALLS


def nanoseconds(loop: Path, preload: Path | None, folder: Path, calls: int) -> float:
    """Nanoseconds per call, of one run."""
    done = subprocess.run(
        [loop, str(calls)], env=_environment(preload, folder), check=True, capture_output=True
    )
    return float(done.stdout)


def measure(calls: int = 5_000_000, pairs: int = 15) -> dict[str, Any]:
    """``instructions_per_collective`` and ``ns_per_collective``, with an identity and without."""
    result: dict[str, Any] = {"goal_instructions": GOAL}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:  # pages are on a tmpfs in a capsule
        folder = Path(name)
        programs = build(folder)
        bare = instructions(programs.loop, None, folder)
        for case, preload in (
            ("", programs.identified),
            ("_unidentified", library_path()),
        ):
            hooked = instructions(programs.loop, preload, folder)
            result[f"instructions_per_collective{case}"] = round(hooked - bare, 2)
            more, of_bare = [], []
            for _ in range(pairs):
                alone = nanoseconds(programs.loop, None, folder, calls)
                more.append(nanoseconds(programs.loop, preload, folder, calls) - alone)
                of_bare.append(alone)
            result[f"ns_per_collective{case}"] = round(statistics.median(more), 3)
            result["ns_bare_call"] = round(statistics.median(of_bare), 3)
    return result
