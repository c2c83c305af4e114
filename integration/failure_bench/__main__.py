# SPDX-License-Identifier: Apache-2.0
"""``make bench-failure``: what the loss of a host costs a job; see the package."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from bench_page import conclude, long_time
from bench_record import kept
from lab_place import a_place, as_program
from rich.console import Console
from rich.markup import escape

from liveshift.errors import LiveshiftError

from . import page, replicas
from .cases import SIZES, WAYS, Effort, chosen, estimate, lacking
from .record import FILE, SAME, Run
from .story import bench

console = Console(stderr=True, highlight=False)


def main() -> int:
    """Run it; 1 when a goal is missed, or it could not go on."""
    args = _arguments()
    effort = Effort(
        *(args.kills, args.every),
        steady=args.steady,
        steps=args.steps,
        mean=args.mean,
        alarms=args.alarms,
        seed=args.seed,
    )
    path = args.out / FILE
    try:
        cases = chosen(args.ways, args.sizes, args.ranks)
        run = fresh(effort)
    except LiveshiftError as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 1
    if not args.fresh and (found := kept(path, run, args.more, SAME)):
        found.complete = False
        run = found
        console.print(f"goes on with {path}, which has {len(run.cases)} cases; FRESH=1 begins anew")
    todo = [case for case in cases if run.of(case) is None]
    console.print(
        f"{len(todo)} of {len(cases)} cases to measure,"
        f" about {long_time(estimate(todo, effort))}; {path} is kept after each"
    )
    for case in todo:
        if why := lacking(case):
            console.print(f"{case.name} will be skipped: it {why}", style="yellow", markup=False)
    if not run.torchft:
        console.print("torchft will be skipped: it is not there; FETCH=1 fetches it", markup=False)
    if args.list:
        for case in todo:
            console.print(case.name, markup=False)
        return 0
    if os.geteuid() != 0:
        console.print("error: a lab is made of namespaces, which needs root", style="red")
        return 1
    if run.load_before > (os.cpu_count() or 1) / 4:
        console.print("this machine is busy with something else: times will tell less")
    as_program()
    try:
        with a_place(may_remain=True) as place, console.status("making a lab") as status:

            def tell(text: str) -> None:
                status.update(escape(text))
                if not console.is_terminal:
                    console.print(text, markup=False)

            bench(place, cases, run, path, tell)
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on after the cases that it has")
        return 130
    except LiveshiftError as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 1
    finally:
        if run.cases:
            page.write(run, args.out)
    done = f"{path} and {args.out / page.FILE}; {long_time(run.seconds)}"
    failed = [f"{r.case.name}, {what}: {why}" for r in run.cases for what, why in r.failed.items()]
    return conclude(console, run.goals, done, failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-failure", description=__doc__)
    sizes = ",".join(f"{size:g}" for size in SIZES)
    parser.add_argument("--ways", default="", help=f"of {','.join(WAYS)}")
    parser.add_argument("--sizes", default="", help=f"GB resident of a rank, such as {sizes}")
    parser.add_argument("--ranks", default="", help="of the job, each on its own host: 2,4")
    parser.add_argument("--kills", type=int, default=5, help="of each case")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two snapshots")
    parser.add_argument("--steady", type=int, default=600, help="steps that tell the speed")
    parser.add_argument(
        "--steps", type=int, default=1500, help="of the job that meets failures; 0: no such job"
    )
    parser.add_argument("--mean", type=float, default=30.0, help="seconds between its failures")
    parser.add_argument("--alarms", type=int, default=3, help="false ones, of each case of rewind")
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    parser.add_argument("--fresh", action="store_true", help="do not go on with an earlier run")
    parser.add_argument("--more", action="store_true", help="add cases to a run that is complete")
    parser.add_argument("--list", action="store_true", help="say what would be done, and how long")
    parser.add_argument("--out", type=Path, default=Path("build"), help="directory")
    args = parser.parse_args()
    if args.kills < 1 or args.every < 1 or args.steady < 100:
        parser.error("--kills: at least 1; --every: at least 1 s; --steady: at least 100 steps")
    if args.steps < 0 or args.mean < 1 or not 0 <= args.alarms <= 20:
        parser.error("--steps: 0 or more; --mean: at least 1 s; --alarms: 0 to 20")
    return args


def fresh(effort: Effort) -> Run:
    """A run of nothing yet, on this machine."""
    return Run(**Run.here(), effort=effort, torchft=replicas.version())


if __name__ == "__main__":
    sys.exit(main())
