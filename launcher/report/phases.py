# SPDX-License-Identifier: Apache-2.0
"""Makes a migration's phases into a table for the terminal."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from . import quantities as q
from .record import ReportedMigration


def phase_table(migration: ReportedMigration) -> Table:
    """Return the phases with seconds, share, bytes and what they did. Phases in which the job is
    frozen are bold.

    The last rows are ``unaccounted`` (time that no phase covers) and the total.
    """
    move = f"{migration.capsule}: {migration.source} → {migration.destination}"
    table = Table(title=escape(f"{move}, epoch {migration.epoch}"), title_justify="left")
    table.add_column("phase", no_wrap=True)
    for name in ("seconds", "share", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("job", no_wrap=True)
    table.add_column("what", overflow="fold")
    total = migration.total_s
    for phase in migration.phases:
        table.add_row(
            escape(phase.name),
            f"{phase.seconds:.3f}",
            q.share(phase.seconds, total),
            q.size(phase.bytes),
            "frozen" if phase.frozen else "runs",
            escape(phase.detail),
            style="bold" if phase.frozen else None,
        )
    table.add_row(
        "unaccounted",
        f"{migration.unaccounted_s:.3f}",
        q.share(migration.unaccounted_s, total),
        "",
        "",
        "between the phases",
        style="dim",
        end_section=True,
    )
    copied = q.size(migration.ahead_bytes + migration.image_bytes)
    sums = f"frozen {q.seconds(migration.frozen_s)}"
    table.add_row("total", f"{total:.3f}", "100 %", copied, "", sums)
    return table
