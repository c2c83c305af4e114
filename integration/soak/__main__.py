# SPDX-License-Identifier: Apache-2.0
"""``make soak``: move a training job round three hosts for as long as asked; see the package."""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import sys
import time
from pathlib import Path

from rich.console import Console

from liveshift.errors import LiveshiftError

from .report import WIDTH, tables
from .rounds import Rounds
from .story import soak
from .watch import Watch

PLACE = Path("/var/lib/liveshift-test")
"""On the machine's own disk, which all lab hosts share."""

TELL_S = 60.0
"""Between two lines where there is no terminal."""

console = Console(stderr=True, highlight=False)


def main() -> int:
    """Run it; 1 when a move failed, results differ, or something grows that should not."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path("build/soak.json"))
    args = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("a lab is made of namespaces, which needs root")
    # Started from a background shell we would ignore SIGINT, and hand that on to all daemons.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.pop("PYTHONPATH", None)  # how this program is found is not the job's business
    place = PLACE / secrets.token_hex(4)
    place.mkdir(parents=True)
    PLACE.chmod(0o755)
    try:
        with console.status("making a lab") as status:
            lines = _Lines(args.seconds)
            report = soak(
                "s" + secrets.token_hex(3),
                place,
                args.seconds,
                lambda rounds, watch, now: status.update(lines.line(rounds, watch, now)),
            )
    except (LiveshiftError, AssertionError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 1
    finally:
        shutil.rmtree(place)
        if not any(PLACE.iterdir()):
            PLACE.rmdir()
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
            f" the job stood still {pauses[len(pauses) // 2]:.2f} s (median), {pauses[-1]:.2f} s"
            f" (worst); daemons {memory:.0f} MB"
        )
        if not console.is_terminal and time.monotonic() - self._told > TELL_S:
            self._told = time.monotonic()
            console.print(text)
        return text


if __name__ == "__main__":
    sys.exit(main())
