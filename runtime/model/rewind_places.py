# SPDX-License-Identifier: Apache-2.0
"""Where a rewind puts the capsules of a job, and which holder sends each image. Pure functions;
the plan is a reason in words if there is no place."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from ..messages import GpuSeat
from .holders import HostSeen, rank, receives
from .snapshots import Generation
from .spares import NAMED_EACH, NO_GPUS, GpuNeed, lacks, reasons, without


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
        ready = [host for host in known.values() if receives(host) and host.name not in avoid]
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
                rank(host, host.slots - left[host.name]),
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
        roomy = [host for host in self.known.values() if receives(host) and host.free > 0]
        self._best_first = sorted(roomy, key=lambda host: rank(host, host.used))
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
