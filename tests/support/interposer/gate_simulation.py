# SPDX-License-Identifier: Apache-2.0
"""Many random programs over the gate, each with several attempts to stop it.

``make gate-simulation PROGRAMS=5000 SEED=1``; the fast tests play a few hundred. A program that
violates something is named by style and seed, and can be played again by itself with PROGRAMS=1.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from gate_programs import STYLES, program
from gate_world import Seen, Violation, play, world
from simulated_gate import build


def play_one(lib: Any, style: str, seed: int, folder: Path) -> Seen:
    """One program, by its seed; raises Violation."""
    rng = random.Random(f"{style} {seed}")
    late = 0.5 if seed % 3 == 2 and style != "pool" else 0.0
    # Where threads lose patience while others could still go on, the cut is safe but not the least.
    hasty = seed % 4 == 3
    with world(lib, program(rng, style, late=late), rng, folder, hasty=hasty) as there:
        seen = play(there, attempts=rng.randint(1, 4), abandon=0.4)
    if seen.overshoot_warm and not hasty and style != "crossed":
        raise Violation(f"{seen.overshoot_warm} operations beyond the least cut")
    return seen


def play_many(lib: Any, style: str, seeds: range, folder: Path) -> Seen:
    """Raises Violation that names style and seed."""
    total = Seen()
    for seed in seeds:
        try:
            seen = play_one(lib, style, seed, folder)
        except Violation as violation:
            raise Violation(f"{style}, seed {seed}: {violation}") from violation
        for field in fields(Seen):
            setattr(total, field.name, getattr(total, field.name) + getattr(seen, field.name))
    return total


def scratch() -> Path:
    """A folder for pages, on tmpfs where there is one."""
    shm = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="gate-", dir=shm if shm.is_dir() else None))


def main() -> int:
    parser = argparse.ArgumentParser(description="Play random programs over the gate.")
    parser.add_argument("--programs", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--styles", nargs="*", default=STYLES, choices=STYLES)
    asked = parser.parse_args()
    each = -(-asked.programs // len(asked.styles))
    folder = scratch()
    try:
        lib = build()
        print(
            f"{'style':10}{'programs':>9}{'stopped':>9}{'given up':>9}{'raises':>8}"
            f"{'beyond':>8}{'seconds':>9}"
        )
        for style in asked.styles:
            began = time.monotonic()
            seen = play_many(lib, style, range(asked.seed, asked.seed + each), folder)
            print(
                f"{style:10}{each:9}{seen.converged:9}{seen.abandoned:9}{seen.raises:8}"
                f"{seen.overshoot:8}{time.monotonic() - began:9.1f}",
                flush=True,
            )
    except Violation as violation:
        print(violation, file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("beyond: operations beyond the least safe cut; none by programs that must have none")
    return 0


if __name__ == "__main__":
    sys.exit(main())
