# SPDX-License-Identifier: Apache-2.0
"""``make load``: how one orchestrator bears 10 to 1,000 hosts, as a table and build/load.json."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console

from liveshift.errors import LiveshiftError

from .figures import Run
from .scenario import run
from .tables import tables

console = Console(stderr=True)


def main() -> int:
    """Run it; 1 when something is wrong with any of the runs."""
    parser = argparse.ArgumentParser(prog="make load", description=__doc__)
    parser.add_argument("hosts", nargs="?", default="10,30,100,300,1000", help="such as 10,100")
    parser.add_argument("--moves", type=int, default=50, help="migrations at once")
    parser.add_argument("--rest", type=float, default=10.0, help="seconds to watch it at rest")
    parser.add_argument("--out", type=Path, default=Path("build/load.json"))
    parser.add_argument("--profile", type=Path, help="a cProfile of each run goes into this folder")
    args = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)  # how this program is found is not the daemon's business
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and nothing is left behind
    runs: list[Run] = []
    try:
        for hosts in map(int, args.hosts.split(",")):
            runs.append(_one(hosts, args))
            args.out.parent.mkdir(parents=True, exist_ok=True)
            raw = msgspec.json.encode({"runs": runs})
            args.out.write_bytes(msgspec.json.format(raw) + b"\n")
    except LiveshiftError as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 1
    finally:
        if runs:
            Console(width=max(console.width, 150)).print(tables(runs))
    wrong = [f"{r.hosts} hosts: {what}" for r in runs for what in r.wrong]
    for line in wrong:
        console.print(line, style="red", markup=False)
    return 1 if wrong else 0


def _one(hosts: int, args: argparse.Namespace) -> Run:
    under: tuple[str, ...] = ()
    if args.profile:
        args.profile.mkdir(parents=True, exist_ok=True)
        under = (sys.executable, "-m", "cProfile", "-o", str(args.profile / f"load-{hosts}.prof"))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with console.status(f"{hosts} hosts") as status:

        def tell(what: str) -> None:
            status.update(f"{hosts} hosts: {what}")
            if not console.is_terminal:
                console.print(f"{time.monotonic() - began:6.1f} s  {hosts} hosts: {what}")

        return run(
            hosts,
            args.moves,
            args.rest,
            under=under,
            tell=tell,
            keep=args.out.with_name(f"load-{hosts}.log"),
        )


if __name__ == "__main__":
    sys.exit(main())
