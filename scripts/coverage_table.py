#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `make coverage` prints: lines and branches that tests have run, by folder; and a floor.

``scripts/coverage_table.py FILE`` reads what ``coverage json`` has written. It ends with 1 if one
of the FLOORS is not reached. Only folders that are pure have one: what they decide needs no host,
no root and no other process, so the fast tests can run all of it.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

FLOORS = {
    "runtime/config": 97.0,
    "runtime/cost": 98.0,
    "runtime/messages": 99.0,
    "runtime/model": 98.0,
}
"""Per cent of lines and branches together."""


@dataclass
class Covered:
    """Lines and branches of a folder, and how many of both the tests have run."""

    lines: int = 0
    lines_run: int = 0
    branches: int = 0
    branches_run: int = 0

    def add(self, summary: Mapping[str, Any]) -> None:
        self.lines += summary["num_statements"]
        self.lines_run += summary["covered_lines"]
        self.branches += summary["num_branches"]
        self.branches_run += summary["covered_branches"]

    def __iadd__(self, other: Covered) -> Self:
        self.lines += other.lines
        self.lines_run += other.lines_run
        self.branches += other.branches
        self.branches_run += other.branches_run
        return self

    @property
    def percent(self) -> float:
        every = self.lines + self.branches
        return 100 * (self.lines_run + self.branches_run) / every if every else 100.0


def by_folder(report: Mapping[str, Any]) -> dict[str, Covered]:
    """By the folder that a file lies in; "." is the root of the package."""
    found: dict[str, Covered] = defaultdict(Covered)
    for name, file in report["files"].items():
        found[Path(name).parent.as_posix()].add(file["summary"])
    return dict(sorted(found.items()))


def table(folders: Mapping[str, Covered]) -> list[str]:
    """The table's lines; the last one is of all folders together."""
    every = Covered()
    rows = [f"{'folder':<28}{'lines':>16}{'branches':>16}{'':>9}  floor"]
    for name, each in [*folders.items(), ("all", every)]:
        lines = f"{each.lines_run:,} of {each.lines:,}"
        branches = f"{each.branches_run:,} of {each.branches:,}"
        floor = f"{FLOORS[name]:.0f} %" if name in FLOORS else ""
        rows.append(f"{name:<28}{lines:>16}{branches:>16}{each.percent:>7.1f} %  {floor}".rstrip())
        every += each
    return rows


def too_low(folders: Mapping[str, Covered]) -> list[str]:
    """What keeps the run from passing, in words."""
    found = []
    for name, floor in FLOORS.items():
        percent = folders.get(name, Covered(lines=1)).percent
        if percent < floor:
            found.append(f"error: the tests run {percent:.1f} % of {name}, not {floor:.0f} %")
    return found


def main(arguments: list[str]) -> int:
    folders = by_folder(json.loads(Path(arguments[0]).read_text()))
    print("\n".join(table(folders)))
    low = too_low(folders)
    print("\n".join(low), end="\n" if low else "", file=sys.stderr)
    return 1 if low else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
