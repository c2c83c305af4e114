# SPDX-License-Identifier: Apache-2.0
"""Makes a report into JSON, for scripts: all that the page shows, in full precision."""

from __future__ import annotations

import math
from typing import Any

from msgspec import to_builtins

from .evidence import counted, doubts, hosts_of
from .headline import headline
from .record import DowntimeReport, RankRun


def as_json(report: DowntimeReport) -> dict[str, Any]:
    """Return all that the page shows. The principal migration's numbers are at the top level."""
    move = report.principal
    return {
        "title": report.title,
        "headline": headline(report),
        "outcome": report.outcome,
        "command": report.command,
        "bit_identical": report.bit_identical,
        "doubts": doubts(report, 1) if move else [],
        "steps": report.steps,
        "ranks": len(report.verdicts),
        "capsule": move.capsule if move else None,
        "source": move.source if move else None,
        "destination": move.destination if move else None,
        "downtime_s": report.downtime_s(move) if move else None,
        "lost_s": move.lost_s if move else None,
        "cost": move.cost if move else "",
        "frozen_s": move.frozen_s if move else 0.0,
        "predicted_s": move.expected.predicted_s if move and move.expected else None,
        "unaccounted_s": move.unaccounted_s if move else 0.0,
        "image_bytes": move.image_bytes if move else 0,
        "ahead_bytes": move.ahead_bytes if move else 0,
        "link_rate": move.link_rate if move else None,
        "phases": to_builtins(move.phases) if move else [],
        "median_step_s": report.median_step_s,
        "migrations": [
            to_builtins(m)
            | {"frozen_s": m.frozen_s, "total_s": m.total_s, "downtime_s": report.downtime_s(m)}
            | {"steps": to_builtins(counted(report, m))}
            for m in report.migrations
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
