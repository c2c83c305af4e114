# SPDX-License-Identifier: Apache-2.0
"""Which hosts hold the images of a snapshot. Pure functions; those that choose return their reason
in words if they find nothing.

A holder has no capsule of the job and shares no failure domain with one that has. So the death of
any one host takes either capsules or images, never both. Where no such host is, as the job runs on
all of them, its hosts hold each other's images (*neighbours*): each image lies on another host of
the job and on the capsule's own. The death of one host then takes a capsule and one of the two
copies of other images, never the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from ..messages import GpuSeat
from .snapshots import SHORT
from .spares import NO_GPUS, GpuNeed, lacks, reasons

Rank = tuple[bool, float, str]


class HostSeen(Protocol):
    """What these decisions need of a host; spares.HostView has it."""

    @property
    def name(self) -> str: ...
    @property
    def spare(self) -> str: ...
    @property
    def slots(self) -> int: ...
    @property
    def used(self) -> int: ...
    @property
    def up(self) -> bool: ...
    @property
    def free(self) -> int: ...
    @property
    def takes_work(self) -> bool: ...
    @property
    def memory_left(self) -> float: ...
    @property
    def lost(self) -> frozenset[str]: ...
    @property
    def gpus(self) -> tuple[GpuSeat, ...]: ...


def choose_holders(
    hosts: Iterable[HostSeen],
    owners: Mapping[str, str],
    domains: Mapping[str, str],
    before: Mapping[str, str],
    gpus: Mapping[str, GpuNeed] | None = None,
) -> dict[str, str] | str:
    """Return a holder for the image of each capsule, or a text that says why there is none.

    ``owners``: the host of each capsule of the job. ``domains``: the failure domain of each host; a
    host that is not in it is a domain of its own. ``before``: the earlier holder of each capsule;
    it stays, because it needs only the pages written since. Otherwise hosts that could take a lost
    capsule come first, and the images are spread over them. ``gpus``: what each capsule needs of a
    host that takes it; a holder needs no GPU.
    """
    known = list(hosts)
    refused = {host.name: _why_no_holder(host, owners, domains) for host in known}
    able = [host for host in known if not refused[host.name]]
    if not able:
        return f"no host can hold its snapshots: {reasons(refused)}"
    names = {host.name for host in able}
    load: Counter[str] = Counter()
    chosen: dict[str, str] = {}
    for capsule in owners:
        holder = before.get(capsule, "")
        if holder not in names:
            need = (gpus or {}).get(capsule, NO_GPUS)
            holder = min(able, key=lambda host: _as_holder(host, need, load[host.name])).name
        load[holder] += 1
        chosen[capsule] = holder
    return chosen


def choose_neighbours(
    hosts: Iterable[HostSeen],
    owners: Mapping[str, str],
    domains: Mapping[str, str],
    before: Mapping[str, str],
    gpus: Mapping[str, GpuNeed] | None = None,
    *,
    itself: bool = False,
) -> dict[str, str] | str:
    """As :func:`choose_holders`, for a job that no host outside it can hold: a holder may run
    another capsule of the job, and must not share a failure domain with the capsule that it holds.

    ``itself``: where there is no such host either, the capsule's own one will do. A snapshot that
    goes on into a directory needs no better one.
    """
    known = list(hosts)
    refused = {host.name: _why_no_holder(host, {}, {}) for host in known}
    able = [host for host in known if not refused[host.name]]
    roomy = [host for host in able if host.free > 0]
    after = _places_after(known, refused)
    load: Counter[str] = Counter()

    def neighbour(capsule: str, owner: str) -> str:
        domain = domains.get(owner, owner)
        holder = before.get(capsule, "")
        if refused.get(holder, "unknown") is None and domains.get(holder, holder) != domain:
            return holder
        need = (gpus or {}).get(capsule, NO_GPUS)
        for host in roomy:  # one that could run the capsule: each free slot takes over one
            free = host.free > load[host.name] and not lacks(host.gpus, need)
            if free and domains.get(host.name, host.name) != domain:
                return host.name
        best = ""
        for number in range(len(able)):
            name = able[(after.get(owner, 0) + number) % len(able)].name
            if domains.get(name, name) != domain and (not best or load[name] < load[best]):
                best = name
                if not load[name]:
                    break
        return best

    chosen: dict[str, str] = {}
    for capsule, owner in owners.items():
        holder = neighbour(capsule, owner)
        if not holder and itself and any(host.name == owner and host.up for host in known):
            holder = owner
        if not holder:
            whys = {host.name: _why_no_holder(host, {capsule: owner}, domains) for host in known}
            return f"no host can hold the snapshots of {capsule}: {reasons(whys)}"
        load[holder] += 1
        chosen[capsule] = holder
    return chosen


def choose_second(
    hosts: Iterable[HostSeen],
    first: str,
    owners: Collection[str],
    domains: Mapping[str, str],
    load: Mapping[str, int],
    need: GpuNeed = NO_GPUS,
) -> HostSeen | str:
    """Return a second holder for an image of a suspended job that only the host ``first`` has, or
    the reason of each host. The two must not share a failure domain.

    ``owners``: the hosts that ran the job. They come last, since people suspend a job to have its
    hosts. ``load``: how many images of the job each host has. ``need``: what the capsule needs of a
    host that takes it over; hosts that could come before others.
    """
    refused = {host: _why_no_second(host, first, domains) for host in hosts}
    able = [host for host, why in refused.items() if why is None]
    if not able:
        return reasons({host.name: why for host, why in refused.items()})
    return min(
        able,
        key=lambda host: (host.name in owners, _as_holder(host, need, load.get(host.name, 0))),
    )


def _places_after(known: Iterable[HostSeen], refused: Mapping[str, str | None]) -> dict[str, int]:
    """For each host, where those that are not refused go on after it. The search for a neighbour
    begins there and goes round, so each host of a job gets one image."""
    number, found = 0, {}
    for host in known:
        number += refused[host.name] is None
        found[host.name] = number
    return found


def beside(host: str, owners: Iterable[str], domains: Mapping[str, str]) -> str:
    """The first of the hosts ``owners`` that shares a failure domain with ``host``, or is it; ""
    if none does."""
    domain = domains.get(host, host)
    return next((owner for owner in owners if domains.get(owner, owner) == domain), "")


def die_together(
    holders: Mapping[str, Sequence[str]], owners: Collection[str], domains: Mapping[str, str]
) -> tuple[str, str] | None:
    """A holder and a host of the job that one death takes, and with them the last copy of an image:
    then the job is lost. None if no death does that. ``holders``: of each capsule's image;
    ``owners``: the hosts that run a capsule of the job."""
    running = {domains.get(owner, owner): owner for owner in reversed(list(owners))}
    for held in holders.values():
        taken = {domains.get(holder, holder) for holder in held}
        if len(taken) == 1 and (host := running.get(*taken)):
            return held[0], host
    return None


def receives(host: HostSeen) -> bool:
    return host.takes_work and host.spare != "none"


def _as_holder(host: HostSeen, need: GpuNeed, load: int) -> tuple[bool, int, Rank]:
    takes_over = host.free > 0 and not lacks(host.gpus, need)
    return not takes_over, load, rank(host, host.used)


def rank(host: HostSeen, used: int) -> Rank:
    """The order in which hosts are taken: dedicated spares, then the emptiest, as for a move.
    ``used``: slots of the host that are taken, also by what is planned so far."""
    return host.spare != "dedicated", used / max(1, host.slots), host.name


def _why_no_holder(
    host: HostSeen, owners: Mapping[str, str], domains: Mapping[str, str]
) -> str | None:
    if host.name in owners.values():
        return "runs a capsule of the job"
    if owner := beside(host.name, owners.values(), domains):
        return f"is in one failure domain with {owner}, which runs a capsule of the job"
    return _why_unfit(host)


def _why_no_second(host: HostSeen, first: str, domains: Mapping[str, str]) -> str | None:
    if host.name == first:
        return "has it already"
    if beside(host.name, [first], domains):
        return f"is in one failure domain with {first}, which has it"
    return _why_unfit(host)


def _why_unfit(host: HostSeen) -> str | None:
    if not host.up:
        return "is not up"
    if not host.takes_work:
        return "is tainted or cordoned"
    if host.memory_left < SHORT:
        return f"is short of memory ({host.memory_left:.1%} is left)"
    return "receives nothing (spare = none)" if host.spare == "none" else None
