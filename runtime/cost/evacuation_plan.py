# SPDX-License-Identifier: Apache-2.0
"""Plans in which order capsules leave a host that must be empty soon, and which will be too late.

If the time suffices, capsules leave one by one, the quickest first. Each then has the link to
itself and takes the cheapest way that leaves time for the capsules behind it. A job is paused for
one rank at a time. If the time is too short, all leave at once: surveys, sandboxes and restores
then overlap, but the copies share link and cores and take as long as one after the other. If that
is too late as well, they leave one by one, so that as many as possible are gone in time. Every move
is given the time that it may take at most (cost.at_most). This module has no clock; all times are
seconds from now.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..messages import Departing, Prediction
from . import model as cost

BEYOND_S = 0.2
"""The next move begins this many seconds after the end of a move."""


@dataclass(frozen=True)
class EvacuationPlan:
    """How capsules leave: in this ``order``, or all at once (``together``).

    ``within`` is the time for all of them. ``until`` is the deadline of each move; it leaves time
    for the moves behind or beside it. ``late`` lists the capsules that may not be gone in time.
    """

    order: tuple[str, ...] = ()
    together: bool = False
    until: Mapping[str, float] = field(default_factory=dict)
    departing: tuple[Departing, ...] = ()
    empty_s: float = 0.0
    within: float = 0.0

    @property
    def late(self) -> list[Departing]:
        return [each for each in self.departing if each.late]


def plan(found: Mapping[str, Prediction], within: float, max_pause: float) -> EvacuationPlan:
    """Make the plan from predictions; each prediction assumes that its move runs alone."""
    order = sorted(found, key=lambda name: (_soonest(found[name]), name))
    alone = sum(_at_most(found[name]) + BEYOND_S for name in order) - BEYOND_S
    expected = _together([found[name] for name in order])
    at_once = cost.at_most(expected)
    if order and alone > within >= at_once:
        gone = [
            Departing(name, expected, False, found[name].lost_s, at_most_s=at_once)
            for name in order
        ]
        until = {name: within - (at_once - _at_most(found[name])) for name in order}
        return EvacuationPlan(tuple(order), True, until, tuple(gone), expected, within)
    return _one_by_one(found, order, within, max_pause)


def _one_by_one(
    found: Mapping[str, Prediction], order: Sequence[str], within: float, max_pause: float
) -> EvacuationPlan:
    expected, latest = 0.0, 0.0  # when the move before has ended
    until, gone = {}, []
    in_time = _prefix([_at_most(found[name]) for name in order], within)
    for place, name in enumerate(order):
        behind = order[place + 1 : in_time]
        until[name] = within - sum(_at_most(found[other]) + BEYOND_S for other in behind)
        took = _taken(found[name], until[name] - latest, max_pause)
        expected, latest = expected + took, latest + cost.at_most(took)
        late = latest > within + 1e-9
        gone.append(Departing(name, expected, late, found[name].lost_s, at_most_s=latest))
        expected, latest = expected + BEYOND_S, latest + BEYOND_S
    empty = max((each.empty_s for each in gone), default=0.0)
    return EvacuationPlan(tuple(order), False, until, tuple(gone), empty, within)


def _prefix(times: Sequence[float], within: float) -> int:
    """Return how many moves of these lengths, one after the other, end in time."""
    now = 0.0
    for count, each in enumerate(times):
        if now + each > within:
            return count
        now += each + BEYOND_S
    return len(times)


def _soonest(found: Prediction) -> float:
    return min((each.empty_s for each in found.weighed), default=found.empty_s)


def _at_most(found: Prediction) -> float:
    return cost.at_most(_soonest(found))


def _taken(found: Prediction, within: float, max_pause: float) -> float:
    if found.given is None or within == math.inf:  # it takes the way that was predicted
        return found.empty_s
    return cost.choose(found.given, max_pause, within).estimate.empty_s


def _together(found: Sequence[Prediction]) -> float:
    """Return the seconds until all are gone if they begin at once and share link and cores.

    What a move does beside its copy takes a core of each host: surveys, dumps and restores overlap
    as far as there are cores for them.
    """
    copies = [_copy(each) for each in found]
    besides = [_soonest(each) - copy for each, copy in zip(found, copies, strict=True)]
    cores = min((each.given.cores for each in found if each.given is not None), default=1.0)
    return max([*besides, sum(besides) / max(1.0, cores)]) + sum(copies)


def _copy(found: Prediction) -> float:
    """Return the seconds for which a move that runs alone uses the whole link or all cores."""
    if found.given is None:
        return found.empty_s / 2
    return min(_soonest(found), cost.memory_s(found.given, found.memory))
