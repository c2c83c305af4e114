# SPDX-License-Identifier: Apache-2.0
"""``make fault-matrix``: play cells one after another, on one lab for each table as long as none
fails."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from lab_place import a_place, as_program
from lab_session import environment
from reference_runs import References
from rich.console import Console

from .report import FILE, Report
from .tables import all_cells, playing


def main() -> int:
    parser = argparse.ArgumentParser(prog="fault_matrix", description=__doc__)
    parser.add_argument("--cells", default="", help="such as source.dumped/,power-lost")
    parser.add_argument("--short", action="store_true", help="the cells that CI plays")
    parser.add_argument("--stall", type=float, default=30.0, help="how long, in seconds")
    parser.add_argument("--out", type=Path, default=Path("build"), help="directory")
    parser.add_argument("--list", action="store_true", help="show the cells, play none")
    args = parser.parse_args()
    wanted = all_cells(args.cells, args.short)
    if args.list:
        for cell in wanted:
            print(cell.table, cell.name, cell.expected, cell.reason)
        return 0
    if not wanted:
        parser.error(f"no cell is like {args.cells!r}")
    if os.geteuid() != 0:
        parser.error("a lab is made of namespaces, which needs root")
    as_program()
    console = Console(highlight=False)
    report = Report(args.out, console)
    with (
        a_place() as place,
        playing(
            args.cells, args.short, place, References(place, environment()), args.stall
        ) as playable,
    ):
        for number, (cell, unavailable, play) in enumerate(playable, 1):
            if unavailable:
                report.skip(cell, unavailable)
                continue
            report.begin(cell, number, len(wanted))
            report.take(play(), number, len(wanted))
    console.width = max(console.width, report.WIDTH)
    report.show_tables()
    passed = len(report.verdicts) - len(report.failed)
    console.print(f"{passed} of {len(report.verdicts)} cells passed; {args.out / FILE}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
