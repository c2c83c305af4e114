# SPDX-License-Identifier: Apache-2.0
"""The program held_threads.c: built, started, and its counters read."""

from __future__ import annotations

import os
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROWS, SIGNALS = 16, 15
_ROW = struct.Struct("<3Q")


@dataclass(frozen=True)
class Row:
    done: int
    wrong: int
    tid: int


def build(directory: Path) -> Path:
    """Statically: it runs wherever it is put."""
    program = directory / "held_threads"
    source = Path(__file__).with_name("held_threads.c")
    compiler = os.environ.get("CC", "cc").split()
    subprocess.run([*compiler, "-std=gnu11", "-O1", "-pthread", "-o", program, source], check=True)
    return program


class Counters:
    """What the threads of one program say of themselves."""

    def __init__(self, path: Path, kinds: list[str]) -> None:
        self.path = path
        self._names = [kind.partition(":")[0] for kind in kinds]

    def row(self, name: str, process: int = 0) -> Row:
        number = SIGNALS if name == "signals" else self._names.index(name)
        at = (process * ROWS + number) * _ROW.size
        data = self.path.read_bytes()[at : at + _ROW.size]
        return Row(*_ROW.unpack(data)) if len(data) == _ROW.size else Row(0, 0, 0)

    def done(self, process: int = 0) -> dict[str, int]:
        return {name: self.row(name, process).done for name in self._names}

    def wrong(self, process: int = 0) -> dict[str, int]:
        return {name: n for name in self._names if (n := self.row(name, process).wrong)}

    def all_began(self, processes: int = 1) -> bool:
        names = (*self._names, "signals")
        return all(self.row(name, p).tid for p in range(processes) for name in names)
