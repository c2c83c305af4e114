# SPDX-License-Identifier: Apache-2.0
"""``make bench-move``: what a move costs a job; see the package."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench_page import conclude, long_time
from bench_record import kept
from lab_place import a_place, as_program, lab_name
from rich.console import Console
from rich.markup import escape

from liveshift.errors import LiveshiftError

from . import drains, page
from .cases import KINDS, LINKS, SIZES, USUAL, WAYS, Case, Effort, chosen, estimate, lacking
from .record import FILE, Run
from .story import bench

console = Console(stderr=True, highlight=False)


def main() -> int:
    """Run it; 1 when a goal is missed, or it could not go on."""
    args = _arguments()
    effort = Effort(args.moves, args.hands, args.restarts, args.threads)
    path = args.out / FILE
    try:
        cases = chosen(args.jobs, args.sizes, args.links, args.ways)
        run = fresh(effort)
    except LiveshiftError as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 1
    if not args.fresh and (found := kept(path, run, args.more)):
        found.complete = False
        run = found
        console.print(f"goes on with {path}, which has {len(run.cases)} cases; FRESH=1 begins anew")
    todo = [case for case in cases if run.of(case) is None]
    fits = [case for case in todo if not lacking(case)]
    needed = estimate(fits, effort) + (0 if run.drains else drains.seconds(args.drains))
    console.print(
        f"{len(fits)} of {len(cases)} cases to measure, about {long_time(needed)};"
        f" {path} is kept after each"
    )
    for case in todo:
        if why := lacking(case):
            line = f"{case.name} will be skipped: it {why}"
            console.print(line, style="yellow", markup=False, soft_wrap=True)
    if args.list:
        return 0
    if os.geteuid() != 0:
        console.print("error: a lab is made of namespaces, which needs root", style="red")
        return 1
    if run.load_before > (os.cpu_count() or 1) / 4:
        console.print("this machine is busy with something else: times will tell less")
    as_program()
    try:
        with a_place(may_remain=True) as place, console.status("making a lab") as status:
            lines = _Lines(cases, run)
            bench(
                lab_name("b"),
                place,
                cases,
                run,
                path,
                lambda text: status.update(escape(lines.line(text))),
                args.drains,
            )
    except KeyboardInterrupt:
        console.print(
            f"interrupted; the same command goes on after the {len(run.cases)} cases"
            f" that {path} has"
        )
        return 130
    except (LiveshiftError, AssertionError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        console.print(f"{path} has what was measured until then; the same command goes on")
        return 1
    finally:
        if run.cases:
            page.write(run, args.out)
    done = f"{path} and {args.out / page.FILE}; {long_time(run.seconds)}"
    failed = [f"{r.case.name}, {what}: {why}" for r in run.cases for what, why in r.failed.items()]
    return conclude(console, run.goals, done, failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-move", description=__doc__)
    sizes = ",".join(f"{size:g}" for size in SIZES)
    parser.add_argument("--jobs", default="", help=f"of {','.join(KINDS)}; {USUAL}")
    parser.add_argument("--sizes", default="", help=f"GB resident, such as {sizes}")
    parser.add_argument("--links", default="", help=f"of {','.join(LINKS)}")
    parser.add_argument(
        "--ways", default="", help=f"of {','.join(WAYS)}; auto, the product's choice"
    )
    parser.add_argument("--moves", type=int, default=5, help="of each case")
    parser.add_argument("--hands", type=int, default=5, help="moves by hand of each case")
    parser.add_argument("--restarts", type=int, default=5, help="of each job and size")
    parser.add_argument(
        "--drains", type=int, default=0, help="with a deadline, of hosts with 1, 2 and 4 capsules"
    )
    parser.add_argument("--threads", type=int, default=1, help="of the job")
    parser.add_argument("--fresh", action="store_true", help="do not go on with an earlier run")
    parser.add_argument("--more", action="store_true", help="add cases to a run that is complete")
    parser.add_argument("--list", action="store_true", help="say what would be done, and how long")
    parser.add_argument("--out", type=Path, default=Path("build"), help="directory")
    args = parser.parse_args()
    if min(args.moves, args.threads) < 1 or min(args.hands, args.restarts, args.drains) < 0:
        parser.error("--moves and --threads: at least 1; --hands, --restarts, --drains: at least 0")
    return args


def fresh(effort: Effort) -> Run:
    """A run of nothing yet, on this machine."""
    return Run(**Run.here(), effort=effort)


class _Lines:
    """How far it is, in a line; printed where there is no terminal."""

    def __init__(self, cases: Sequence[Case], run: Run) -> None:
        self._cases, self._run = cases, run
        self._before = list(run.cases)
        self._fit = [case for case in cases if not lacking(case)]
        self._began = time.monotonic()
        self._told = ""

    def line(self, text: str) -> str:
        took = time.monotonic() - self._began
        done = [r.case for r in self._run.cases if r not in self._before]
        todo = [case for case in self._fit if self._run.of(case) is None]
        pace = took / estimate(done, self._run.effort) if done else 1.0
        left = long_time(estimate(todo, self._run.effort) * min(3.0, max(0.3, pace)))
        over = sum(self._run.of(case) is not None for case in self._cases)
        count = f"{over} of {len(self._cases)} cases"
        said = f"{count}, {long_time(took)}, about {left} left; {text}"
        topic = text.partition(":")[0]
        if not console.is_terminal and topic != self._told:
            self._told = topic
            console.print(said, markup=False)
        return said


if __name__ == "__main__":
    sys.exit(main())
