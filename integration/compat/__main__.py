# SPDX-License-Identifier: Apache-2.0
"""``make compat``: the interposer on every glibc and Python that can be had; build/compat.json."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from liveshift.errors import StepFailed

from . import trial, worlds

WIDTH = 120

console = Console(stderr=True, highlight=False)
if not console.is_terminal:
    console = Console(stderr=True, highlight=False, width=WIDTH)


def main() -> int:
    """Run it; 1 when something is wrong in a world. Worlds that can't be had are named."""
    parser = argparse.ArgumentParser(prog="make compat", description=__doc__)
    parser.add_argument("--fetch", action="store_true", help="fetch Debian suites (~80 MB)")
    parser.add_argument(
        "--torch", metavar="==VERSION", nargs="?", const="", help="fetch torch, GBs"
    )
    parser.add_argument("--only", default="", help="worlds whose name this is part of")
    parser.add_argument("--python", action="append", default=[], help="one more Python to try")
    parser.add_argument("--place", type=Path, default=Path("build/compat"), help="of the suites")
    parser.add_argument("--out", type=Path, default=Path("build/compat.json"))
    args = parser.parse_args()
    found = [*worlds.pythons(args.python), *worlds.suites(args.place.resolve(), args.fetch)]
    absent = [each for each in found if isinstance(each, str)]
    results = []
    with tempfile.TemporaryDirectory() as built, console.status("") as status:
        trial.build(Path(built))
        for world in found:
            if isinstance(world, worlds.World) and args.only in world.name:
                status.update(world.name)
                if args.torch is not None:
                    world = _equipped(world, args.torch, args.place.resolve(), absent)
                results.append(trial.attempt(world, Path(built)))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"worlds": [result.as_data() for result in results], "absent": absent}
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    _print(results, absent)
    return 1 if any(result.problems for result in results) else 0


def _equipped(world: worlds.World, version: str, place: Path, absent: list[str]) -> worlds.World:
    try:
        return worlds.with_torch(world, version, place)
    except StepFailed as failed:
        absent.append(f"torch in {world.name}: {failed}")
        return world


def _print(results: list[trial.Result], absent: list[str]) -> None:
    table = Table(
        "world", "Python", "libc", "hooks", "pthread_create of", "torch", "quiesces", "verdict"
    )
    for each in results:
        verdict = "[red]" + "; ".join(each.problems) if each.problems else "[green]good"
        torch, quiesces = each.torch, "yes" if each.identified else "no"
        if not each.torch_trained:
            torch, quiesces = "none", ""
        table.add_row(
            each.world,
            each.python,
            each.libc,
            str(each.hooks),
            each.pthread_create,
            torch,
            quiesces,
            verdict,
        )
    console.print(table)
    good = sum(not each.problems for each in results)
    console.print(f"{good} of {len(results)} worlds are good")
    for sentence in absent:
        console.print(f"not tried: {sentence}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
