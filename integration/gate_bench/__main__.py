# SPDX-License-Identifier: Apache-2.0
"""``make bench-gate``: what the interposer costs; build/bench-gate.json."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import liveshift

from . import cost, device_cost, quiesce, scale, step_time

WIDTH = 100

console = Console(stderr=True, highlight=False)
if not console.is_terminal:
    console = Console(stderr=True, highlight=False, width=WIDTH)

PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "cost": cost.measure,
    "device-cost": device_cost.measure,
    "step-time": step_time.measure,
    "quiesce": quiesce.measure,
    "quiesce-scale": scale.measure,
}


def main() -> int:
    """Run the parts; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(prog="make bench-gate", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=Path("build/bench-gate.json"))
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    report: dict[str, Any] = {
        "liveshift": liveshift.__version__,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "load_before": os.getloadavg()[0],
    }
    if report["load_before"] > (os.cpu_count() or 1) / 4:
        console.print("this machine is busy with something else: times will not tell much")
    for name in args.parts or PARTS:
        with console.status(name):
            report |= PARTS[name]()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    rows = list(_rows(report))
    table = Table("what", "measured", "goal", "")
    for what, measured, goal, met in rows:
        verdict = "" if met is None else "[green]met" if met else "[red]missed"
        table.add_row(what, measured, goal, verdict)
    console.print(table)
    return 1 if any(met is False for *_, met in rows) else 0


Row = tuple[str, str, str, bool | None]


def _rows(report: dict[str, Any]) -> list[Row]:
    rows: list[Row] = []
    if "instructions_per_collective" in report:
        count, goal = report["instructions_per_collective"], report["goal_instructions"]
        rows += [
            ("instructions per collective, gate open", f"{count:.0f}", f"≤ {goal}", count <= goal),
            (
                "… on a context without an identity",
                f"{report['instructions_per_collective_unidentified']:.0f}",
                "",
                None,
            ),
            (
                "nanoseconds per collective more than the bare call",
                f"{report['ns_per_collective']:.1f}",
                "",
                None,
            ),
        ]
    for what, words in (
        ("nccl_collective", "NCCL collective"),
        ("allocation", "cudaMalloc and free"),
        ("large_allocation", "… of 2 MiB, without the arena"),
        ("arena_allocation", "… in the arena"),
    ):
        if f"instructions_per_{what}" in report:
            rows.append(
                (
                    f"{words}, on the doubles: instructions in the library, nanoseconds more",
                    f"{report[f'instructions_per_{what}']:.0f}, {report[f'ns_per_{what}']:.0f}",
                    "",
                    None,
                )
            )
    if "step_time_ratio" in report:
        ratio, goal = report["step_time_ratio"], report["goal_step_time_ratio"]
        null = report["step_time_ratio_null"]
        chance = f"chance: {null:.4f}"
        # If two jobs without the library differ by more than the goal allows, there is no verdict.
        measurable = abs(null - 1) < goal - 1
        rows += [
            (
                "step time of a DDP job, with / without",
                f"{ratio:.4f} ({chance})",
                f"≤ {goal}",
                ratio <= goal if measurable else None,
            ),
            (
                "instructions of a step, with / without",
                f"{report['step_instructions_ratio']} (chance: "
                f"{report['step_instructions_ratio_null']})",
                "",
                None,
            ),
        ]
    for row in report.get("quiesce", []):
        rows.append(
            (
                f"boundary of {row['ranks']} ranks: seconds after the last operation in flight",
                f"{row['beyond_s']:.4f}, worst {row['beyond_worst_s']:.4f} (in flight "
                f"{row['in_flight_s']:.3f}, a step {row['step_s']:.3f})",
                "",
                None,
            )
        )
    for row in report.get("quiesce_scale", []):
        largest, goal = row["ranks"] == scale.SIZES[-1], report["goal_quiesce_s"]
        rows.append(
            (
                f"boundary of {row['ranks']:,} simulated ranks, real messages: seconds",
                f"{row['seconds']:.3f} (CPU: orchestrator {row['orchestrator_cpu_s']:.3f}, hosts "
                f"{row['hosts_cpu_s']:.3f}; {row['messages_per_rank']:.1f} messages a rank)",
                f"< {goal:g}" if largest else "",
                row["seconds"] < goal if largest else None,
            )
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
