# SPDX-License-Identifier: Apache-2.0
"""Says which hosts of a job are lost, from what the orchestrator has heard. Pure functions.

Silence alone proves little: an agent may be restarting, or only its link to the orchestrator may be
cut. So a silent host counts as lost only if its kernel does not answer either, and if no other host
of the job shows that the job trains on. And one other host of the job must have been heard since:
if all are silent, perhaps the orchestrator is cut off, and the job trains on without it.

A job whose collectives are further apart than ``timeouts.suspicion`` cannot show in time that it
trains. It is rewound, though nothing is broken, if the orchestrator alone loses one of its hosts.
Then the host's earlier copy ends, as after any rewind, once the host is heard again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..config.timeouts import Timeouts
from ..model.jobs import Capsule, Job

MISSED = 2
"""A host is suspected once so many heartbeats are late."""

PAUSED = 3
"""A host that fell silent while the job was paused for a snapshot or a move counts as lost after so
many times ``timeouts.suspicion``: the job cannot show that it trains. A source that the
orchestrator does not reach lets it go on after twice that time. A host that the job's other hosts
do not reach either counts as lost as soon as any: the job does not train on with it."""


@dataclass(frozen=True)
class HostContact:
    """What is known of a host; monotonic seconds.

    ``heard``: its agent's last message; for a host that was not heard since the orchestrator began,
    that moment. ``answers``: whether its kernel has accepted or refused a TCP connection since it
    fell silent; None if no attempt has ended yet.
    """

    heard: float
    answers: bool | None = None


def suspected(job: Job, seen: Mapping[str, HostContact], now: float, limits: Timeouts) -> list[str]:
    """The hosts of a job's capsules that may be lost, but may also just be late."""
    return [
        host
        for host in _hosts(job)
        if host not in seen or now - seen[host].heard > MISSED * limits.heartbeat
    ]


def lost_hosts(
    job: Job,
    seen: Mapping[str, HostContact],
    progress: Mapping[str, float],
    now: float,
    limits: Timeouts,
    paused: float = 0.0,
    vouched: Collection[str] = (),
    unreached: Collection[str] = (),
) -> list[str]:
    """The hosts of a job's capsules that count as lost at ``now``.

    ``progress``: by capsule, when a heartbeat last showed that it had finished another collective.
    ``paused``: when the job was last seen paused for a snapshot or a move; 0 if all hosts have
    said since that it goes on, or for never.
    ``vouched``: hosts of which a person says that they are dead. A part of the job has ended with
    them, so the rest of it trains on nowhere: then the others need to be silent only.
    ``unreached``: hosts that no other host of the job reaches.
    A host that the cluster file does not have is not in ``seen``, and is never called lost here.
    """
    hosts = [host for host in _hosts(job) if host in seen]
    silent = [host for host in hosts if now - seen[host].heard >= limits.suspicion]
    if not silent:
        return []
    if any(host in vouched for host in hosts):
        return [h for h in hosts if h in vouched or (h in silent and seen[h].answers is False)]
    if any(
        paused > seen[host].heard - limits.heartbeat
        and now - seen[host].heard < PAUSED * limits.suspicion
        for host in silent
        if host not in unreached
    ):
        return []
    # A heartbeat may report a collective that ended shortly before the host fell silent.
    recent = now - (limits.suspicion - limits.heartbeat)
    others = [c for c in _living(job) if c.host in hosts and c.host not in silent]
    if any(progress.get(capsule.name, 0.0) > recent for capsule in others):
        return []
    heard = max((seen[capsule.host].heard for capsule in others), default=0.0)
    return [
        host
        for host in silent
        if seen[host].answers is False and heard > seen[host].heard + MISSED * limits.heartbeat
    ]


def perhaps_dead(
    job: Job, seen: Mapping[str, HostContact], now: float, limits: Timeouts
) -> list[str]:
    """The hosts of a job that are not called lost only because no host of it is heard: a person may
    know that one of them is dead. None as long as one may be heard soon, or its kernel may answer.
    """
    hosts = [host for host in _hosts(job) if host in seen]
    if any(now - seen[h].heard < limits.suspicion or seen[h].answers is None for h in hosts):
        return []
    return [host for host in hosts if seen[host].answers is False]


def _living(job: Job) -> list[Capsule]:
    return [c for c in job.capsules.values() if c.code is None and c.started]


def _hosts(job: Job) -> list[str]:
    """The hosts of a job's capsules, each once, in the order of the capsules."""
    return list(dict.fromkeys(capsule.host for capsule in _living(job)))
