# SPDX-License-Identifier: Apache-2.0
"""What the ranks' records tell of a host's loss.

Each process of a rank appends to the rank's record: that it has begun, and a line a step. A step
that is made again has a second line. A lab host has this machine's clock, so times are ours.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LOOK_S = 0.05
WARM = 50
"""Steps with which a job comes to its speed."""


@dataclass(frozen=True)
class Line:
    """One step of one process. ``part``: the rank whose share it has trained, -1 for none."""

    step: int
    part: int
    time: float
    loss: str
    digest: str
    host: str


@dataclass(frozen=True)
class Loss:
    """What a host's loss has cost, in seconds since the cut; see record.Kill."""

    reached: int
    repeated: int
    first_step_s: float
    lost_s: float
    new_step_s: float
    began_s: float | None


class History:
    """All records of a job, each line read once."""

    def __init__(self, out: Path, records: int, parts: int) -> None:
        self.parts = parts
        self.lines: list[Line] = []
        self.begun: list[tuple[float, str]] = []
        """When a process began, and the host that it saw itself on."""
        self._paths = [out / f"rank{number}.jsonl" for number in range(records)]
        self._spares = records > parts
        self._at = [0] * records
        self._hosts = [""] * records

    def look(self) -> None:
        for number, path in enumerate(self._paths):
            if not path.exists():
                continue
            with path.open("rb") as record:
                record.seek(self._at[number])
                text = record.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._at[number] += len(whole)
            for line in map(json.loads, whole.splitlines()):
                if "began" in line:
                    self.begun.append((line["began"], line["host"]))
                    self._hosts[number] = line["host"]
                    continue
                values = (line["step"], line["part"], line["time"], line["loss_hex"])
                self.lines.append(Line(*values, line["sha256"], self._hosts[number]))

    def of(self, part: int) -> list[Line]:
        return [line for line in self.lines if line.part == part]

    def reached(self) -> int:
        """The last step that all parts have made, 0 before the first."""
        ends = [max((line.step for line in self.of(p)), default=0) for p in range(self.parts)]
        return min(ends)

    def host_of(self, part: int) -> str:
        """Where a part was trained last."""
        return max(self.of(part), key=lambda line: line.time).host

    def wait(
        self,
        ready: Callable[[], bool],
        what: str,
        patience: float,
        alive: Callable[[], None],
    ) -> None:
        """Until ``ready``; fails when no step is made for ``patience`` seconds meanwhile. ``alive``
        is called all the time, and raises when the job has ended."""
        seen, until = -1, 0.0
        while True:
            self.look()
            if ready():
                return
            if len(self.lines) != seen:
                seen, until = len(self.lines), time.monotonic() + patience
            assert time.monotonic() < until, f"{what}: no step is made for {patience:g} s"
            alive()
            time.sleep(LOOK_S)

    def back(self, cut: float, dead: float, part: int) -> Loss | None:
        """What the loss of the host that had ``part`` has cost; None until all parts are further
        than they were. ``cut`` and ``dead``: before and after the host's power was cut; what the
        lost part writes later is of another process."""
        before = [
            max((each.step for each in self.of(p) if each.time <= dead), default=0)
            for p in range(self.parts)
        ]
        reached = min(before)
        after = {
            p: [each for each in self.of(p) if each.time > (dead if p == part else cut)]
            for p in range(self.parts)
        }
        again = [self._since(after, part, target) for target in (0, reached, reached + 1)]
        first, there, new = (seconds and seconds - cut for seconds in again)
        if first is None or there is None or new is None:
            return None
        began = min((when for when, _ in self.begun if when > dead), default=None)
        return Loss(
            reached=reached,
            repeated=max(0, reached + 1 - after[part][0].step),
            first_step_s=first,
            lost_s=there,
            new_step_s=new,
            began_s=None if began is None else began - cut,
        )

    def _since(self, after: Mapping[int, list[Line]], part: int, target: int) -> float | None:
        """When all parts had made a step from ``target`` on. Others than the lost part may have
        ended the step in which the cut fell; all of them wait for the lost one.

        A part need not make the lost part's first step again: its image may have been taken just
        after it had written that step. Then the job has made the step once the lost part has."""
        if not after[part]:
            return None
        wanted = max(target, after[part][0].step)
        needed = [
            lines
            for p, lines in after.items()
            if p == part or not lines or min(each.step for each in lines) <= wanted
        ]
        ends = [
            min((each.time for each in lines if each.step >= wanted), default=None)
            for lines in needed
        ]
        known = [end for end in ends if end is not None]
        return max(known) if len(known) == len(ends) else None

    def span(self, last: int) -> float:
        """Seconds from the first step of all parts to when all have made step ``last``."""
        ends = []
        for step in (1, last):
            times = [[e.time for e in self.of(p) if e.step == step] for p in range(self.parts)]
            assert all(times), f"not all parts have made step {step}"
            ends.append(max(map(min, times)))
        return ends[1] - ends[0]

    def rate(self, until: int) -> float:
        """Steps per second between steps WARM and ``until``, of the slowest part."""
        rates = []
        for part in range(self.parts):
            times = [each.time for each in self.of(part) if WARM <= each.step <= until]
            assert len(times) > 1, f"part {part} has made {len(times)} steps after its first {WARM}"
            rates.append((len(times) - 1) / (times[-1] - times[0]))
        return min(rates)

    def differs(self, reference: History, last: int) -> str:
        """What is not equal to the bit in this job, in words; "" when nothing is. Each step of each
        part must be there, each of its repetitions is compared too. Where spares compute along, one
        line of a step is enough: no step is made again, and a host may die before it has written
        its line."""
        wanted = {(each.part, each.step): each for each in reference.lines}
        for part in range(self.parts):
            there = self.lines if self._spares else self.of(part)
            if missing := set(range(1, last + 1)) - {each.step for each in there}:
                return f"step {min(missing)} of rank {part} is missing"
        return next(iter(_unlike(self.lines, wanted)), "")


def _unlike(lines: Sequence[Line], wanted: Mapping[tuple[int, int], Line]) -> Iterable[str]:
    for line in lines:
        like = wanted.get((max(0, line.part), line.step))
        if like is None:
            yield f"the untouched run has no step {line.step} of rank {line.part}"
        elif line.part >= 0 and line.loss != like.loss:
            yield f"rank {line.part} has another loss in step {line.step}"
        elif line.digest != like.digest:
            yield f"rank {line.part} has other parameters after step {line.step}"
