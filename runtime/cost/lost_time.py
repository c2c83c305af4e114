# SPDX-License-Identifier: Apache-2.0
"""The training time that a move cost its job: the arithmetic, without traffic.

The job's own clock counts its progress: the rank's collectives, or the run time of its processes
(run_time.py). If a job makes r of them per second when nothing holds it up, it is behind by

    lost = elapsed - made / r

``elapsed`` runs from the request to a moment two seconds or more after the end. ``made`` is what
the job made in that time. At that moment the job has its usual speed again, so the result does not
depend on which moment is taken.

Sources of the error, with P for the duration of a step:

- *The clocks of two hosts* are never compared. ``elapsed`` comes from the orchestrator's clock; the
  counts are those of the moments at which its requests arrived at the agents. So the error is the
  time that two requests take, some ms. An agent's own clock only measures between two of its looks.
- *A count grows in steps.* Both counts are read off a line through the middle of the steps. From n
  looks at random moments the error is P / sqrt(12 n); looks that cover whole steps have none.
- *The rate* is known to a few per cent at best. In a move of T seconds the error is as many per
  cent of T. The orchestrator knows how long the job was frozen, and takes at least that as lost
  (costing.py).

All that holds the job up in that time counts as lost too, such as a checkpoint of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

from ..messages import Worked

COLLECTIVES, RUN_TIME = "collectives", "run time"

AFTER_S = 2.0
"""For this many seconds after its end, the effects of a move on the job still count as its cost."""

WATCH_S, WATCH_MOST_S, CHANGES = 2.0, 8.0, 6
"""At the end of that time the agent looks at the count for WATCH_S seconds. It goes on until the
count has changed CHANGES times, but for at most WATCH_MOST_S seconds."""

DIFFERS = 0.2
"""If the destination's rate differs from the source's by more than this share, its host is faster
or slower. A smaller difference is noise, because the destination looked for a short time only."""
SURE = 12
"""A rate is used to compare two hosts only if the count changed at least this many times."""

NOT_SEEN = "the job ended, or moved on, before that could be seen"


class NotMeasured(Exception):
    """The training time that a move cost is not known; the text gives the reason."""


@dataclass(frozen=True)
class Level:
    """Some looks at a count: the count at their mean moment (seconds), its rate per second, and how
    often it changed."""

    moment: float
    count: float
    rate: float
    changes: int


def level(looks: Sequence[tuple[float, float]]) -> Level:
    """The level of looks (moment, count), which are in order of time.

    If the count changed at least twice, only whole steps are used. Raises NotMeasured for a count
    that does not grow, or that goes back.
    """
    changed = [n for n, ((_, a), (_, b)) in enumerate(pairwise(looks), start=1) if b != a]
    if any(b < a for (_, a), (_, b) in pairwise(looks)):
        raise NotMeasured("the job's count of its progress went back: a rank was restarted")
    if not changed:
        took = looks[-1][0] - looks[0][0] if looks else 0.0
        raise NotMeasured(f"the job made no progress in {took:.0f} s after the move")
    first, last = changed[0], changed[-1]
    whole = looks[first:last] if last > first else looks
    moment, count = mean(when for when, _ in whole), mean(made for _, made in whole)
    span = looks[last][0] - looks[first][0]
    rate = (looks[last][1] - looks[first][1]) / span if span > 0 else 0.0
    return Level(moment, count, rate, len(changed))


def lost_s(elapsed: float, source: Worked, end: Worked) -> float:
    """Seconds of training that the job lost in ``elapsed`` seconds, from the request to the moment
    of ``end.end``. ``end`` is the answer of the host that has the capsule now. Where the capsule
    stayed, that is ``source`` itself.

    Raises NotMeasured.
    """
    for each in (source, end):
        if each.why_not:
            raise NotMeasured(each.why_not)
    if end.end is None:  # the capsule was gone already
        raise NotMeasured(NOT_SEEN)
    if source is end:
        back, parts = end.end < source.counted, [(source, end.end - source.begin)]
    else:
        left = end.begin if source.end is None else source.end
        back = left < source.counted or end.end < end.begin
        parts = [(source, left - source.begin), (_rated(end, source), end.end - end.begin)]
    if back:
        raise NotMeasured("the job's count of its progress went back: a rank was restarted")
    return max(0.0, elapsed - sum(made / of.rate for of, made in parts))


def _rated(end: Worked, source: Worked) -> Worked:
    """The answer whose rate applies to the work on the last host."""
    differs = abs(end.rate - source.rate) > DIFFERS * source.rate
    return end if end.rate and differs else source
