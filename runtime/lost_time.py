# SPDX-License-Identifier: Apache-2.0
"""The training time that a move cost its job: the arithmetic, without traffic.

The job's own clock counts its progress: the rank's collectives, or the run time of its processes
(run_time.py). A job that makes r of them a second, when nothing holds it up, is behind by

    lost = elapsed - made / r

where ``elapsed`` runs from the request to a moment after the end and ``made`` is what the job made
in that time. The moment lies two seconds after the end or later: from there on the job has its
usual speed, so which moment it is makes no difference.

Where the error comes from, with P for the duration of a step:

- *The clocks of two hosts* are never compared. ``elapsed`` is the orchestrator's: the two agents'
  counts belong to when its asks arrived, so it is wrong by the time that two asks were on their
  way, some ms. Each agent's own seconds are used only between two of its own looks.
- *A count grows in steps.* Both counts are read off the line through the middle of the steps: from
  n looks at random moments that is P / sqrt(12 n), from all looks of whole steps nothing.
- *The rate* is known to a few per cent at best, so of a move of T seconds that much of T is noise.

What else holds the job up in that time counts as lost, too: a checkpoint of its own, for example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

from .messages import Worked

COLLECTIVES, RUN_TIME = "collectives", "run time"

AFTER_S = 2.0
"""After the end of a move: what comes then is its own no longer."""

WATCH_S, WATCH_MOST_S, CHANGES = 2.0, 8.0, 6
"""How long the count is then looked at: so long, and until it has changed so often, at most."""

DIFFERS = 0.2
"""By more than this share the other host's rate differs from the source's because of the host; by
less it is noise, as it was looked at for a short time only."""
SURE = 12
"""Changes of the count that a rate was taken from, at least, to tell hosts apart by it."""

NOT_SEEN = "the job ended, or moved on, before that could be seen"


class NotMeasured(Exception):
    """Why the training time that a move cost is not known, in words."""


@dataclass(frozen=True)
class Level:
    """A count in the middle of some looks at it: when (seconds), how many, how many a second, and
    how often it changed."""

    moment: float
    count: float
    rate: float
    changes: int


def level(looks: Sequence[tuple[float, float]]) -> Level:
    """Of looks (moment, count), in order, over whole steps as far as can be told.

    Raises NotMeasured for a count that does not grow, or that goes back.
    """
    changed = [n for n, ((_, a), (_, b)) in enumerate(pairwise(looks), start=1) if b != a]
    if any(b < a for (_, a), (_, b) in pairwise(looks)):
        raise NotMeasured("the job's count of its progress went back: a rank was started anew")
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
    """Seconds of training that were lost in ``elapsed`` ones, from the request to the moment of
    ``end.end``; ``end`` is what the host says on which the capsule runs, maybe the source's own.

    Raises NotMeasured.
    """
    for each in (source, end):
        if each.why_not:
            raise NotMeasured(each.why_not)
    if end.end is None:  # the capsule was not there any more
        raise NotMeasured(NOT_SEEN)
    if source is end:
        back, parts = end.end < source.counted, [(source, end.end - source.begin)]
    else:
        left = end.begin if source.end is None else source.end
        back = left < source.counted or end.end < end.begin
        parts = [(source, left - source.begin), (_rated(end, source), end.end - end.begin)]
    if back:
        raise NotMeasured("the job's count of its progress went back: a rank was started anew")
    return max(0.0, elapsed - sum(made / of.rate for of, made in parts))


def _rated(end: Worked, source: Worked) -> Worked:
    """The host whose rate counts for what was made at the end."""
    differs = abs(end.rate - source.rate) > DIFFERS * source.rate
    return end if end.rate and differs else source
