# SPDX-License-Identifier: Apache-2.0
"""``make soak``: move a training job round three hosts for as long as asked; see the package."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from lab_place import a_place, as_program, lab_name
from rich.console import Console

from liveshift.errors import LiveshiftError

from .lossy import soak_with_losses
from .report import WIDTH, tables
from .rounds import Rounds
from .story import soak
from .watch import Watch

TELL_S = 60.0
"""Between two lines where there is no terminal."""

console = Console(stderr=True, highlight=False)


def main() -> int:
    """Run it; 1 when a move failed, results differ, or something grows that should not."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--jobs", type=int, default=0, help="so many small jobs run beside the one that moves"
    )
    parser.add_argument(
        "--kills", type=float, default=0.0, help="one host loses its power so often, in seconds"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the moments of --kills")
    parser.add_argument("--out", type=Path, default=Path("build/soak.json"))
    args = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("a lab is made of namespaces, which needs root")
    as_program()
    try:
        with a_place() as place, console.status("making a lab") as status:
            lines = _Lines(args.seconds)

            def tell(rounds: Rounds, watch: Watch, now: float) -> None:
                status.update(lines.line(rounds, watch, now))

            lab, seconds = lab_name("s"), args.seconds
            if args.kills:
                report = soak_with_losses(lab, place, seconds, tell, args.kills, args.seed)
            else:
                report = soak(lab, place, seconds, tell, args.jobs)
    except (LiveshiftError, AssertionError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 1
    report.write(args.out)
    Console(highlight=False, width=max(console.width, WIDTH)).print(tables(report))
    for problem in report.problems:
        console.print(problem, style="red", markup=False)
    return 1 if report.problems else 0


class _Lines:
    """How far it is, in a line; where there is no terminal, printed once a minute."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._told = time.monotonic()

    def line(self, rounds: Rounds, watch: Watch, now: float) -> str:
        pauses = sorted(row.frozen_s for row in rounds.rows)
        memory = sum(d.resident for d in watch.samples[-1].daemons.values()) / 1e6
        text = (
            f"{now:.0f} of {self._seconds:.0f} s: {len(pauses)} moves, {len(rounds.failed)} failed;"
            f" the job was frozen {pauses[len(pauses) // 2]:.2f} s (median), {pauses[-1]:.2f} s"
            f" (worst); daemons {memory:.0f} MB"
        )
        if not console.is_terminal and time.monotonic() - self._told > TELL_S:
            self._told = time.monotonic()
            console.print(text)
        return text


if __name__ == "__main__":
    sys.exit(main())
