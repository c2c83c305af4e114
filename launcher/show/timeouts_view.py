# SPDX-License-Identifier: Apache-2.0
"""Shows people the timeouts: each one, where it comes from, what happens at its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...runtime.config.timeouts import DERIVATIONS, RULES, Rule, Timeouts
from . import render

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...runtime.config.cluster import Reading

REACHED = {
    "heartbeat": "an agent says again that it lives",
    "suspicion": "a silent host counts as lost, and what waits for it fails",
    "gpu_lock": "a CUDA process does not come to rest: it is unlocked, the job runs on",
    "quiesce": "no collective boundary: the gates open, and it is tried once more",
    "freeze": "no image yet: the job runs on at the source",
    "restore": "not restored: tried again while there is time, else back to the source",
    "standstill": "the move is not over: it is undone",
    "collective": "ranks have waited for the moving one for too long: the job fails by itself",
    "prepare": "the move is dropped; the job trains meanwhile",
    "precopy": "the rest goes during the freeze, if freeze allows; else the move is dropped",
    "fault": "a command that failed apart from a fault by so much has failed by itself",
    "grace": "SIGKILL follows SIGTERM; no other timeout depends on it",
}
"""What happens when a deadline is over. The order is from the shortest deadline to the
job's own; the others come last."""


@dataclass(frozen=True)
class DeadlineRow:
    """One deadline. ``line``: where the cluster file gives it, None if it does not. ``derived``:
    what it then follows from, "" if it is given."""

    name: str
    seconds: float
    line: int | None
    derived: str
    reached: str


def steps(timeouts: Timeouts, reading: Reading | None = None) -> Iterator[DeadlineRow]:
    """Yield every deadline, in the order of :data:`REACHED`."""
    for name, reached in REACHED.items():
        line = reading.line("timeouts", name) if reading else None
        derived = "" if name in timeouts.given else DERIVATIONS[name].text
        yield DeadlineRow(name, getattr(timeouts, name), line, derived, reached)


def as_data(reading: Reading) -> dict[str, Any]:
    """Return the deadlines, and the rules that they keep, for -o json."""
    values = reading.cluster.timeouts.values
    rules = [
        {
            "sum": _terms(rule),
            "seconds": rule.total(values),
            "bound": rule.bound,
            "bound_seconds": values[rule.bound],
            "why": rule.why,
        }
        for rule in RULES
    ]
    return {"deadlines": [*steps(reading.cluster.timeouts, reading)], "rules": rules}


def tables(reading: Reading) -> list[RenderableType]:
    """Return the timeouts and their rules as tables. Rules with the same terms share a row."""
    timeouts = reading.cluster.timeouts
    deadlines = render.table("deadline", "seconds", "from", "when it is over", right=("seconds",))
    deadlines.columns[-1].no_wrap = False
    for step in steps(timeouts, reading):
        source = f"line {step.line}" if step.line else step.derived
        deadlines.add_row(step.name, _plain(step.seconds), source, step.reached)
    rules = render.table("must hold", "since")
    rules.columns[-1].no_wrap = False
    values = timeouts.values
    grouped: dict[tuple[str, str], list[Rule]] = {}
    for rule in RULES:
        grouped.setdefault((_terms(rule), rule.why), []).append(rule)
    for (terms, why), alike in grouped.items():
        into = ", ".join(f"{rule.bound} {_plain(values[rule.bound])}" for rule in alike)
        rules.add_row(f"{terms} = {_plain(alike[0].total(values))} ≤ {into}", why)
    return [deadlines, "", rules]


def in_a_line(timeouts: Timeouts) -> str:
    """Return the main deadlines in a line:

    ``heartbeat 1 < suspicion 5 < freeze 120 + restore 120 < standstill 300 < collective 600 s``
    """
    values = {name: f"{name} {_plain(value)}" for name, value in timeouts.values.items()}
    steps = [values["heartbeat"], values["suspicion"], f"{values['freeze']} + {values['restore']}"]
    return " < ".join([*steps, values["standstill"], values["collective"]]) + " s"


def _terms(rule: Rule) -> str:
    return " + ".join(f"{n} × {name}" if n > 1 else name for name, n in rule.terms.items())


def _plain(seconds: float) -> str:
    """Write seconds to the millisecond, without zeros at the end: 0.083, 1.5, 120."""
    return f"{seconds:.3f}".rstrip("0").rstrip(".")
