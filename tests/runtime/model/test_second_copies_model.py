# SPDX-License-Identifier: Apache-2.0
"""Explores how the images of a suspended job go on to second hosts, and what a host that dies takes
along then. The model: rewind_copies.py."""

from __future__ import annotations

from typing import Any

import pytest
from exploring import explore
from rewind_budgets import FOUND_AT_MOST, faults
from rewind_model import RewindModel
from rewind_state import DEAD, Host, Safeguards, State, asleep, at, is_kept, put

MOST = 6_000
"""States of each budget; those nearest to the start come first."""

BUDGETS = {
    (): 30,
    ("agents", "hosts"): 1_000,
    ("chunks", "hosts"): 1_000,
    ("cuts", "hosts"): 1_000,
    ("doubles", "hosts"): 1_000,
    ("hosts",): 300,
    ("hosts", "hosts"): 1_000,
    ("hosts", "orchestrator"): 1_000,
    ("hosts", "silences"): 1_000,
}
"""Faults while a job is suspended and resumed, and how many states that is at least."""


@pytest.mark.parametrize(("kinds", "least"), BUDGETS.items(), ids=lambda v: str(v))
def test_faults_while_images_are_copied(kinds: tuple[str, ...], least: int) -> None:
    found = explore(RewindModel(Safeguards()), asleep(faults(*kinds)), MOST)
    assert found.violation is None, found
    assert found.states >= least


def reached(start: State, most: int = MOST) -> set[State]:
    model, seen, todo = RewindModel(Safeguards()), set[State](), [start]
    while todo and len(seen) < most:
        state = todo.pop()
        if state not in seen:
            seen.add(state)
            todo += [after for _, after in model.changes(state)]
    return seen


@pytest.mark.parametrize("name", ["A", "B", "C"])
def test_once_they_are_copied_any_one_host_may_die(name: str) -> None:
    """A loss then is the only one, so the model does not forgive that the job is lost."""
    copied = [s for s in reached(asleep(faults())) if s.suspended and not s.losses]
    assert copied
    for state in copied[:3]:
        assert is_kept(state, without=name)
        dead = put(state, name, Host(life=at(state, name).life, state=DEAD))
        dies = dead._replace(losses=frozenset(name))
        found = explore(RewindModel(Safeguards()), dies, MOST // 4)
        assert found.violation is None, found
        assert found.states > 100


def test_a_resumption_overtakes_a_copy() -> None:
    overtaken = trains = 0
    for state in reached(asleep(faults())):
        overtaken += state.rewinding and any(not i.kept for h in state.hosts for i in h.held)
        trains += RewindModel(Safeguards()).progress(state) == [2]
    assert overtaken
    assert trains


@pytest.mark.parametrize(
    ("part", "value", "kinds"),
    [("kept_stays", False, ("silences", "hosts")), ("digest", False, ("chunks",))],
)
def test_without_it_a_copy_is_none(part: str, value: Any, kinds: tuple[str, ...]) -> None:
    found = explore(RewindModel(Safeguards(**{part: value})), asleep(faults(*kinds)), FOUND_AT_MOST)
    assert found.violation is not None, found
