# SPDX-License-Identifier: Apache-2.0
"""The coordinator of the collective clock: which operations every rank still has to begin.

Pure: no traffic, no time. It hears hosts, not ranks (an agent aggregates its own: see
host_gate.py), so its work grows with hosts and their clocks. The algorithm is the star form of
MANA's collective clock (arXiv 2212.05701): the target of a clock is the highest number that was
begun anywhere; a rank that has to pass beyond a target to reach another one raises it for all.

A host's reports have to arrive in the order in which it made them; reports of different hosts may
come in any order. Versions of targets are counted over all hosts, but a host is given a new one
only when one of its own clocks' targets grew: a raise between two ranks is the affair of two hosts.

The clock of a pair of ranks is made with its first operation, so that one end may have begun what
the other doesn't know of. A pair of which one end was heard is told to all hosts that have ranks of
its communicator: one of them has the other end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Pair = tuple[int, int, int]
"""Id of a communicator, sender and receiver as ranks within it."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a host says of its ranks.

    ``version``: of the targets that were in force when it looked; 0: the gates are armed, and
    ``numbers`` are all clocks of the host with the highest number begun. Later, ``numbers`` are
    only clocks that are new on the host and those on which its ranks passed beyond the target.
    ``reached``: every rank has returned from all that the targets ask for, and from nothing more.
    ``pairs``: what clocks that are new in ``numbers`` belong to, if the host has one end of them.
    """

    version: int
    numbers: Mapping[int, int]
    reached: bool
    pairs: Mapping[int, Pair] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Aim:
    """Targets of all clocks that the host has; ``version`` is the number to report them by.

    ``pairs``: clocks among them that the host may have to make first.
    """

    version: int
    targets: dict[int, int]
    pairs: dict[int, Pair] = field(default_factory=dict)


@dataclass(slots=True)
class _Host:
    clocks: set[int] = field(default_factory=set)
    asked: dict[int, Pair] = field(default_factory=dict)
    wanted: int = 0  # version that it has to reach
    heard: int = -1  # version of its last report
    reached: bool = False

    @property
    def there(self) -> bool:
        return self.reached and self.heard == self.wanted


class CollectiveClock:
    """One attempt to bring the ranks on ``hosts`` to a boundary."""

    def __init__(self, hosts: Iterable[str]) -> None:
        self._hosts = {name: _Host() for name in hosts}
        self._members: dict[int, list[str]] = {}
        self._lone: dict[int, Pair] = {}  # pairs of which one end was heard
        self._lone_of: dict[int, list[int]] = {}  # the same, by communicator
        self._silent = set(self._hosts)  # have not told what had begun
        self._away = set(self._hosts)  # have not reached their targets
        self._due: set[str] = set()
        self.targets: dict[int, int] = {}
        self.version = 0
        """0 until every host has told what had begun there; then the newest targets' number."""

    @property
    def converged(self) -> bool:
        """Every host has reached the newest targets of its clocks.

        To be confirmed: gates are closed on it, and each host looks once more. A rank may have been
        about to raise a target; then its host's report makes this false again.
        """
        return not self._away and self.version > 0

    @property
    def silent(self) -> list[str]:
        """Hosts that haven't told yet what had begun there; there are no targets before."""
        return sorted(self._silent)

    @property
    def debtors(self) -> list[str]:
        """Hosts whose ranks haven't reached the newest targets, or haven't said so yet."""
        return sorted(self._away)

    def hear(self, host: str, report: Report) -> None:
        """A host's report. Raises KeyError for a host that takes no part."""
        state = self._hosts[host]
        first = host in self._silent
        if first:
            if report.version != 0:
                return  # of an attempt before
            self._silent.discard(host)
        elif report.version < state.heard:
            return
        grown = self._take(host, state, report)
        if self.version == 0:
            if not self._silent:
                self._seek(self._lone)
                self._give(self._hosts)
        elif grown:
            self._seek(grown)
            self._give({name for clock in grown for name in self._members[clock]})
        state.heard, state.reached = report.version, report.reached
        self._settle(host, state)

    def due(self) -> list[str]:
        """Hosts with targets that they haven't been given: each once until its targets change.

        To be asked after everything that has arrived was heard, so that many raises make one aim.
        """
        due, self._due = sorted(self._due), set()
        return due

    def aim(self, host: str) -> Aim:
        """What a host is to reach; raises KeyError for a host that takes no part."""
        state, targets = self._hosts[host], self.targets
        return Aim(state.wanted, {c: targets[c] for c in state.clocks}, dict(state.asked))

    def _take(self, host: str, state: _Host, report: Report) -> list[int]:
        """Notes the numbers; returns clocks whose target some host doesn't know of yet."""
        grown = []
        clocks, targets, members = state.clocks, self.targets, self._members
        for clock, number in report.numbers.items():
            target = targets.get(clock, -1)
            if number > target:
                targets[clock] = number
            if clock not in clocks:
                clocks.add(clock)
                members.setdefault(clock, []).append(host)
                if self.version == 0:
                    continue  # everybody is given everything
                if max(target, number) > 0:
                    grown.append(clock)
                # It may have the other ends of these.
                grown += [lone for lone in self._lone_of.get(clock, ()) if targets[lone] > 0]
            elif number > target:
                grown.append(clock)
        for clock, pair in report.pairs.items():
            state.asked.pop(clock, None)
            if self._lone.pop(clock, None) is None:
                self._lone[clock] = pair
                self._lone_of.setdefault(pair[0], []).append(clock)
            else:
                self._lone_of[pair[0]].remove(clock)
        return grown

    def _seek(self, clocks: Iterable[int]) -> None:
        """Where something has begun at one end of a pair, the other end is to be told."""
        for clock in clocks:
            pair = self._lone.get(clock)
            if pair is None or self.targets[clock] == 0:
                continue
            for host in self._members.get(pair[0], ()):
                state = self._hosts[host]
                state.asked[clock] = pair
                if clock not in state.clocks:
                    state.clocks.add(clock)
                    self._members[clock].append(host)

    def _give(self, hosts: Iterable[str]) -> None:
        """A new version of the targets, for these hosts."""
        self.version += 1
        for name in hosts:
            state = self._hosts[name]
            state.wanted = self.version
            self._due.add(name)
            self._settle(name, state)

    def _settle(self, name: str, state: _Host) -> None:
        if state.there:
            self._away.discard(name)
        else:
            self._away.add(name)
