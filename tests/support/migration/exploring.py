# SPDX-License-Identifier: Apache-2.0
"""Walks all states of a model that a few faults can lead to, and back to rest from each."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from random import Random

from model_state import Budget, State, Violation
from ownership_model import Model

CALM = 400  # steps within which rest has to be reached once faults stop


@dataclass
class Found:
    """What an exploration has come to: ``violation`` is None for nothing."""

    states: int
    violation: str | None = None
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.states} states: {self.violation}", *self.trace])


def explore(model: Model, start: State, most: int = 10**9, rest: bool = True) -> Found:
    """Every state that can be reached (``most``: as many), breadth first: the trace is shortest."""
    came: dict[State, tuple[State, str] | None] = {start: None}
    queue = deque([start])
    calm: set[State] = set()
    while queue:
        state = queue.popleft()
        if rest and (why := unrest(model, state, calm)):
            return Found(len(came), why[-1], (*trace(came, state), "-- faults stop", *why[:-1]))
        changes = model.changes(state)
        while True:
            try:
                label, after = next(changes)
            except StopIteration:
                break
            except Violation as violation:
                last = model.trying
                return Found(len(came), str(violation), (*trace(came, state), last))
            if after not in came:
                came[after] = (state, label)
                if len(came) < most:
                    queue.append(after)
    return Found(len(came))


def trace(came: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    labels = []
    while (step := came[state]) is not None:
        state = step[0]
        labels.append(step[1])
    return tuple(reversed(labels))


def unrest(model: Model, state: State, calm: set[State]) -> list[str]:
    """Why the state does not come to rest without faults, with what is in flight taken or lost."""
    for start in (state, state._replace(net=frozenset())):
        why = _unrest(model, model.tidy(start), calm)
        if why:
            return why
    return []


def _unrest(model: Model, state: State, calm: set[State]) -> list[str]:
    state = state._replace(budget=Budget(moves=0))
    labels: list[str] = []
    seen: list[State] = []
    asked: State | None = None
    while len(labels) < CALM:
        if state in calm:
            calm.update(seen)
            return []
        seen.append(state)
        try:
            label, after = model.next_in_peace(state, asked)
        except Violation as violation:
            return [*labels, str(violation)]
        labels.append(label)
        if label == "":
            if (why := model.at_rest(state)) is None:
                calm.update(seen)
                return []
            return [*labels, why]
        if label == "agents ask":
            asked = state
        state = after
    return [*labels[:30], "it never comes to rest"]


def wander(model: Model, start: State, choose: Random, most: int = 250) -> Found:
    """One walk, at random, and back to rest from where it ends or from a state on its way."""
    labels: list[str] = []
    state, calm = start, set[State]()
    look = choose.randrange(most)
    for step in range(most):
        try:
            changes = list(model.changes(state))
        except Violation as violation:
            return Found(len(labels), str(violation), (*labels, model.trying))
        if not changes:
            break
        # Heartbeats are always possible: what moves on is chosen more often.
        label, after = choose.choice([c for c in changes if c[1] != state] or changes)
        if step == look and (why := unrest(model, state, calm)):
            return Found(len(labels), why[-1], (*labels, "-- faults stop", *why[:-1]))
        labels.append(label)
        state = after
    if why := unrest(model, state, calm):
        return Found(len(labels), why[-1], (*labels, "-- faults stop", *why[:-1]))
    return Found(len(labels))


def follow(model: Model, state: State, labels: list[str]) -> State:
    """Where certain changes lead, each the first whose label begins so."""
    for label in labels:
        state = next(after for found, after in model.changes(state) if found.startswith(label))
    return state
