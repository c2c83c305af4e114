# SPDX-License-Identifier: Apache-2.0
"""The moved job against the same job that nobody touched, step by step and bit for bit; and its
steps against the moves that it is said to have made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from liveshift.launcher.report import gaps
from liveshift.runtime.messages import MigrationRow
from liveshift.runtime.model.steps import MigrationStep

SAME = ("step", "loss_hex", "sha256")
"""What a line of a rank's log must have in common with the other run's."""


def steps(out: Path, rank: int) -> int:
    """How many steps a rank has made."""
    return len((out / f"rank{rank}.jsonl").read_text().splitlines())


def differences(moved: Path, reference: Path, ranks: int) -> list[str]:
    """The first difference of each rank, in words; none when all is equal to the bit."""
    found = []
    for rank in range(ranks):
        first, second = _lines(moved, rank), _lines(reference, rank)
        for number, (mine, theirs) in enumerate(zip_longest(first, second), 1):
            if mine is None or theirs is None or any(mine[w] != theirs[w] for w in SAME):
                found.append(f"rank {rank}, line {number}: {_shown(mine)}, not {_shown(theirs)}")
                break
        ends = [json.loads((out / f"final{rank}.json").read_text()) for out in (moved, reference)]
        if ends[0] != ends[1]:
            found.append(f"rank {rank} ended with {ends[0]}, not {ends[1]}")
    return found


def unborne(out: Path, rows: Sequence[MigrationRow]) -> list[str]:
    """Moves that the steps of their rank do not bear out: made before the freeze and after it, with
    a gap between two of them that holds it. Moves that failed are not among them."""
    found, times = [], dict[int, list[float]]()
    for row in rows:
        rank = int(row.capsule.partition("/")[2])
        if rank not in times:
            times[rank] = [line["time"] for line in _lines(out, rank)]
        if row.state == MigrationStep.DONE.value:
            doubts = gaps.doubts(times[rank], row.phases, row.asked)
            found += [f"{row.name} of {row.capsule}: {why}" for why in doubts]
    return found


def _lines(out: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"rank{rank}.jsonl").read_text().splitlines()]


def _shown(line: dict[str, Any] | None) -> str:
    return "nothing" if line is None else str({what: line[what] for what in SAME})
