# SPDX-License-Identifier: Apache-2.0
"""Begins with the files of tests that take longest. So no worker is left with one of them when the
other worker has nothing more to do. pytest-xdist would begin with those that have the most tests.
"""

from __future__ import annotations

import pytest

LONGEST = (
    "test_memory_sanitized.py",
    "test_early_restore.py",
    "test_gate_simulation.py",
    "test_ownership_model.py",
    "test_arena.py",
    "test_bit_exact.py",
    "test_gpu_moves.py",
    "test_concurrent_requests.py",
    "test_fault_matrix.py",
    "test_gpu_suite.py",
    "test_rewind.py",
    "test_rewind_of_ranks.py",
    "test_precopy.py",
)
"""By the durations of a whole run (``make test ARGS=--durations=100``)."""


def begin_with_longest(items: list[pytest.Item]) -> None:
    """Sort the tests of LONGEST to the front, in that order; all others stay in theirs."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))
