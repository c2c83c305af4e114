# SPDX-License-Identifier: Apache-2.0
"""Walks all states of a model that a few faults can lead to, and back to rest from each."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Protocol, TypeVar

S = TypeVar("S", bound=Hashable)

CALM = 400  # steps within which rest has to be reached once faults stop


class Model(Protocol[S]):
    """What is explored. ``trying``: what was tried when a Violation was raised."""

    trying: str

    def changes(self, s: S) -> Iterator[tuple[str, S]]:
        """All that may happen next, with a label. Raises Violation."""

    def calm(self, s: S) -> Iterable[S]:
        """The states, without faults to come, from which rest must be reached."""

    def next_in_peace(self, s: S, asked: S | None) -> tuple[str, S]:
        """What happens next when nothing fails; an empty label for nothing. Raises Violation.
        ``asked``: the state in which the agents asked last, of which nothing may have come."""

    def at_rest(self, s: S) -> str | None:
        """What is wrong with a state in which nothing happens any more."""


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass
class Found:
    """What an exploration has come to: ``violation`` is None for nothing. ``whole``: it came to its
    end, and has seen every state that can be reached."""

    states: int
    violation: str | None = None
    trace: tuple[str, ...] = ()
    whole: bool = False

    def __str__(self) -> str:
        return "\n".join([f"{self.states} states: {self.violation}", *self.trace])


def explore(model: Model[S], start: S, most: int = 10**9, rest: bool = True) -> Found:
    """Every state that can be reached (``most``: as many), breadth first: the trace is shortest."""
    came: dict[S, tuple[S, str] | None] = {start: None}
    queue = deque([start])
    calm: set[S] = set()
    left_out = False
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
                else:
                    left_out = True
    return Found(len(came), whole=not left_out)


def trace(came: dict[S, tuple[S, str] | None], state: S) -> tuple[str, ...]:
    labels = []
    while (step := came[state]) is not None:
        state = step[0]
        labels.append(step[1])
    return tuple(reversed(labels))


def unrest(model: Model[S], state: S, calm: set[S]) -> list[str]:
    """Why the state does not come to rest without faults, with what is in flight taken or lost."""
    for start in model.calm(state):
        why = _unrest(model, start, calm)
        if why:
            return why
    return []


def _unrest(model: Model[S], state: S, calm: set[S]) -> list[str]:
    labels: list[str] = []
    seen: list[S] = []
    asked: S | None = None
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


def wander(model: Model[S], start: S, choose: Random, most: int = 250) -> Found:
    """One walk, at random, and back to rest from where it ends or from a state on its way."""
    labels: list[str] = []
    state, calm = start, set[S]()
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


def follow(model: Model[S], state: S, labels: list[str]) -> S:
    """Where certain changes lead, each the first whose label begins so."""
    for label in labels:
        state = next(after for found, after in model.changes(state) if found.startswith(label))
    return state
