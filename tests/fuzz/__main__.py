# SPDX-License-Identifier: Apache-2.0
"""python tests/fuzz [--runs N | --seconds S] [--target NAME …]: fuzz the parsers, print a table.

N and S are for all targets together. Each target runs in a process of its own, one after the
other. The engine is atheris where it is installed (coverage-guided), else mutations of seeds.
Ends with 1 when an input was found that breaks a rule; those are left in --findings.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "support")]

DONE = re.compile(rb"Done (\d+) runs in (\d+) second")
INSTRUMENTED = ["liveshift", "tomllib", "tarfile"]
LONGEST_S = 3600.0
"""A target that is still at it after this is stopped and counts as one that hangs."""


def main() -> int:
    asked = _arguments()
    if asked.child:
        return _child(asked)
    from fuzz import targets

    names = asked.target or list(targets.TARGETS)
    paces = {name: targets.PACES.get(name, 1) for name in names}
    asked.findings.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in names:
        runs = max(1, asked.runs * paces[name] // sum(paces.values())) if asked.runs else 0
        seconds = asked.seconds / len(names)
        print(f"{name}: {runs or 'any number of'} executions …", file=sys.stderr, flush=True)
        rows.append(_run(name, runs, seconds, asked))
    _print_table(rows, f"{asked.engine}, seed {asked.seed}")
    return 1 if any(row["findings"] for row in rows) else 0


def _arguments() -> argparse.Namespace:
    has_atheris = importlib.util.find_spec("atheris") is not None
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--target", action="append")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", default="atheris" if has_atheris else "mutations")
    parser.add_argument("--findings", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not asked.runs and not asked.seconds:
        asked.seconds = 60.0
    return asked


def _run(name: str, runs: int, seconds: float, asked: argparse.Namespace) -> dict[str, Any]:
    place = tempfile.mkdtemp(
        prefix="ls-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    )
    os.chmod(place, 0o711)
    command = [sys.executable, __file__, "--child", name, "--runs", str(runs)]
    command += ["--seconds", str(seconds), "--seed", str(asked.seed), "--engine", asked.engine]
    command += ["--findings", str(asked.findings.resolve())]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "TMPDIR": place},
            capture_output=True,
            check=False,
            timeout=LONGEST_S + seconds,
        )
    finally:
        shutil.rmtree(place, ignore_errors=True)
    wall = time.monotonic() - began
    if done.stdout.strip():
        row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    elif done.returncode == 0 and (match := DONE.search(done.stderr)):
        row = {"target": name, "executions": int(match[1]), "seconds": wall, "findings": []}
    else:
        row = {"target": name, "executions": 0, "seconds": wall, "findings": ["it ended itself"]}
    if row["findings"]:
        sys.stderr.write(done.stderr.decode(errors="replace")[-4000:])
    return row


def _child(asked: argparse.Namespace) -> int:
    from fuzz import engines

    if asked.engine == "atheris":
        import atheris

        with atheris.instrument_imports(include=INSTRUMENTED):
            from fuzz import targets
        target = targets.build(asked.child)
        engines.with_atheris(target, asked.runs, asked.seconds, asked.seed, asked.findings)
    from fuzz import targets

    with contextlib.closing(targets.build(asked.child)) as target:
        engines.with_mutations(target, asked.runs, asked.seconds, asked.seed, asked.findings).say()
    return 0


def _print_table(rows: list[dict[str, Any]], engine: str) -> None:
    print(f"{'target':<14}{'executions':>12}{'per second':>12}  findings ({engine})")
    for row in rows:
        rate = int(row["executions"] / max(row["seconds"], 1e-9))
        found = ", ".join(row["findings"]) or "none"
        print(f"{row['target']:<14}{row['executions']:>12,}{rate:>12,}  {found}")
    every = sum(row["executions"] for row in rows)
    count = sum(len(row["findings"]) for row in rows)
    print(f"{'all':<14}{every:>12,}{'':>12}  {count or 'no'} findings")


if __name__ == "__main__":
    sys.exit(main())
