# SPDX-License-Identifier: Apache-2.0
"""``make mutation``: change the protocol's files one passage at a time; do their tests notice?

Each file has its list of fast tests (judges.py). A mutant is killed when one of them fails or takes
far longer than it should. The result is in build/mutation.json; it ends with 1 if a mutant survived
that judges.py does not explain. Files are named as FILES=runtime/journal/journal.py,gate.c;
ARGS="--every 8" tries a sample.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutation import c_mutants, python_mutants
from mutation.judges import EXPLAINED, JUDGES
from mutation.python_mutants import Mutant
from mutation.shadow import ROOT, Shadow

KILLED, TIMED_OUT, SURVIVED = "killed", "timed out", "survived"


@dataclass
class Score:
    """Of one file; ``survivors`` with what explains them, or ""."""

    file: str
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys((KILLED, TIMED_OUT), 0))
    survivors: list[tuple[str, str]] = field(default_factory=list)

    @property
    def unexplained(self) -> list[str]:
        return [mutant for mutant, why in self.survivors if not why]

    def __str__(self) -> str:
        dead, left = sum(self.counts.values()), len(self.survivors)
        explained = left - len(self.unexplained)
        return (
            f"{self.file}: {dead} of {dead + left} killed ({self.counts[TIMED_OUT]} by time),"
            f" {explained} explained, {left - explained} survived; {self.seconds:.0f} s"
        )


@functools.cache
def mutants_of(file: str) -> list[Mutant]:
    """All of a file, each once."""
    source = (ROOT / file).read_text()
    made: Iterator[Mutant] = (
        c_mutants.mutants(source) if file.endswith(".c") else python_mutants.mutants(source)
    )
    return list({mutant.text: mutant for mutant in made}.values())


def explanation(file: str, mutant: Mutant) -> str:
    return EXPLAINED.get((file, *change_of((ROOT / file).read_text(), mutant)), "")


def change_of(source: str, mutant: Mutant) -> tuple[str, str]:
    """The lines that differ, as they are and as the mutant has them, each as one line."""
    before, after = source.splitlines(), mutant.text.splitlines()
    for _ in "from the start", "from the end":
        same = _in_common(before, after)
        before, after = before[same:][::-1], after[same:][::-1]
    return _one_line(before), _one_line(after)


def _in_common(one: list[str], other: list[str]) -> int:
    """How many lines are the same before the first that differs."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _one_line(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


class Trial:
    """The mutants of one file against its tests."""

    def __init__(self, file: str, place: Path, jobs: int) -> None:
        self.file, self.tests = file, JUDGES[file]
        self._place, self._jobs = place, jobs
        self._shadows: SimpleQueue[Shadow] = SimpleQueue()

    def run(self, only: set[int] | None = None, every: int = 1) -> Score:
        """Raises RuntimeError where the tests say nothing: they fail without a mutant, or pass with
        the file broken. ``only``: the lines to change. ``every``: of those, try one in so many."""
        began, score = time.monotonic(), Score(self.file)
        shadows = [Shadow(self._place) for _ in range(self._jobs)]
        try:
            limit = self._limit(shadows[0])
            for shadow in shadows:
                self._shadows.put(shadow)
            mutants = [m for m in mutants_of(self.file) if only is None or m.line in only][::every]
            with ThreadPoolExecutor(self._jobs) as pool:
                for mutant, outcome in zip(
                    mutants, pool.map(lambda m: self._try(m, limit), mutants), strict=True
                ):
                    if outcome == SURVIVED:
                        why = explanation(self.file, mutant)
                        score.survivors.append((str(mutant), why))
                        print(f"{self.file}:{mutant}" + (f"  ({why})" if why else ""), flush=True)
                    else:
                        score.counts[outcome] += 1
        finally:
            for shadow in shadows:
                shadow.close()
        score.seconds = time.monotonic() - began
        return score

    def _limit(self, shadow: Shadow) -> float:
        """Seconds that the tests may take."""
        began = time.monotonic()
        if not shadow.passes(self.tests, 1800):
            raise RuntimeError(f"the tests of {self.file} fail without any change to it")
        took = time.monotonic() - began
        source = (ROOT / self.file).read_text()
        shadow.put(self.file, "#error\n" if self.file.endswith(".c") else "raise RuntimeError\n")
        if shadow.passes(self.tests, 1800):
            raise RuntimeError(f"the tests of {self.file} pass when it is broken: not theirs")
        shadow.put(self.file, source)
        return 20 + 5 * took

    def _try(self, mutant: Mutant, limit: float) -> str:
        shadow = self._shadows.get()
        try:
            shadow.put(self.file, mutant.text)
            passed = shadow.passes(self.tests, limit)
        finally:
            self._shadows.put(shadow)
        return TIMED_OUT if passed is None else SURVIVED if passed else KILLED


def main() -> int:
    parser = argparse.ArgumentParser(prog="mutation", description=__doc__)
    parser.add_argument("--files", default="", help="some of them, with commas between")
    parser.add_argument("--lines", default="", help="only those lines, such as 40,41")
    parser.add_argument("--every", type=int, default=1, help="a sample: one change in so many")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--list", action="store_true", help="show the mutants, try none")
    args = parser.parse_args()
    names = [name for name in args.files.split(",") if name]
    files = [f for f in JUDGES if not names or any(f.endswith(name) for name in names)]
    if args.list:
        for file in files:
            for mutant in mutants_of(file):
                print(f"{file}:{mutant}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    place = ROOT / "build/mutation"
    place.mkdir(parents=True, exist_ok=True)
    lines = {int(line) for line in args.lines.split(",") if line} or None
    scores = []
    for file in files:
        scores.append(Trial(file, place, args.jobs).run(lines, args.every))
        print(scores[-1], flush=True)
    _write(scores)
    return 1 if any(score.unexplained for score in scores) else 0


def _write(scores: list[Score]) -> None:
    """Beside what earlier runs found of other files."""
    path = ROOT / "build/mutation.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    for score in scores:
        known[score.file] = {
            **{word.replace(" ", "_"): count for word, count in score.counts.items()},
            "survived": score.unexplained,
            "explained": {mutant: why for mutant, why in score.survivors if why},
            "seconds": round(score.seconds, 1),
        }
    path.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
