# SPDX-License-Identifier: Apache-2.0
"""Snapshots of whole jobs: what one consists of, which hosts hold it, and where a rewind puts the
capsules. Pure functions; those that choose return their reason in words if they find nothing.

A holder has no capsule of the job and shares no failure domain with one that has. So the death of
any one host takes either capsules or images, never both. Where no such host is, as the job runs on
all of them, its hosts hold each other's images (*neighbours*): each image lies on another host of
the job and on the capsule's own. The death of one host then takes a capsule and one of the two
copies of other images, never the last one.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from ...criu_glue.survey.found import Survey
from ...errors import LiveshiftError
from ..messages import GpuSeat, GpuSurvey
from .spares import NAMED_EACH, NO_GPUS, GpuNeed, lacks, reasons, without

HELD = "held"
"""The side of a claim for a held image. It is no ownership.Side: such an image never runs."""

IMAGE = re.compile(r"s([1-9][0-9]{0,17})\.[0-9]{1,9}")
"""The name of a capsule's image in a snapshot. SQLite's integers have 64 bits."""


COPY_FREE, KEPT_FREE, SHORT, NEEDED_AT_ONCE = 0.15, 0.1, 0.05, 0.02
"""Shares of a host's memory. The images that a host takes must leave KEPT_FREE of it to what runs
there. The copies of its own capsules must leave COPY_FREE, and go if less than KEPT_FREE is left.
With less than SHORT left a host keeps no snapshot if another one can. With less than NEEDED_AT_ONCE
a snapshot is given up for it: the kernel would soon end a process."""

RESTORE = re.compile(r"r[1-9][0-9]{0,17}\.[0-9]{1,9}")
"""The name under which a rewind restores a capsule."""


@dataclass(frozen=True)
class Generation:
    """A complete snapshot of a job; the journal keeps it in this form.

    ``number`` counts the snapshots of all jobs. ``boundary``: where all ranks were, as text.
    ``time``: of the boundary, in seconds since 1970 (time.time()). ``rewinds``: how often the job
    had been rewound. ``owners``: the host and epoch of each capsule. ``holders``: the hosts that
    hold the image of each capsule. ``bytes``: memory that all images take. ``directory``: where
    the images are saved too, or "". ``saved``: the name of the snapshot there if it is another one,
    because another cluster has saved it, or this one before; else "". ``gpus``: what each capsule
    needs of the GPUs of a host that restores it; a capsule without GPUs is not in it.
    ``own_copies``: the capsules of which their own host had a copy too. It may be gone by now,
    unless that host is among the holders.
    ``carried``: the capsules that had files on carried paths. No two of them may be on one host.
    """

    number: int
    job: str
    boundary: str
    time: float
    rewinds: int
    owners: dict[str, tuple[str, int]]
    holders: dict[str, list[str]]
    bytes: int = 0
    directory: str = ""
    saved: str = ""
    gpus: dict[str, GpuNeed] = field(default_factory=dict)
    own_copies: list[str] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"s{self.number}"

    @property
    def saved_name(self) -> str:
        """The name of the snapshot in ``directory``."""
        return self.saved or self.name

    def home(self, capsule: str) -> str:
        """The host on which the capsule was, if it may still have a copy of the image and is no
        holder; else ""."""
        host = self.owners[capsule][0]
        holds = host in self.holders.get(capsule, ())
        return host if capsule in self.own_copies and not holds else ""

    def keepers(self, capsule: str, *, copies: bool) -> set[str]:
        """The hosts that may keep the capsule's image in memory: its holders, and with ``copies``
        the host on which it was, which gives it to a rewind in place, and if no holder has it."""
        holders = set(self.holders.get(capsule, ()))
        return holders | {self.owners[capsule][0]} if holders and copies else holders

    def images_of(self, host: str, indices: Mapping[str, int]) -> set[str]:
        """The names of the images that ``host`` holds. ``indices``: of the job's capsules."""
        held = {name for name, hosts in self.holders.items() if host in hosts}
        return {image_name(self.number, indices[name]) for name in held.intersection(indices)}


def image_name(snapshot: int, index: int) -> str:
    """The name of a capsule's image on the wire, in claims and on the disk, such as s17.0."""
    return f"s{snapshot}.{index}"


def snapshot_of(image: str) -> int | None:
    """The number of the snapshot to which an image of that name belongs; None for other names."""
    found = IMAGE.fullmatch(image)
    return int(found[1]) if found else None


def image_number(image: str) -> int:
    """As :func:`snapshot_of`. Raises LiveshiftError for other names."""
    if (number := snapshot_of(image)) is None:
        raise LiveshiftError(f'an image of a snapshot cannot have the name "{image}"')
    return number


def restore_name(rewind: int, index: int) -> str:
    """The name under which a rewind restores a capsule, such as r4.0. It takes the place of a
    migration's name; ``rewind`` counts the rewinds of all jobs."""
    return f"r{rewind}.{index}"


def is_restore_name(name: str) -> bool:
    """Whether a Reserve under this name is for a rewind, and not for a migration."""
    return RESTORE.fullmatch(name) is not None


def image_bytes(survey: Survey, gpu: GpuSurvey | None) -> int:
    """Bytes of memory that a capsule's image takes at its holder: its files lie in memory too, and
    its device memory is in it."""
    files = survey.single_size + survey.output + sum(each.size for each in survey.along)
    devices = gpu.total if gpu is not None else 0
    return survey.resident + survey.shared_memory + survey.nameless + devices + files


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


@dataclass(frozen=True)
class Place:
    """Where a rewind restores a capsule, and which holder sends the image."""

    host: str
    holder: str


def rewind_plan(
    hosts: Iterable[HostSeen],
    generation: Generation,
    owners: Mapping[str, str],
    lost: Collection[str],
    avoid: Collection[str] = (),
    last: Collection[str] = (),
) -> dict[str, Place] | str:
    """Return where each capsule goes back to, or a text that says why it cannot.

    ``owners``: the host of each capsule. ``lost``: the capsules whose hosts are lost or came back
    without them. The others stay. A lost capsule goes to its holder if that has a free slot, so
    that its image does not cross the network, else where a move would go. A host that came back
    without a capsule has that one's slot free, though the journal still has the capsule there. A
    capsule that used GPUs goes only to a host with as many free ones of the same models. Files on
    carried paths may have the same names in two capsules, so these go to different hosts. No
    capsule goes to a host in ``avoid``. Hosts in ``last`` come last.
    """
    known = {host.name: host for host in hosts}
    freed = Counter(owners[capsule] for capsule in lost)
    left = {name: host.free + freed[name] for name, host in known.items()}
    seats = {name: host.gpus for name, host in known.items()}
    up_now = {name for name, host in known.items() if host.up}
    stays = {c for c, owner in owners.items() if c not in lost and owner in up_now}
    carrying = {owners[c]: c for c in generation.carried if c in stays}
    plan = {}
    for capsule, owner in owners.items():
        holders = generation.holders.get(capsule, [])
        up = [name for name in holders if name in up_now]
        if not up:
            where = ", ".join(holders) or "no host"
            return (
                f"no host that holds {capsule} is up: the image of {generation.name} is on {where}"
            )
        if capsule in stays:
            plan[capsule] = Place(owner, owner if owner in up else up[0])
            continue
        need = generation.gpus.get(capsule, NO_GPUS)
        ready = [host for host in known.values() if _receives(host) and host.name not in avoid]
        roomy = [host for host in ready if left[host.name] > 0]
        lacking = {host.name: lacks(seats[host.name], need) for host in roomy}
        if capsule in generation.carried:
            lacking |= {h: _carries(other) for h, other in carrying.items() if h in lacking}
        able = [host for host in roomy if not lacking[host.name]]
        if not able:
            was = f", which was on {owner}" if owner else ""
            whys = f"; {reasons(lacking, each=NAMED_EACH)}" if lacking else ""
            return f"no host has room for {capsule}{was}{whys}"
        best = min(
            able,
            key=lambda host: (
                host.name in last,
                host.name not in up,
                _rank(host, host.slots - left[host.name]),
            ),
        )
        if capsule in generation.carried:
            carrying[best.name] = capsule
        left[best.name] -= 1
        seats[best.name] = without(seats[best.name], need)
        plan[capsule] = Place(best.name, best.name if best.name in up else up[0])
    return plan


class Room:
    """The hosts as the rewind plans of many jobs need them. A cluster may have a thousand of each,
    and most hosts matter to no plan of a given job."""

    def __init__(self, hosts: Iterable[HostSeen]) -> None:
        self.known = {host.name: host for host in hosts}
        roomy = [host for host in self.known.values() if _receives(host) and host.free > 0]
        self._best_first = sorted(roomy, key=lambda host: _rank(host, host.used))
        self._fit: dict[GpuNeed, list[str]] = {}  # by need without its own GPUs
        self._seen_at: defaultdict[str, set[str]] = defaultdict(set)  # by GPU: hosts that see it
        for host in roomy:
            for seat in host.gpus:
                self._seen_at[seat.uuid].add(host.name)

    def near(self, generation: Generation, owners: Mapping[str, str]) -> list[HostSeen]:
        """Return the hosts from which :func:`rewind_plan` would choose for this job: with these it
        puts each capsule where it would with all hosts.

        These are the job's own hosts, the holders, hosts that see a GPU of the job, and for each
        capsule as many of the best others as the job has capsules: the other capsules can have
        taken all of them but one. NAMED_EACH others are there to be named in a reason.
        """
        needs = {generation.gpus.get(capsule, NO_GPUS) for capsule in owners}
        names = {*owners.values(), *(h for held in generation.holders.values() for h in held)}
        names.update(*(self._seen_at.get(gpu, ()) for need in needs for gpu in need.used))
        chosen = names | {host.name for host in self._best_first[:NAMED_EACH]}
        for need in needs:
            others = (name for name in self._fitting(need) if name not in names)
            chosen.update(islice(others, len(owners)))
        return [self.known[name] for name in sorted(chosen) if name in self.known]

    def _fitting(self, need: GpuNeed) -> list[str]:
        """The hosts that lack nothing, the best first, if none of them sees a GPU of the need. Then
        only models and numbers matter, which many capsules have in common."""
        strange = [("" if seat.uuid in need.used else "?", seat.name) for seat in need.there]
        there = [
            GpuSeat(f"{no}{mark}", m, free=False) for no, (mark, m) in enumerate(sorted(strange))
        ]
        used = frozenset(seat.uuid for seat in there if not seat.uuid.endswith("?"))
        alike = GpuNeed(used, tuple(there)) if need.used else NO_GPUS
        if alike not in self._fit:
            fit = (host.name for host in self._best_first if not lacks(host.gpus, alike))
            self._fit[alike] = list(fit)
        return self._fit[alike]


def _carries(other: str) -> str:
    return f"gets {other}, which has files on carried paths, too"


def _receives(host: HostSeen) -> bool:
    return host.takes_work and host.spare != "none"


def _as_holder(host: HostSeen, need: GpuNeed, load: int) -> tuple[bool, int, Rank]:
    takes_over = host.free > 0 and not lacks(host.gpus, need)
    return not takes_over, load, _rank(host, host.used)


def _rank(host: HostSeen, used: int) -> Rank:
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
    if not host.up:
        return "is not up"
    if not host.takes_work:
        return "is tainted or cordoned"
    if host.memory_left < SHORT:
        return f"is short of memory ({host.memory_left:.1%} is left)"
    return "receives nothing (spare = none)" if host.spare == "none" else None
