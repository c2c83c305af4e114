# SPDX-License-Identifier: Apache-2.0
"""Shows migrations to people: those under way with a progress bar, the others with phase tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ...errors import LiveshiftError, Refused, StepFailed
from ...runtime.cost.words import in_words
from ...runtime.messages import GetMigration, MigrationDetails, MigrationRow, Phase
from ...runtime.model.steps import ENDS, MigrationStep
from ..client.client import Client
from ..report import quantities as q
from . import forecast, render, retry

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress, TaskID

    from ..report.record import ReportedMigration

ENDED = frozenset(step.value for step in ENDS)
LOOK_S = 0.1  # seconds between two looks at a migration
COST_S = 6.0  # seconds to wait for the cost of a move, which is known 2 to 4 s after its end


def over(row: MigrationRow) -> bool:
    """Whether nothing more will happen in this migration."""
    return row.state in ENDED


def get_migration(client: Client, name: str) -> MigrationRow:
    """Return a migration as it is now. This request also brings its count of bytes up to date."""
    return retry.request(client, MigrationDetails, GetMigration(name)).row


def follow(client: Client, name: str) -> MigrationRow:
    """Wait until a migration is over, with progress on a terminal. Returns its last state."""
    with bars() as shown:
        while True:
            row = get_migration(client, name)
            shown.update([row])
            if over(row):
                return row
            time.sleep(LOOK_S)


def with_costs(client: Client, rows: Iterable[MigrationRow]) -> list[MigrationRow]:
    """Return the same migrations once the cost of each move is known, or after :data:`COST_S`."""
    until, found = time.monotonic() + COST_S, list(rows)
    while True:
        found = [get_migration(client, row.name) if _awaits_cost(row) else row for row in found]
        if not any(map(_awaits_cost, found)) or time.monotonic() > until:
            return found
        time.sleep(LOOK_S)


def _awaits_cost(row: MigrationRow) -> bool:
    return row.kind == "move" and row.state == MigrationStep.DONE.value and row.cost is None


def cost(row: MigrationRow) -> str:
    """Return ``cost 0.9 s of training: paused 0.6, slower 0.3; host empty after 2.4 s``, and what
    was predicted, or that the cost is not known yet."""
    if row.cost is not None:
        return in_words(row.cost, row.predicted)
    return f"cost not known yet: `liveshift events {row.name}` will show it"


class Bars:
    """One progress bar for each migration under way. With ``progress`` None nothing is shown."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self.lines: list[str] = []  # the lines below the bars
        self._tasks: dict[str, TaskID] = {}

    def update(self, rows: Iterable[MigrationRow]) -> None:
        """Show these migrations. One that is no longer among them loses its bar."""
        if self.progress is None:
            return
        present = {row.name: row for row in rows}
        self.lines = forecast.lines(present.values())
        for gone in self._tasks.keys() - present.keys():
            self.progress.remove_task(self._tasks.pop(gone))
        for name, row in present.items():
            if name not in self._tasks:
                self._tasks[name] = self.progress.add_task("", what="", step="", amount="")
            sent, total = across(row)
            self.progress.update(
                self._tasks[name],
                total=total or None,
                completed=sent,
                what=f"{row.capsule} {row.source} → {row.destination}",
                step=row.state,
                amount=amount(row),
            )


@contextmanager
def bars() -> Iterator[Bars]:
    """Show progress bars on stderr inside the block, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield Bars(None)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.text import Text

    shown = Bars(None)

    class Picture(Progress):
        """A bar for each move, and below them lines about their pauses."""

        def get_renderables(self) -> Iterator[RenderableType]:
            yield self.make_tasks_table(self.tasks)
            yield from (Text(line, style="dim") for line in shown.lines)

    columns = (
        TextColumn("{task.fields[what]}", markup=False),
        TextColumn("{task.fields[step]}", style="yellow", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[amount]}", markup=False),
        TimeElapsedColumn(),
    )
    with Picture(*columns, console=render.err(), transient=True) as progress:
        shown.progress = progress
        yield shown


def across(row: MigrationRow) -> tuple[int, int]:
    """Return (bytes that have gone over, bytes in all); 0 for the second if it is not known.

    If a move has a pre-copy, only the memory of that is counted; each round adds to it.
    """
    if (seen := row.precopy) is not None:
        return seen.bytes, seen.bytes + seen.left
    return row.bytes, max(row.expected_bytes, row.bytes) if row.expected_bytes else 0


def amount(row: MigrationRow) -> str:
    """Return ``180 MB of 246 MB``, as far as either is known."""
    gone, total = across(row)
    if not total:
        return q.size(gone) if gone else ""
    return f"{q.size(gone)} of {q.size(total)}"


def bar(row: MigrationRow) -> str:
    """Return how far a move is, as text: ``━━━━━━──── 60 %``; empty if that is not known."""
    gone, total = across(row)
    if not total:
        return ""
    part = min(1.0, gone / total)
    filled = int(part * 10)
    return f"{'━' * filled}{'─' * (10 - filled)} {part * 100:.0f} %"


def outcome(row: MigrationRow) -> str:
    """Return one line about a migration that is over."""
    way = f"{row.source} → {row.destination}"
    if row.state == MigrationStep.DONE.value:
        return f"{row.capsule} moved {way}, paused {paused(row)}"
    if row.state == MigrationStep.LOST.value:
        return f"{row.capsule} was lost on its way {way}: {row.error or 'no reason given'}"
    if row.state == MigrationStep.JOB_ENDED.value:
        return f"{row.error}"
    if row.state == MigrationStep.REWOUND.value:
        return f"the move of {row.capsule} {way} is over: {row.error or 'no reason given'}"
    still = f", paused {q.pause(row.frozen_s)}" if row.frozen_s else ""
    return f"{row.capsule} stays on {row.source}{still}: {row.error or 'no reason given'}"


def raise_if_failed(row: MigrationRow) -> None:
    """Raise if a migration is over and did not move its capsule.

    Raises Refused if its job ended or if it went no further than what comes before the freeze,
    LiveshiftError if the capsule was lost or its job rewound, StepFailed otherwise.
    """
    if row.state == MigrationStep.DONE.value:
        return
    if row.state == MigrationStep.JOB_ENDED.value:
        raise Refused(outcome(row))
    message = f"{row.capsule} did not move {row.source} → {row.destination}: {row.error or '?'}"
    if row.state in (MigrationStep.LOST.value, MigrationStep.REWOUND.value):
        raise LiveshiftError(outcome(row), hint=row.hint)
    if not row.frozen_s:
        raise Refused(message, hint=row.hint)
    raise StepFailed("migrate", message, hint=row.hint)


def phase_table(row: MigrationRow) -> RenderableType:
    """Return the phases of a migration with seconds, bytes and share, the one under way among them;
    ``unaccounted`` and total last."""
    from ..report.phases import phase_table

    return phase_table(reported(row))


def reported(row: MigrationRow) -> ReportedMigration:
    """Return a migration as the report and the table of phases take it."""
    from ..report.record import ReportedMigration, covered

    phases = tuple(row.phases)
    if not over(row):
        since = max((p.start + p.seconds for p in phases), default=0.0)
        so_far, gone = max(0.0, row.seconds - since), across(row)[0]
        frozen = row.state in forecast.STANDING
        phases += (Phase(row.state, since, so_far, gone or None, frozen, "under way"),)
    return ReportedMigration(
        capsule=row.capsule,
        source=row.source,
        destination=row.destination,
        reason=row.reason,
        epoch=row.epoch,
        requested_at=row.asked,
        started_at=row.asked,
        phases=phases,
        unaccounted_s=max(0.0, row.seconds - covered(phases)),
        image_bytes=row.image_bytes,
        ahead_bytes=row.precopy.bytes if row.precopy else 0,
        link_rate=row.link_rate or None,
        committed=row.state == MigrationStep.DONE.value,
        lost_s=row.cost.lost_s if row.cost else None,
        cost=cost(row) if row.cost else "",
        expected=forecast.compared(row),
    )


def paused(row: MigrationRow) -> str:
    """Return ``0.70 s`` or ``0.70 s (predicted 0.81 s)``."""
    predicted = f" (predicted {q.pause(row.predicted.seconds)})" if row.predicted else ""
    return f"{q.pause(row.frozen_s)}{predicted}"


def sum_up(row: MigrationRow) -> str:
    """Return ``paused 0.92 s (predicted 0.38 s); copied 782 MB running, 117 MB paused``."""
    copied = []
    if (seen := row.precopy) is not None:
        copied.append(f"{q.size(seen.bytes)} running")
    if row.image_bytes:
        # After a pre-copy the link was busy for a moment only, which gives no rate of the link.
        at = f" at {q.rate(row.link_rate)}" if row.link_rate and not copied else ""
        copied.append(f"{q.size(row.image_bytes)} paused{at}")
    return f"paused {paused(row)}" + (f"; copied {', '.join(copied)}" if copied else "")
