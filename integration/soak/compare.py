# SPDX-License-Identifier: Apache-2.0
"""The moved job against the same job that nobody touched, step by step and bit for bit."""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

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


def _lines(out: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"rank{rank}.jsonl").read_text().splitlines()]


def _shown(line: dict[str, Any] | None) -> str:
    return "nothing" if line is None else str({what: line[what] for what in SAME})
