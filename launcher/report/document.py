# SPDX-License-Identifier: Apache-2.0
"""Makes a report into JSON, for scripts: all that the page shows, in full precision."""

from __future__ import annotations

import math
from typing import Any

from .evidence import counted, doubts, hosts_of
from .headline import headline
from .record import DowntimeReport, RankRun


def as_json(report: DowntimeReport) -> dict[str, Any]:
    """Return all that the page shows. The migration's numbers are also at the top level."""
    from msgspec import to_builtins  # here: all commands import this package, few need msgspec

    move = report.move
    return {
        "title": report.title,
        "headline": headline(report),
        "outcome": report.outcome,
        "command": report.command,
        "bit_identical": report.bit_identical,
        "doubts": doubts(report, 1),
        "steps": report.steps,
        "ranks": len(report.verdicts),
        "capsule": move.capsule,
        "source": move.source,
        "destination": move.destination,
        "downtime_s": report.downtime_s,
        "lost_s": move.lost_s,
        "cost": move.cost,
        "frozen_s": move.frozen_s,
        "predicted_s": move.expected.predicted_s if move.expected else None,
        "unaccounted_s": move.unaccounted_s,
        "image_bytes": move.image_bytes,
        "ahead_bytes": move.ahead_bytes,
        "link_rate": move.link_rate,
        "phases": to_builtins(move.phases),
        "median_step_s": report.median_step_s,
        "migrations": [
            to_builtins(move)
            | {"frozen_s": move.frozen_s, "total_s": move.total_s, "downtime_s": report.downtime_s}
            | {"steps": to_builtins(counted(report))}
        ],
        "verdicts": [
            to_builtins(v) | {"identical": v.identical, "max_difference": finite(v.max_difference)}
            for v in report.verdicts
        ],
        "reference": [run_as_json(run) for run in report.reference],
        "moved": [run_as_json(run) for run in report.moved],
        "environment": dict(report.environment),
        "reproduce": list(report.reproduce),
    }


def run_as_json(run: RankRun) -> dict[str, Any]:
    steps = [
        {
            "step": s.step,
            "loss": finite(s.loss),
            "loss_hex": s.loss.hex(),
            "time": s.time,
            "host": s.host,
        }
        for s in run.steps
    ]
    hosts = [host for host, _ in hosts_of(run)]
    return {"rank": run.rank, "sha256": run.sha256, "hosts": hosts, "steps": steps}


def finite(value: float) -> float | None:
    """Return the value, or None (null) for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None
