# SPDX-License-Identifier: Apache-2.0
"""The results: one JSON file, and a table beside it for people."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import plan
from .machine import Machine
from .step import Outcome

FORMAT = 2
CELL = 240
"""Characters of a cell; the JSON has all."""


@dataclass(frozen=True)
class Goal:
    """``met`` is None where nothing tells: not measured, or on the doubles, where time is not a
    GPU's."""

    what: str
    goal: str
    value: float | None
    met: bool | None


@dataclass
class Report:
    """A run of the suite, complete or not."""

    machine: Machine
    liveshift: str
    commit: str
    date: str
    outcomes: dict[str, Outcome]
    seconds: float = 0.0

    def as_data(self) -> dict[str, Any]:
        machine = asdict(self.machine)
        steps = {}
        for name, outcome in self.outcomes.items():
            (step,) = plan.named([name])
            told = asdict(outcome)
            if told["bit_identical"] is None:
                del told["bit_identical"]
            steps[name] = {"title": step.title, **told}
        return {
            "format": FORMAT,
            "simulated": machine.pop("simulated"),
            "gpu": machine["gpu"],
            "driver": machine["driver"],
            "date": self.date,
            "liveshift": self.liveshift,
            "commit": self.commit,
            "seconds": round(self.seconds, 1),
            "machine": machine,
            "goals": [asdict(goal) for goal in goals(self)],
            "steps": steps,
        }

    @property
    def name(self) -> str:
        """``<gpu>-<driver>-<date>``; what is simulated says so first."""
        gpu = re.sub(r"^liveshift simulated GPU", "gpu", self.machine.gpu)
        words = f"{gpu}-{self.machine.driver}-{self.date}"
        slug = re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-")
        return f"simulated-{slug}" if self.machine.simulated else slug

    def take_over(self, folder: Path) -> None:
        """Take over the steps of earlier runs on the same day, GPU and driver, which this run may
        replace: a GPU may be lent for less time than all steps take."""
        path = folder / f"{self.name}.json"
        if path.is_file():
            for name, told in json.loads(path.read_text())["steps"].items():
                del told["title"]
                self.outcomes[name] = Outcome(**told)

    def record(self, name: str, outcome: Outcome) -> None:
        """Set the outcome of a step. One that was not run does not replace an earlier one."""
        outcome.commit = self.commit
        if outcome.ran or name not in self.outcomes:
            self.outcomes[name] = outcome

    def write(self, folder: Path) -> Path:
        """Both files, whole at any time; returns the JSON's path."""
        folder.mkdir(parents=True, exist_ok=True)
        data = json.dumps(self.as_data(), indent=1) + "\n"
        for suffix, text in ((".json", data), (".md", "\n".join(self.table()) + "\n")):
            part = folder / f".{self.name}{suffix}"
            part.write_text(text)
            part.rename(folder / (self.name + suffix))
        return folder / f"{self.name}.json"

    def table(self) -> Iterator[str]:
        """The results as a page of Markdown."""
        m = self.machine
        real = "**the simulated driver: no GPU, and no figure of one**" if m.simulated else m.gpu
        yield f"# GPU suite: {real}"
        yield ""
        yield f"Driver {m.driver}, CUDA {m.cuda}, Python {m.python}, torch {m.torch or 'none'}"
        yield f"({'with' if m.torch_cuda else 'without'} CUDA), Linux {m.kernel}, {m.cores} cores,"
        yield f"{m.ram_bytes / 2**30:.0f} GiB. liveshift {self.liveshift}, {self.date}; the last"
        yield f"run took {self.seconds:.0f} s."
        yield ""
        yield "| step | what | | commit | seconds | remark |"
        yield "|---|---|---|---|---|---|"
        for name, outcome in sorted(self.outcomes.items(), key=_by_number):
            (step,) = plan.named([name])
            told = "passed" if outcome.passed else "FAILED" if outcome.ran else "not run"
            said = "; ".join(filter(None, (outcome.why, *outcome.remarks)))
            if outcome.bit_identical is not None:
                said = f"{'' if outcome.bit_identical else 'not '}bit-identical; {said}"
            row = (name, step.title, told, outcome.commit, f"{outcome.seconds:.0f}", _cell(said))
            yield f"| {' | '.join(row)} |"
        yield ""
        yield "| goal | wanted | measured | |"
        yield "|---|---|---|---|"
        for goal in goals(self):
            verdict = "" if goal.met is None else "met" if goal.met else "missed"
            value = "" if goal.value is None else f"{goal.value:g}"
            yield f"| {goal.what} | {goal.goal} | {value} | {verdict} |"
        for name, outcome in sorted(self.outcomes.items(), key=_by_number):
            if outcome.figures:
                yield ""
                yield f"## {name}"
                yield ""
                yield "| figure | value |"
                yield "|---|---|"
                for what, value in flat(outcome.figures):
                    yield f"| {what} | {_cell(str(value))} |"


def _by_number(item: tuple[str, Outcome]) -> int:
    return int(item[0].removeprefix("E"))


def _cell(text: str) -> str:
    text = text if len(text) <= CELL else f"{text[:CELL]} …"
    return " ".join(text.replace("|", "\\|").split()).strip("; ")


def flat(figures: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Tables of tables as rows."""
    for name, value in figures.items():
        if isinstance(value, dict) and "start_s" in value:  # a phase of a move
            yield above + name, _phase(value)
        elif isinstance(value, dict):
            yield from flat(value, f"{above}{name} / ")
        else:
            yield above + name, value


def _phase(told: dict[str, Any]) -> str:
    words = [f"{told['s']} s from {told['start_s']} s on"]
    words += [f"{told['bytes']:,} B"] if "bytes" in told else []
    words += ["frozen"] if "frozen" in told else []
    words += [told["detail"]] if "detail" in told else []
    return ", ".join(words)


def goals(report: Report) -> list[Goal]:
    """The goals of this work, as ratios within the one run."""
    steps = report.outcomes

    def at(step: str, *path: str) -> float | None:
        found: Any = steps[step].figures if step in steps else {}
        for word in path:
            found = found.get(word) if isinstance(found, dict) else None
        return float(found) if isinstance(found, int | float) else None

    def goal(what: str, wanted: str, value: float | None, met: bool | None) -> Goal:
        told = None if value is None or report.machine.simulated else met
        return Goal(what, wanted, None if value is None else round(value, 4), told)

    rows = []
    for way in ("out", "in"):
        share = at("E2", "share of the link", way)
        rows.append(goal(f"copy {way}, of the link's limit", "≥ 0.8", share, (share or 0) >= 0.8))
    plain, fast = at("E1", "40 GiB", "frozen_s"), at("E4", "40 GiB", "frozen_s")
    shorter = plain / fast if plain and fast else None
    rows.append(goal("40 GiB frozen, plain / fast", "≥ 5", shorter, (shorter or 0) >= 5))
    for what in ("gate", "arena"):
        ratio = at("E9", "training step", f"{what}_ratio")
        chance = at("E9", "training step", "chance_ratio")
        # Where two jobs without the library differ by more than the goal allows, nothing is told.
        told = None if chance is None or abs(chance - 1) > 0.005 else (ratio or 9) <= 1.005
        name = "interposer" if what == "gate" else "interposer and its allocator"
        rows.append(goal(f"training step with the {name} / without", "≤ 1.005", ratio, told))
    for step in ("E5", "E6", "E10"):
        done = steps.get(step)
        told = None if done is None or not done.ran else done.passed and done.bit_identical
        rows.append(Goal(f"{step} bit-identical", "always", None, told))
    return rows
