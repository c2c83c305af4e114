# SPDX-License-Identifier: Apache-2.0
"""Budgets of faults for the model of snapshots and rewinds, and its exploration to the end."""

from __future__ import annotations

import itertools

from exploring import explore
from rewind_model import RewindModel
from rewind_state import Faults, Safeguards, State

KINDS = ("agents", "chunks", "cuts", "doubles", "failures", "hosts", "orchestrator", "silences")
FOUND_AT_MOST = 12_000
"""States within which a safeguard's absence has to show."""

PAIRS = list(itertools.combinations_with_replacement(KINDS, 2))


def faults(*names: str, snapshots: int = 0, suspensions: int = 0) -> Faults:
    counts = {name: names.count(name) for name in names}
    return Faults(**counts, snapshots=snapshots, suspensions=suspensions)


def whole(start: State, least: int) -> RewindModel:
    """Explore every state that can be reached."""
    model = RewindModel(Safeguards())
    found = explore(model, start)
    assert found.violation is None, found
    assert found.whole
    assert found.states >= least
    return model
