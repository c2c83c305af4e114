# SPDX-License-Identifier: Apache-2.0
"""How long one job may stand still, and what a move may still try in that time. No clocks here:
``now`` is what the caller's ``time.monotonic()`` says.

The deadlines themselves, and what must hold between them: timeouts.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ... import units
from ...errors import StepFailed, WrongUsage
from ..config.timeouts import TCP_GIVES_UP_S, Timeouts, breaches
from ..config.values import Seconds, Unfit, read_value
from ..messages import Rounds

if TYPE_CHECKING:
    from ..config.cluster import Cluster


def for_job(cluster: Cluster, collective: float) -> Timeouts:
    """The deadlines for a job whose own collective timeout is ``collective`` seconds, or 0 where it
    is what the cluster file says.

    Hosts beat and are suspected alike for every job, and what the cluster file gives stays given.
    Raises WrongUsage, with the numbers, when these do not fit into that time.
    """
    if collective == 0:
        return cluster.timeouts
    try:
        read_value(Seconds, collective)
    except Unfit as unfit:
        raise WrongUsage(f"the job's collective timeout: {unfit}") from None
    timeouts = cluster.timeouts.under(collective)
    too_short = breaches(
        timeouts.chosen,
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
class Standstill:
    """The time for which a move may keep a job frozen, from the moment at which it froze it.

    ``began`` is that moment; after a restart of the orchestrator it is ``now`` less the time that
    the job has stood still already. The move may go forward while time is ``left``; then it is
    undone, for which the rest of the job's own timeout is there (``for_undo``).

    What is handed out is a step's own deadline. Its answer is waited for one suspicion longer
    (``Timeouts.answer``), and that is reckoned with: an agent that keeps its deadline but whose
    answer is slow, or does not come at all, does not make the job stand still for too long.
    """

    timeouts: Timeouts
    began: float

    def left(self, now: float) -> float:
        """Seconds until the move must have begun to be undone; negative once it is too late."""
        return self.began + self.timeouts.standstill - now

    def for_freeze(self, now: float) -> float:
        """What lock, dump and ship may take: ``freeze``, and never so long that no full restore
        would fit behind it, with both answers and the commit each late by one suspicion."""
        t = self.timeouts
        return max(0.0, min(t.freeze, self.left(now) - t.restore - 3 * t.suspicion))

    def for_restore(self, now: float, attempts: int = 1) -> float:
        """What this attempt to restore may take, if ``attempts`` (this one among them) are to have
        the same: ``restore``, or an equal share of what is left less one late answer each."""
        share = self.left(now) / attempts
        return max(0.0, min(self.timeouts.restore, share - self.timeouts.suspicion))

    def allows_retry(self, now: float) -> bool:
        """Whether another restore is worth beginning rather than going back to the source: it
        would have the least that the ladder grants a step, twice the suspicion. Before that the
        destination's death could not be told from its slowness."""
        return self.for_restore(now) >= 2 * self.timeouts.suspicion

    def for_passing_on(self, now: float) -> float:
        """What it may take to reserve another spare and to send it the image: at most ``freeze``,
        and no more than half of what is left, since the restore there needs its time too."""
        share = self.left(now) / 2
        return max(0.0, min(self.timeouts.freeze, share - self.timeouts.suspicion))

    def allows_passing_on(self, now: float) -> bool:
        """Whether that is worth beginning, by the measure of ``allows_retry``."""
        return self.for_passing_on(now) >= 2 * self.timeouts.suspicion

    def for_swap(self, now: float) -> float:
        """What it may take to bring device state from one GPU to another of the same host: as much
        as ``freeze`` and ``restore`` together, since that is what it does. Going back onto the old
        GPU is undoing, for which there is the rest of the job's own timeout."""
        t = self.timeouts
        return max(0.0, min(t.freeze + t.restore, self.left(now) - t.suspicion))

    def for_undo(self, now: float) -> float:
        """Seconds until the job's ranks, or their kernels' TCP, give up; negative afterwards. A
        move is undone after that too: what the job makes of it is then the job's."""
        return self.began + min(self.timeouts.collective, TCP_GIVES_UP_S) - now


def check_freeze(timeouts: Timeouts, rounds: Rounds, left_s: float) -> None:
    """Raises StepFailed where sending what the rounds of the pre-copy leave takes ``left_s``
    seconds, and a freeze may not be that long."""
    limit = Standstill(timeouts, 0.0).for_freeze(0.0)
    if left_s <= limit:
        return
    raise StepFailed(
        "pre-copy",
        f"after {rounds.round} rounds the job would have to stand for {left_s:.0f} s while the rest"
        f" of its memory is sent, at {units.size(rounds.best)}/s; a freeze may take {limit:.3g} s"
        " (timeouts.freeze). It was not stopped",
        hint="use a faster link, or raise timeouts.freeze; raise timeouts.precopy if that ended the"
        " rounds, and timeouts.collective if the job's process groups wait as long",
    )
