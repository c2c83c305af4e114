# SPDX-License-Identifier: Apache-2.0
"""``make bench-engine``: how fast memory goes, and what CPU time it takes, by threads."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table

from liveshift.errors import LiveshiftError

from .source import Measured, measure

console = Console(stderr=True, highlight=False)

Case = tuple[int, bool, bool]
"""Threads, whether the store has its memory before, and whether memory goes in clear."""


def main() -> int:
    """Run it; 1 when it could not go on."""
    parser = argparse.ArgumentParser(prog="make bench-engine", description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0, help="of memory, each time")
    parser.add_argument("--threads", default="1,2", help="such as 1,2,4,8")
    parser.add_argument("--times", type=int, default=5, help="each, by turns")
    parser.add_argument("--out", type=Path, default=Path("build/bench-engine.json"))
    args = parser.parse_args()
    if os.geteuid() != 0:
        console.print("error: to read another process's memory needs root", style="red")
        return 1
    counts = [int(n) for n in args.threads.split(",")]
    cases = [(n, ready, False) for ready in (True, False) for n in counts]
    cases.append((counts[0], True, True))
    found: dict[Case, list[Measured]] = {case: [] for case in cases}
    try:
        with console.status("measuring") as status:
            for number in range(args.times):
                for case in cases:
                    status.update(f"pass {number + 1} of {args.times}: {case[0]} threads")
                    size = int(args.gb * 1e9) >> 20 << 20
                    found[case].append(measure(size, *case))
    except LiveshiftError as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 1
    rows = {"cores": os.cpu_count(), "runs": [each for case in cases for each in found[case]]}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
    Console(width=100).print(_table(found))
    return 0


def _table(found: dict[Case, list[Measured]]) -> Table:
    table = Table(title=f"memory over loopback, {os.cpu_count()} cores, medians")
    for name in ("store's memory", "threads", "GB/s", "against one", "CPU s/GB: source", "dest."):
        table.add_column(name, justify="left" if name == "store's memory" else "right")
    for (threads, ready, clear), runs in found.items():
        rate = median(run.rate for run in runs)
        one = found.get((1, ready, clear))
        gain = f"{rate / median(run.rate for run in one):.2f}" if one else ""
        cpu = (
            f"{median(run.cpu_s_per_gb_source for run in runs):.2f}",
            f"{median(run.cpu_s_per_gb_destination for run in runs):.2f}",
        )
        there = ("there before" if ready else "touched first") + (", in clear" if clear else "")
        table.add_row(there, str(threads), f"{rate:.2f}", gain, *cpu)
    return table


sys.exit(main())
