# SPDX-License-Identifier: Apache-2.0
"""Who may see and do what. The ApiServer and the classes that it passes requests to ask this."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import NotFound, no_such
from ..config.access import Principal, Role, refusal
from ..model.jobs import Job
from .fleet import Fleet


class Rights:
    """Judges what a caller may do by the caller's role and by who owns a job."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def sees(self, who: Principal, job: Job) -> bool:
        """Whether ``who`` may see a job. Root of a host may see what runs there, as in ps."""
        ruled = who.rules is not None and any(c.host == who.rules for c in job.capsules.values())
        return who.may(Role.VIEW) or who.owns(job.uid) or ruled

    def saw(self, who: Principal, subject: str, number: int) -> bool:
        """Whether ``who`` may see the past event of this number: its job must be visible, and not a
        later job of the same name. The journal does not know the owner of a forgotten job."""
        if who.may(Role.VIEW) or subject in self._fleet.hosts:
            return True
        job = self._fleet.jobs.get(subject.partition("/")[0])
        return job is not None and number >= job.since and self.sees(who, job)

    def seen_by(self, who: Principal) -> Callable[[str, int], bool]:
        """Return :meth:`saw` of ``who``, for the journal to ask of each event."""
        return lambda subject, number: self.saw(who, subject, number)

    def rules(self, who: Principal, capsule: str) -> bool:
        """Whether the capsule runs on the host whose root ``who`` is."""
        found = self._fleet.find(capsule)
        return found is not None and found[1].host == who.rules

    def job(self, who: Principal, name: str) -> Job:
        """Return a job by its own name, for what is done to all of it: whoever names one capsule
        means one. Raises NotFound, which names only jobs that ``who`` may see."""
        if name in self._fleet.jobs:
            return self._fleet.jobs[name]
        known = [n for n, job in self._fleet.jobs.items() if self.sees(who, job)]
        whole = name.partition("/")[0]
        if whole in known:
            hint = f"the job is {whole}: this is done to all of it"
            raise NotFound(f'no job "{name}"', hint=hint)
        raise no_such(f'no job "{name}"', name, known, "known jobs")

    def job_of(self, who: Principal, capsule: str) -> Job:
        """Return the job of a capsule; the job's own name will do. Raises NotFound as :meth:`job`
        does."""
        return self.job(who, capsule.partition("/")[0])

    def need_to_see(self, who: Principal, job: Job) -> None:
        """Raise NotPermitted unless ``who`` may see the job."""
        if not self.sees(who, job):
            self.need(who, Role.VIEW, f"see {job.name}", job)

    def need(self, who: Principal, role: Role, what: str, job: Job | None = None) -> None:
        """Raise NotPermitted, which says what ``who`` wanted, unless ``who`` has the role."""
        if not who.may(role):
            raise refusal(who, what, role, whose(who, job) if job else "")


def whose(who: Principal, job: Job) -> str:
    """Say whose a job is; only a caller with the role "view" learns the uid."""
    return f"it belongs to uid {job.uid}" if who.may(Role.VIEW) else "it is another user's"
