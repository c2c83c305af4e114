# SPDX-License-Identifier: Apache-2.0
"""What people see of a job's snapshots: whether it is protected, and what a failure would cost now.
Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import msgspec

from ..config.cluster import Cluster
from ..messages import NOT_YET, ProtectionRow
from ..model.failures import NOTHING_SEEN, FailuresSeen, source
from ..model.holders import HostSeen, die_together
from ..model.jobs import Job
from ..model.rewind_places import Room, rewind_plan
from ..model.snapshots import SHORT, Generation, image_name

REWIND_BASE_S = 1.0
SENT_BYTES_PER_S, LOCAL_BYTES_PER_S = 250e6, 600e6
"""Before the first rewind of a job, one is taken to last for ``timeouts.suspicion``, this long, and
as long as the largest image takes at one of these rates: if it is read at its holder, sent and
restored, and if it is on the host that restores it."""


def row(
    job: Job, cluster: Cluster, seen: Seen, now: float, failures: FailuresSeen = NOTHING_SEEN
) -> ProtectionRow | None:
    """What `status` shows; ``now``: seconds since 1970. None for a job that has ended."""
    if job.state == "ended":
        return None
    found = _row(job, cluster, seen, now, job.snapshot_every(cluster, failures))
    if found.every and found.auto:
        found = msgspec.structs.replace(
            found,
            mttf_s=job.mean_time_to_failure(cluster, failures),
            mttf_from=source(cluster.snapshots.mttf, failures),
        )
    if (last := job.last_rewind) is None:
        return found
    return msgspec.structs.replace(
        found,
        rewound_to=last.boundary,
        repeated_s=last.repeated_s,
        rewound_ago_s=max(0.0, now - last.ended),
    )


def _row(job: Job, cluster: Cluster, seen: Seen, now: float, every: float) -> ProtectionRow:
    auto, newest = job.snapshots_auto(cluster), job.newest
    if newest is None:
        why = (job.unprotected or NOT_YET) if every else ""
        return ProtectionRow(every, why_not=why, auto=auto)
    age = max(0.0, now - newest.time)
    if job.state == "suspended":
        return ProtectionRow(
            every,
            newest.name,
            age,
            newest.bytes,
            holders_of(job),
            why_not="" if newest.directory else _missing(job, seen.holders),
            auto=auto,
            directory=newest.directory,
            alone=[] if newest.directory else _alone(job, seen.holders),
        )
    near = seen.room.near(newest, job.owners)
    in_place = _in_place(job, newest, near)
    sent = [name for name in in_place if name not in newest.own_copies]
    waits = _waits_alone(job, only_host(job, cluster)), _would_wait(job, newest, near)
    rewind_s = job.rewind_s or _rewind_s(newest, cluster.timeouts.suspicion, sent=bool(sent))
    return ProtectionRow(
        every,
        newest.name,
        age,
        newest.bytes,
        holders_of(job),
        job.pause_s,
        exposed(job, cluster.domains, seen.holders),
        auto=auto,
        trouble=job.unprotected,
        rewind_s=rewind_s,
        rewind_measured=bool(job.rewind_s),
        failure_s=age + rewind_s,
        in_place=in_place,
        sent=sent,
        would_wait="; ".join(filter(None, waits)),
        silent=job.silent,
        rewinding=job.rewinding,
        takes_s=job.snapshot_cost.takes_s if job.snapshot_cost else 0.0,
    )


def seconds(every: float) -> str:
    """An interval as text, such as ``150 s``."""
    return f"{every:.0f} s" if every >= 10 else f"{every:.3g} s"


def holders_of(job: Job) -> list[str]:
    """The hosts that keep the job's newest snapshot."""
    return sorted({h for hosts in job.newest.holders.values() for h in hosts} if job.newest else ())


@dataclass(frozen=True)
class Holders:
    """What matters of hosts that hold images. ``up``: the hosts that are. ``lost``: the names of
    the images that a host had and has not any more. ``left``: of hosts short of memory, the share
    that is available."""

    up: Collection[str]
    lost: Mapping[str, Collection[str]]
    left: Mapping[str, float]

    @classmethod
    def of(cls, hosts: Iterable[HostSeen]) -> Self:
        known = list(hosts)
        return cls(
            {host.name for host in known if host.up},
            {host.name: host.lost for host in known if host.lost},
            {host.name: host.memory_left for host in known if host.memory_left < SHORT},
        )


class Seen:
    """The hosts as they are now, for the rows of all jobs: looked at once, not for each job."""

    def __init__(self, hosts: Iterable[HostSeen]) -> None:
        self.room = Room(hosts)
        self.holders = Holders.of(self.room.known.values())


def exposed(job: Job, domains: Mapping[str, str], hosts: Holders) -> str:
    """Why the job's newest snapshot would not do if a host died now, or soon, as text; "" if it
    would, or if there is none."""
    if job.newest is None:
        return ""
    if gone := _gone(job, job.newest, hosts):
        return gone
    name = job.newest.name
    for holder in holders_of(job):
        if holder in hosts.left:
            return f"{holder}, which keeps {name}, is short of memory"
    running = {c.host: c.name for c in job.capsules.values() if c.code is None}
    if pair := die_together(job.newest.holders, running, domains):
        holder, host = pair
        where = "there" if host == holder else f"in its failure domain ({host})"
        return f"{holder} keeps {name}, and {running[host]} runs {where}"
    return ""


def withstands(job: Job, domains: Mapping[str, str], hosts: Holders) -> bool:
    """Whether the job's newest snapshot is there, and no single death destroys it. A holder that is
    short of memory has it yet."""
    if job.newest is None or _gone(job, job.newest, hosts):
        return False
    return die_together(job.newest.holders, job.owners.values(), domains) is None


def _gone(job: Job, newest: Generation, hosts: Holders) -> str:
    """Which holder cannot give its images now, as text; "" if all can."""
    for holder in holders_of(job):
        if holder not in hosts.up:
            return _is_away(holder, newest)
        if holder in lost_images(job, hosts):
            return _has_lost(holder, newest)
    return ""


def _is_away(holder: str, newest: Generation) -> str:
    return f"{holder}, which keeps {newest.name}, is not up"


def _has_lost(holder: str, newest: Generation) -> str:
    return f"{holder}, which kept {newest.name}, has lost its memory since"


def reachable(job: Job, hosts: Holders) -> dict[str, list[str]]:
    """For each capsule, the hosts that can give its image of the job's newest snapshot now: they
    hold it, are up, and have not lost their memory."""
    newest = job.newest
    if newest is None:
        return {}

    def gives(host: str, capsule: str) -> bool:
        image = image_name(newest.number, job.capsules[capsule].index)
        return host in hosts.up and image not in hosts.lost.get(host, ())

    found = {name: newest.holders.get(name, []) for name in job.capsules}
    return {name: [h for h in held if gives(h, name)] for name, held in found.items()}


def _missing(job: Job, hosts: Holders) -> str:
    """Which image of a suspended job no host can give now, as text; "" if none is missing."""
    newest = job.newest
    for name, giving in reachable(job, hosts).items():
        if giving or newest is None:
            continue
        held = newest.holders.get(name, [])
        away = [holder for holder in held if holder not in hosts.up]
        if away:  # the job can be resumed once that is back
            return _is_away(away[0], newest)
        return _has_lost(held[0], newest) if held else f"no host keeps the image of {name}"
    return ""


def _alone(job: Job, hosts: Holders) -> list[str]:
    """The hosts of which each has the only copy of an image of a suspended job."""
    found = reachable(job, hosts).values()
    return sorted({giving[0] for giving in found if len(giving) == 1})


def lost_images(job: Job, hosts: Holders) -> list[str]:
    """The holders that have not any more what they held of the job's newest snapshot."""
    newest = job.newest
    if newest is None or not hosts.lost:
        return []
    return [
        holder
        for holder in holders_of(job)
        if not newest.images_of(holder, job.indices()).isdisjoint(hosts.lost.get(holder, ()))
    ]


def _rewind_s(newest: Generation, suspicion: float, *, sent: bool) -> float:
    largest = newest.bytes / max(1, len(newest.owners))
    return suspicion + REWIND_BASE_S + largest / (SENT_BYTES_PER_S if sent else LOCAL_BYTES_PER_S)


def _in_place(job: Job, newest: Generation, hosts: Iterable[HostSeen]) -> list[str]:
    """The capsules that a rewind would restore on the hosts where they are."""
    owners = job.owners
    plan = rewind_plan(hosts, newest, owners, ())
    if isinstance(plan, str):
        return []
    return [name for name, place in plan.items() if place.host == owners[name]]


def only_host(job: Job, cluster: Cluster) -> str:
    """The only host that runs the job; "" if several do. If this host died, the job would wait, as
    no other host could tell. It is also "" if a command can switch it off (losses/fencing.py)."""
    hosts = {c.host for c in job.capsules.values() if c.code is None}
    return hosts.pop() if len(hosts) == 1 and not cluster.snapshots.fence else ""


def _waits_alone(job: Job, host: str) -> str:
    if not host:
        return ""
    return (
        f"if {host} died, the job would wait until {host} is back, or for `liveshift rewind"
        f" {job.name} --lost {host}`: {host} may only be cut off, and no other host runs a part of"
        " the job that could tell (`snapshots.fence` can)"
    )


def _would_wait(job: Job, newest: Generation, hosts: Sequence[HostSeen]) -> str:
    """Which host's death would leave the job waiting for a free slot, as text; "" if none."""
    owners = job.owners
    for host in dict.fromkeys(owners.values()):
        lost = [name for name, owner in owners.items() if owner == host]
        left = [seen for seen in hosts if seen.name != host]
        plan = rewind_plan(left, newest, owners, lost)
        if isinstance(plan, str):
            return f"if {host} died, the job would wait: {plan}"
    return ""
