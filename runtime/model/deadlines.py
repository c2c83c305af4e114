# SPDX-License-Identifier: Apache-2.0
"""How long a move may keep one job frozen, and what it may still try in that time.

There are no clocks here: ``now`` is what the caller's ``time.monotonic()`` returns. The deadlines
themselves, and the rules between them, are in timeouts.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ... import units
from ...errors import StepFailed, WrongUsage
from ..config.timeouts import Timeouts, breaches
from ..config.values import Seconds, Unfit, read_value
from ..messages import Rounds

if TYPE_CHECKING:
    from ..config.cluster import Cluster


def for_job(cluster: Cluster, collective: float) -> Timeouts:
    """The deadlines for a job whose own collective timeout is ``collective`` seconds. If it is 0,
    the cluster file's value counts.

    Heartbeats and suspicion are the same for every job, and given values of the cluster file stay.
    Raises WrongUsage, with the numbers, when these do not fit into that timeout.
    """
    if collective == 0:
        return cluster.timeouts
    try:
        read_value(Seconds, collective)
    except Unfit as unfit:
        raise WrongUsage(f"the job's collective timeout: {unfit}") from None
    timeouts = cluster.timeouts.under(collective)
    too_short = breaches(
        timeouts.given,
        place=lambda name: "the job's" if name == "collective" else "the cluster's",
        blame="collective",
    )
    if too_short:
        (breach,) = too_short
        raise WrongUsage(
            f"a collective timeout of {collective:g} s is too short to move the job within it: "
            + breach.reason,
            hint=f"give the job's process groups at least {breach.limit:g} s; `liveshift config"
            " validate` shows this cluster's deadlines",
        )
    return timeouts


@dataclass(frozen=True)
class FreezeBudget:
    """The time for which a move may keep a job frozen, from the moment at which it froze it.

    ``began`` is that moment. After a restart of the orchestrator it is ``now`` minus the time that
    the job has been frozen already. The move may go forward while time is ``left``. Then it is
    undone within the rest of the job's own timeout.

    Each method returns a deadline of one step. The orchestrator waits one suspicion longer for the
    answer (``Timeouts.answer``), and the deadlines allow for that. So an agent that keeps its
    deadline but answers late, or not at all, does not make the downtime too long.
    """

    timeouts: Timeouts
    began: float

    def left(self, now: float) -> float:
        """Seconds until the move must begin to be undone; negative once it is too late."""
        return self.began + self.timeouts.standstill - now

    def for_freeze(self, now: float) -> float:
        """Seconds that lock, dump and ship may take: at most ``freeze``. A full restore must still
        fit behind it, with both answers and the commit each late by one suspicion."""
        t = self.timeouts
        return max(0.0, min(t.freeze, self.left(now) - t.restore - 3 * t.suspicion))

    def for_restore(self, now: float, attempts: int = 1) -> float:
        """Seconds that this restore may take: at most ``restore``, and at most its share of the
        time left, less one late answer. ``attempts`` restores share that time, this one too."""
        share = self.left(now) / attempts
        return max(0.0, min(self.timeouts.restore, share - self.timeouts.suspicion))

    def allows_retry(self, now: float) -> bool:
        """Whether there is time for another restore before going back to the source. It needs twice
        the suspicion, the least that the timeouts grant a step. In a shorter time the orchestrator
        cannot distinguish a dead destination from a slow one."""
        return self.for_restore(now) >= 2 * self.timeouts.suspicion

    def for_passing_on(self, now: float) -> float:
        """Seconds to reserve another spare and send it the image: at most ``freeze``, and at most
        half of the time left, because the restore there needs time too."""
        share = self.left(now) / 2
        return max(0.0, min(self.timeouts.freeze, share - self.timeouts.suspicion))

    def allows_passing_on(self, now: float) -> bool:
        """Whether there is time to pass the image on, by the measure of ``allows_retry``."""
        return self.for_passing_on(now) >= 2 * self.timeouts.suspicion

    def for_swap(self, now: float) -> float:
        """Seconds to move device state to another GPU of the same host: at most ``freeze`` and
        ``restore`` together, because a swap does the work of both. Going back to the old GPU counts
        as undoing, for which the rest of the job's own timeout remains."""
        t = self.timeouts
        return max(0.0, min(t.freeze + t.restore, self.left(now) - t.suspicion))


def check_freeze(timeouts: Timeouts, rounds: Rounds, left_s: float) -> None:
    """Raises StepFailed if sending the memory that the pre-copy has left takes ``left_s`` seconds,
    and a freeze may not take that long."""
    limit = FreezeBudget(timeouts, 0.0).for_freeze(0.0)
    if left_s <= limit:
        return
    raise StepFailed(
        "pre-copy",
        f"after {rounds.round} rounds the job would be frozen for {left_s:.0f} s while the rest"
        f" of its memory is sent, at {units.size(rounds.best)}/s; a freeze may take {limit:.3g} s"
        " (timeouts.freeze). It was not stopped",
        hint="use a faster link, or raise timeouts.freeze; raise timeouts.precopy if that ended the"
        " rounds, and timeouts.collective if the job's process groups wait as long",
    )
