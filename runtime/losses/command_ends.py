# SPDX-License-Identifier: Apache-2.0
"""Judges the ends of commands of a job that has a snapshot: does the end count, or is the job taken
back?

The ranks of a job end one after the other, and their hosts report that in any order. A rank may
fail of a lost connection before the orchestrator knows that its peer was killed, or that a host is
gone. So an end with a code other than 0 does not count before ``timeouts.fault`` is over; its agent
reports it again with each heartbeat. deaths.py has the rules.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..config.choices import RewindOn
from ..config.cluster import Cluster
from ..journal.snapshot_tables import SnapshotTables
from ..messages import CapsuleEnded
from ..model.jobs import Capsule, Job
from .deaths import killed_by, own_fault, words
from .lookout import Lookout


class CommandEnds:
    """``note`` adds a line of a kind to the history of a job."""

    def __init__(
        self,
        cluster: Cluster,
        lookout: Lookout,
        tables: SnapshotTables,
        note: Callable[[Job, str, str], None],
    ) -> None:
        self._cluster = cluster
        self._lookout = lookout
        self._tables = tables
        self._note = note
        # By job: capsule and epoch → when an end that waits was first reported.
        self._first: dict[str, dict[tuple[str, int], float]] = {}

    def take_back(self, job: Job, capsule: Capsule, end: CapsuleEnded) -> bool:
        """Whether this end does not count, or not yet. If it alone calls for a rewind, the lookout
        then knows.

        The job could be rewound, and ``end`` is of its present epoch. Repeatable.
        """
        if end.code == 0:
            return False
        if end.rebooted or (end.found_dead and self._lookout.was_silent(capsule)):
            # It has died with its host, and not of itself.
            self._lookout.lacks(capsule, f"{capsule.host} came back without {capsule.name}")
            return True
        if self._lookout.why(job) or self._lookout.suspects(job):
            return True  # it is the work of what is lost, or may be
        assert job.newest is not None
        if job.end_asked:
            return False  # a person wanted it since the snapshot was taken
        # While the job is taken back, a rank may have waited for its peers in vain.
        wants = job.rewind_on(self._cluster) is RewindOn.ANY or job.state == "rewinding"
        broken = self._lookout.device_fault_before(job, end.ago_s)
        if wants or broken or killed_by(end) is not None:
            return self._died(job, capsule, end, job.newest.number, broken)
        if fault := self._lookout.fault_before(job):
            self._lookout.ended(capsule, f"{words(end)}, and {fault}", end)
            return True
        return self._waits(job, capsule)

    def _waits(self, job: Job, capsule: Capsule) -> bool:
        """Whether an end is not recorded yet. The end that was reported first is recorded first,
        since its code is the job's."""
        now, limits = time.monotonic(), self._cluster.timeouts
        present = {(c.name, c.epoch) for c in job.capsules.values()}
        known = {key: at for key, at in self._first.get(job.name, {}).items() if key in present}
        since = known.setdefault((capsule.name, capsule.epoch), now)
        self._first[job.name] = known
        first = all(since <= at for at in known.values())
        if now - since < limits.fault + (0.0 if first else limits.suspicion):
            return True
        del self._first[job.name]
        return False

    def _died(
        self, job: Job, capsule: Capsule, end: CapsuleEnded, newest: int, broken: str
    ) -> bool:
        """``broken``: which GPU of the job has failed, as text, or ""."""
        earlier, most = self._tables.history(job.name), job.max_rewinds(self._cluster)
        back = job.state == "rewinding"
        if why := own_fault(end, newest, earlier, most, self._tables.age, going_back=back):
            self._note(job, "not rewound", why)
            return False
        why = f"{words(end)}, and {broken}" if broken else words(end)
        self._lookout.ended(capsule, why, end, end.collectives)
        return True
