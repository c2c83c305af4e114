# SPDX-License-Identifier: Apache-2.0
"""Reads what a rank of ``examples/train_gpt.py`` has written, for a report."""

from __future__ import annotations

import json
from pathlib import Path

from ...errors import ConfigError
from .record import RankRun, ReportedStep


def read_rank(folder: Path, rank: int) -> RankRun:
    """Read what one rank of ``examples/train_gpt.py`` wrote into its ``--out`` folder.

    Raises ConfigError if a file is missing or a line is not what the example writes.
    """
    log, final = folder / f"rank{rank}.jsonl", folder / f"final{rank}.json"
    try:
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        steps = tuple(
            ReportedStep(ln["step"], float.fromhex(ln["loss_hex"]), ln["time"], ln["host"])
            for ln in lines
        )
        return RankRun(rank, steps, json.loads(final.read_text())["sha256"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"reading rank {rank} of a run in {folder}: {type(error).__name__}: {error}",
            hint="the run must have ended by itself; look at its output",
        ) from error
