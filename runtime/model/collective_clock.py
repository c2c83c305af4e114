# SPDX-License-Identifier: Apache-2.0
"""The coordinator of the collective clock: which operations every rank must still begin.

It is pure: no traffic, no time. It talks to hosts, not to ranks: an agent sums up its own ranks
(host_gate.py). So its work grows with the hosts and their clocks. The algorithm is the star form of
MANA's collective clock (arXiv 2212.05701). The target of a clock is the highest number that any
rank has begun. A rank that must pass a target to reach another one raises it for all ranks.

The reports of one host must arrive in the order in which it made them. Reports of different hosts
may come in any order. Versions of targets are counted over all hosts. But a host gets a new version
only when a target of its own clocks grew: a raise between two ranks concerns only their two hosts.

The first operation of a pair of ranks makes the pair's clock. So one end may have begun an
operation of a clock that the other end does not have yet. Where only one end is known, all hosts
with ranks of its communicator get the clock: one of them has the other end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Pair = tuple[int, int, int]
"""(communicator's id, sender, receiver). Both are ranks within the communicator."""


@dataclass(frozen=True, slots=True)
class ClockReport:
    """What a host reports about its ranks.

    ``version``: the version of the targets in force when the host looked; 0: the gates are armed.
    ``numbers``: at version 0 all clocks of the host, with the highest number begun. Later only new
    clocks, and those on which its ranks passed the target. ``reached``: every rank has returned
    from all operations up to the targets, and from none beyond. ``pairs``: the pairs of clocks in
    ``numbers`` that are new and of which the host has one end.
    """

    version: int
    numbers: Mapping[int, int]
    reached: bool
    pairs: Mapping[int, Pair] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets of all clocks that a host has. Its reports name them by ``version``.

    ``pairs``: those of the clocks that the host may have to make first.
    """

    version: int
    targets: dict[int, int]
    pairs: dict[int, Pair] = field(default_factory=dict)


@dataclass(slots=True)
class _Host:
    clocks: set[int] = field(default_factory=set)
    asked: dict[int, Pair] = field(default_factory=dict)
    wanted: int = 0  # the version that the host must reach
    heard: int = -1  # the version of its last report
    reached: bool = False

    @property
    def there(self) -> bool:
        return self.reached and self.heard == self.wanted


class CollectiveClock:
    """One attempt to bring the ranks on ``hosts`` to a boundary."""

    def __init__(self, hosts: Iterable[str]) -> None:
        self._hosts = {name: _Host() for name in hosts}
        self._members: dict[int, list[str]] = {}
        self._lone: dict[int, Pair] = {}  # pairs of which only one end is known
        self._lone_of: dict[int, list[int]] = {}  # clocks of these pairs, by communicator
        self._silent = set(self._hosts)  # have not sent their first report
        self._away = set(self._hosts)  # have not reached their targets
        self._due: set[str] = set()
        self.targets: dict[int, int] = {}
        self.version = 0
        """The version of the newest targets; 0 until every host has sent its first report."""

    @property
    def converged(self) -> bool:
        """Whether every host has reached the newest targets of its clocks.

        This must be confirmed: the gates are closed, and each host looks once more. A rank may have
        been about to raise a target. Then its host's report makes this false again.
        """
        return not self._away and self.version > 0

    @property
    def behind(self) -> list[str]:
        """Hosts whose ranks have not reached the newest targets, or have not reported it yet."""
        return sorted(self._away)

    def add_report(self, host: str, report: ClockReport) -> None:
        """Add a host's report. Raises KeyError for a host that takes no part."""
        state = self._hosts[host]
        first = host in self._silent
        if first:
            if report.version != 0:
                return  # it belongs to an earlier attempt
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
        """Hosts that have not been given their newest targets. Each is returned once per change.

        The caller asks after it has taken all reports that came, so that many raises make one
        message.
        """
        due, self._due = sorted(self._due), set()
        return due

    def aim(self, host: str) -> Targets:
        """The targets that a host must reach; raises KeyError for a host that takes no part."""
        state, targets = self._hosts[host], self.targets
        return Targets(state.wanted, {c: targets[c] for c in state.clocks}, dict(state.asked))

    def _take(self, host: str, state: _Host, report: ClockReport) -> list[int]:
        """Note the numbers; return the clocks with a target that some host does not know yet."""
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
                    continue  # the first targets go to all hosts
                if max(target, number) > 0:
                    grown.append(clock)
                # This host may have the other ends of these pairs.
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
        """Give lone pairs whose one end has begun an operation to hosts that may have the other."""
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
        """Make a new version of the targets for these hosts."""
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
