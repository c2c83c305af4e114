# SPDX-License-Identifier: Apache-2.0
"""What a job's step log tells of a downtime.

The log has a line per step with the time at its end. A job on this machine keeps the machine's
clock wherever it is moved, so that times are the same as ours.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from liveshift.launcher.report.gaps import holding

LOOK_S = 0.02
FULL = 1.1
"""Full speed: the first step of no more than so many usual ones …"""
IN_A_ROW = 3
"""… if it and the next ones, so many together, are that in the median too."""


class StepTail:
    """The steps in a log that grows, each line read once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.numbers: list[int] = []
        self.times: list[float] = []
        self.losses: list[str] = []
        self.final: dict[str, Any] = {}
        """What it said at its end: the digests of its parameters and of its data."""
        self._at = 0

    def look(self) -> int:
        """Read what is new; returns the number of the last step, 0 before the first."""
        if self.path.exists():
            with self.path.open("rb") as log:
                log.seek(self._at)
                text = log.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._at += len(whole)
            for line in map(json.loads, whole.splitlines()):
                self.numbers.append(line["step"])
                self.times.append(line["time"])
                self.losses.append(line["loss_hex"])
        return self.numbers[-1] if self.numbers else 0

    def wait_end(self, patience: float) -> None:
        """Until it has ended by itself, which it is to have been told; then ``final`` is there."""
        until, found = time.monotonic() + patience, self.path.with_name("final0.json")
        while not (found.exists() and found.read_text().endswith("\n")):
            assert time.monotonic() < until, f"it does not come to its end in {patience:g} s"
            time.sleep(LOOK_S)
        self.look()
        self.final = json.loads(found.read_text())

    def keep(self, path: Path) -> None:
        """A copy of the log, and beside it what it said at its end, for :meth:`kept`."""
        shutil.copyfile(self.path, path)
        path.with_suffix(".final.json").write_text(json.dumps(self.final))

    @classmethod
    def kept(cls, path: Path) -> StepTail:
        tail = cls(path)
        tail.look()
        tail.final = json.loads(path.with_suffix(".final.json").read_text())
        return tail

    def wait(self, step: int, patience: float, alive: Callable[[], object]) -> None:
        """Until this step is there. ``alive`` raises when the job has ended; fails when no step
        comes for ``patience`` seconds."""
        seen, until, checked = -1, 0.0, time.monotonic()
        while (last := self.look()) < step:
            now = time.monotonic()
            if last != seen:
                seen, until = last, now + patience
            assert now < until, f"no step after {last} for {patience:g} s"
            if now > checked + 1:
                alive()
                checked = now
            time.sleep(LOOK_S)

    def wait_after(
        self, moment: float, count: int, patience: float, alive: Callable[[], object]
    ) -> None:
        """Until so many steps have ended after a moment (seconds since the epoch)."""
        self.look()
        done = sum(1 for when in self.times if when > moment)
        while done < count:
            self.wait((self.numbers[-1] if self.numbers else 0) + count - done, patience, alive)
            done = sum(1 for when in self.times if when > moment)


@dataclass(frozen=True)
class Gap:
    """The time without the end of a step that holds a freeze, and what surrounds it."""

    start: float
    end: float
    step_s: float
    """The median step before."""
    full_speed_s: float | None
    """From the gap's end until steps are as short as before; None: not seen."""

    @property
    def downtime_s(self) -> float:
        return max(0.0, self.end - self.start - self.step_s)


def gap(times: Sequence[float], held: float, since: float, begin: float = 0.0) -> Gap:
    """The gap around a moment at which the job was surely frozen, in a move that began at
    ``since``; steps from ``begin`` until then say how long one takes."""
    pairs = list(pairwise(times))
    n = holding(times, held)
    assert n is not None, "no step before the freeze, or none after it"
    start, end = pairs[n - 1]
    before = [b - a for a, b in pairs if begin <= a and b <= since]
    assert before, "no step before the move"
    usual = median(before)
    after = [(a, b - a) for a, b in pairs if a >= end]
    full = None
    for at in range(len(after) - IN_A_ROW + 1):
        lengths = [length for _, length in after[at : at + IN_A_ROW]]
        if max(lengths[0], median(lengths)) <= FULL * usual:
            full = after[at][0] - end
            break
    return Gap(start, end, usual, full)


WARM = 10
"""Steps with which a job comes to its speed."""
AFTER_S = 2.0
"""So long after its end what comes is a move's cost no longer (lost_time.AFTER_S)."""


def lost(times: Sequence[float], asked: float, over: float, begin: float = 0.0) -> float:
    """Seconds that the job took for its steps from the request until two seconds after the end of
    a move, less what as many steps took before and after.

    ``times`` are the ends of the steps, and so are both ends of the window. What a step takes is
    the median of those from ``begin`` on until the request, and of as many after the window.
    """
    pairs = list(pairwise(times))
    before = [b - a for a, b in pairs if begin <= a and b <= asked]
    first = max(t for t in times if t <= asked)
    last = min((t for t in times if t >= over + AFTER_S), default=times[-1])
    after = [b - a for a, b in pairs if a >= last][: len(before)]
    assert before, "no step before the move"
    made = sum(1 for t in times if first < t <= last)
    # A job stands now and then for its own reasons, before as after: the median leaves that out.
    return max(0.0, last - first - made * median(before + after))


def noise(times: Sequence[float], asked: float, over: float, begin: float = 0.0) -> float:
    """How far off :func:`lost` can be on this machine, in seconds: the most that it says, either
    way, of as many steps in a row before the request, or after the window, when nothing moved.

    Where the job made fewer steps than that, all of them count for so many.
    """
    first = max(t for t in times if t <= asked)
    last = min((t for t in times if t >= over + AFTER_S), default=times[-1])
    made = sum(1 for t in times if first < t <= last)
    before = [b - a for a, b in pairwise(times) if begin <= a and b <= asked]
    after = [b - a for a, b in pairwise(times) if a >= last]
    usual = median(before + after)
    found = 0.0
    for steps in (before, after):
        row = min(made, len(steps))
        for n in range(len(steps) - row + 1 if row else 0):
            found = max(found, abs(sum(steps[n : n + row]) - row * usual) * made / row)
    return found


def progress(times: Sequence[float], since: float, until: float) -> float:
    """Steps made in a window, the parts of steps at its ends with them."""
    made = 0.0
    for a, b in pairwise(times):
        inside = min(b, until) - max(a, since)
        if inside > 0:
            made += inside / (b - a)
    return made


def slow_down(times: Sequence[float], window: tuple[float, float], step_s: float) -> float | None:
    """By what share the job was slower in a window than at ``step_s`` a step; None where the window
    is too short to tell."""
    since, until = window
    if until - since < 3 * step_s:
        return None
    return 1 - progress(times, since, until) * step_s / (until - since)
