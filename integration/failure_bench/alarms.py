# SPDX-License-Identifier: Apache-2.0
"""Hosts of a job with snapshots fall silent for a moment, and count as lost although they are not.

A host that falls silent while the job is paused for a snapshot may have three times as long, so not
each silence is taken for a loss. Those that are not are left out.
"""

from __future__ import annotations

import time
from functools import partial

from liveshift.launcher import lab as labs

from .cases import Case, Effort
from .history import WARM
from .kills import PATIENCE_S, Tell
from .ours import Rewinding
from .record import Kill, kill

OUT_S = 1.0
"""A host is cut off for OUT_S seconds longer than it may be silent."""
SOONEST = 0.8
"""The orchestrator counts no host as lost before this share of the suspicion is over."""
MOST = 3
"""Silences in which one false alarm must be seen."""


def measure(way: Rewinding, case: Case, effort: Effort, tell: Tell) -> list[Kill]:
    """The false alarms. Raises AssertionError when the job does not come back, or when silences are
    not taken for losses."""
    found: list[Kill] = []
    # The first steps load parts of torch, which a rewind would have to do again.
    way.history.wait(lambda: way.history.reached() >= WARM, "its speed", PATIENCE_S, way.alive)
    for number in range(MOST * effort.alarms):
        if len(found) == effort.alarms:
            break
        tell(f"false alarm {len(found) + 1} of {effort.alarms}")
        if (alarm := _alarm(way, case, number % case.ranks)) is not None:
            found.append(alarm)
    assert len(found) == effort.alarms, f"only {len(found)} of {number + 1} silences were alarms"
    return found


def _alarm(way: Rewinding, case: Case, rank: int) -> Kill | None:
    """Take the cable out of a rank's host, put it in again, and wait until the job is where it was;
    None if the job was not taken back for that."""
    history = way.history
    history.wait(way.ready, "the job to be whole", PATIENCE_S, way.alive)
    # Its earlier copy may be on the cut-off host for a moment: so we ask who owns the capsule.
    reached, victim = history.reached(), way.job.capsule(rank).host
    cut = time.time()
    labs.link(way.lab, victim, cut=True)
    time.sleep(SOONEST * case.suspicion)  # the rank may end the step in which it is cut off
    back = partial(history.back, cut, time.time(), rank)
    time.sleep(max(0.0, cut + case.suspicion + OUT_S - time.time()))
    labs.link(way.lab, victim, cut=False)
    what = f"the job to be where it was without {victim}"
    history.wait(lambda: back() is not None, what, PATIENCE_S, way.alive)
    seen = back()
    assert seen is not None
    if not way.taken_back(cut):
        return None
    noticed, told = way.noticed(cut)
    to = way.job.capsule(rank).host
    return kill(seen, cut, reached, rank, victim, to, 0.0, noticed, told)
