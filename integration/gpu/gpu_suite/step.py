# SPDX-License-Identifier: Apache-2.0
"""What a step's process works with. ``python -m gpu_suite.step NAME WORK`` does one step.

Everything that is known is on disk at once, so that a step that hangs still says what it has seen.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import plan
from .machine import Machine, from_json

GIB, MIB = 1 << 30, 1 << 20


class CannotRun(Exception):
    """The machine does not allow this step, in words."""


@dataclass
class Outcome:
    """What a step has come to; ``figures`` in the units that their names say."""

    ran: bool = False
    passed: bool = False
    why: str = ""
    seconds: float = 0.0
    commit: str = ""
    """Of the tree with which it was done."""
    bit_identical: bool | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


class Step:
    """One step under way: its machine, its folder, its time, and what it finds."""

    def __init__(self, work: Path, machine: Machine, short: bool, deadline_s: float) -> None:
        self.work = work
        self.machine = machine
        self.short = short
        self.outcome = Outcome()
        self._until = time.monotonic() + deadline_s
        self._failed: list[str] = []

    @property
    def simulated(self) -> bool:
        return self.machine.simulated

    @property
    def unit(self) -> int:
        """What stands for 1 GiB: on the doubles device memory is host memory, and copies are the
        CPU's."""
        return 2 * MIB if self.simulated else GIB

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, with time to put things away."""
        return max(1.0, self._until - time.monotonic() - 5)

    def begin(self) -> None:
        """From here on the machine has allowed it."""
        self.outcome.ran = True
        self.save()

    def figure(self, name: str, value: Any) -> None:
        """A figure; a name of several words parted by "/" goes into tables of tables."""
        *path, last = name.split("/")
        table = self.outcome.figures
        for word in path:
            table = table.setdefault(word, {})
        table[last] = round(value, 4) if isinstance(value, float) else value
        self.save()

    def check(self, right: bool, wrong: str) -> bool:
        """Something must be so; ``wrong`` says what is not."""
        if not right:
            self._failed.append(wrong)
            self.outcome.why = "; ".join(self._failed)
            self.save()
        return right

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part whose failure does not end the step."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.check(False, f"{name}: {_in_words(error)}")

    def remark(self, text: str) -> None:
        if text not in self.outcome.remarks:
            self.outcome.remarks.append(text)
            self.save()

    def save(self) -> None:
        part = self.work / "outcome.part"
        part.write_text(json.dumps(asdict(self.outcome)))
        part.rename(self.work / "outcome.json")

    def do(self, module: str) -> None:
        """Do the step, and say how it ended."""
        try:
            measure = importlib.import_module(f"gpu_suite.{module}").measure
            measure(self)
            self.outcome.passed = self.outcome.ran and not self._failed
        except CannotRun as cannot:
            self.outcome.ran, self.outcome.why = False, str(cannot)
        except Exception as error:
            traceback.print_exc()
            self.check(False, _in_words(error))
        self.save()


def _in_words(error: Exception) -> str:
    said = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {said}" if said else repr(error)


def read(work: Path) -> Outcome:
    """What a step has said so far."""
    try:
        return Outcome(**json.loads((work / "outcome.json").read_text()))
    except FileNotFoundError:
        return Outcome(why="it said nothing at all")


def main() -> None:
    name, work = sys.argv[1], Path(sys.argv[2])
    machine = from_json((work.parent / "machine.json").read_text())
    assert machine is not None
    (chosen,) = plan.named([name])
    step = Step(work, machine, "LIVESHIFT_GPU_SUITE_SHORT" in os.environ, float(sys.argv[3]))
    step.do(chosen.module)


if __name__ == "__main__":
    main()
