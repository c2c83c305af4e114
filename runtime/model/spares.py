# SPDX-License-Identifier: Apache-2.0
"""Decides where a capsule may go and where a new job starts, and says why. Pure functions."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ...errors import NoSpare, Refused, no_such
from ..messages import GpuSeat, GpuSurvey


@dataclass(frozen=True)
class GpuNeed:
    """What a capsule needs of a destination's GPUs: one for each of ``used`` (UUIDs), and in all as
    many GPUs as its source has (``there``), because its processes can see all of those."""

    used: frozenset[str] = frozenset()
    there: tuple[GpuSeat, ...] = ()


NO_GPUS = GpuNeed()

NAMED_EACH = 8
"""Of so many hosts each is named with its reason, of more each reason with one host that has it."""

MOST_REASONS = 6
"""At most so many reasons are named then. A cluster may have thousands of hosts."""


def need_of(survey: GpuSurvey | None) -> GpuNeed:
    """The same of a capsule that was surveyed."""
    if survey is None:
        return NO_GPUS
    there = (GpuSeat(gpu.uuid, gpu.name, free=False) for gpu in survey.host.gpus)
    return GpuNeed(frozenset(survey.used), tuple(there))


_COUNTS = re.compile(r"\b[0-9]+\b")
"""The kind of a reason is the reason without these."""


@dataclass(frozen=True)
class HostView:
    """What a decision needs to know of a host. ``used`` counts the slots taken or reserved."""

    name: str
    spare: str  # floating, dedicated or none
    slots: int
    used: int
    up: bool
    tainted: bool
    gpus: tuple[GpuSeat, ...] = ()
    cordoned: bool = False
    memory_left: float = 1.0  # the share of its memory that is available
    lost: frozenset[str] = frozenset()  # images of newest snapshots that it has lost

    @property
    def free(self) -> int:
        return self.slots - self.used

    @property
    def takes_work(self) -> bool:
        """Whether new capsules may come to the host, if it has a free slot."""
        return self.up and not self.tainted and not self.cordoned


def choose_destination(
    hosts: Iterable[HostView],
    capsule: str,
    source: str,
    to: str,
    avoid: Collection[str] = (),
    gpus: GpuNeed = NO_GPUS,
) -> tuple[HostView, str]:
    """Return the host to which a capsule moves, and why. With ``to`` empty this function chooses.

    It takes a dedicated spare first, then the emptiest floating host; hosts in ``avoid`` come last.
    Raises NotFound for an unknown host, Refused if the host that is named cannot receive, and
    NoSpare, which is a Refused, with the reasons, if no host can.
    """
    everyone = list(hosts)
    if to:
        named = next((h for h in everyone if h.name == to), None)
        if named is None:
            known = (h.name for h in everyone)
            raise no_such(f'no host "{to}" in this cluster', to, known, "its hosts are")
        # The host itself judges its GPUs later: a heartbeat's report of them may be some seconds
        # old.
        if why_not := _why_not(named, source, NO_GPUS):
            raise Refused(f"{capsule} cannot move to {to}: {to} {why_not}")
        return named, "as asked"
    refused = {h.name: _why_not(h, source, gpus) for h in everyone}
    able = [h for h in everyone if not refused[h.name]]
    if not able:
        raise NoSpare(
            f"no spare can take {capsule}: {reasons(refused, each=NAMED_EACH)}",
            hint="add a host, uncordon one, or raise its slots in the cluster file"
            + (", or free GPUs of the model that it uses" if gpus.used else ""),
            kinds="; ".join(sorted({_COUNTS.sub("", why) for why in refused.values() if why})),
        )
    best = min(
        able,
        key=lambda h: (h.name in avoid, h.spare != "dedicated", h.used / h.slots, h.name),
    )
    return best, "a dedicated spare" if best.spare == "dedicated" else "the emptiest free host"


def place_job(hosts: Iterable[HostView], count: int) -> list[str]:
    """Return a host for each of ``count`` new capsules, spread out in the cluster file's order.

    Raises Refused if there are too few free slots. Hosts that are tainted, cordoned, lost or
    dedicated spares do not count.
    """
    able = [h for h in hosts if h.takes_work and h.spare != "dedicated" and h.free > 0]
    free = sum(h.free for h in able)
    if free < count:
        raise Refused(
            f"the job asks for {count} hosts, but only {free} slots are free",
            hint="`liveshift status` shows what takes them; `liveshift uncordon HOST` frees one",
        )
    chosen: list[str] = []
    round_ = 0
    while len(chosen) < count:
        chosen += [h.name for h in able if h.free > round_][: count - len(chosen)]
        round_ += 1
    return chosen


def reasons(refused: Mapping[str, str | None], each: int = 0) -> str:
    """Return the reasons of hosts in a line: each reason once, with one host that has it, the most
    frequent ones first. Of at most ``each`` hosts each is named with its reason."""
    if len(refused) <= each:
        return "; ".join(f"{name} {why}" for name, why in refused.items())
    hosts: defaultdict[str, list[str]] = defaultdict(list)
    for name, why in refused.items():
        hosts[why or ""].append(name)
    texts = [
        f"{names[0]} {why}" + (f" ({len(names) - 1} more as well)" if len(names) > 1 else "")
        for why, names in sorted(hosts.items(), key=lambda one: -len(one[1]))
    ]
    rest = [f"and {len(texts) - MOST_REASONS} more reasons"] if len(texts) > MOST_REASONS else []
    return "; ".join([*texts[:MOST_REASONS], *rest])


def _why_not(host: HostView, source: str, gpus: GpuNeed) -> str | None:
    if host.name == source:
        return "is where it runs already"
    if not host.up:
        return "is not up"
    if host.tainted:
        return "is tainted"
    if host.cordoned:
        return "is cordoned"
    if host.spare == "none":
        return "receives nothing (spare = none)"
    if host.free <= 0:
        return "has no free slot"
    return lacks(host.gpus, gpus)


def lacks(seats: tuple[GpuSeat, ...], need: GpuNeed) -> str | None:
    """Say what the host's GPUs lack, as far as heartbeats show; the destination checks again."""
    if not need.used:
        return None
    if not seats:
        return "has no GPU that can be used"
    here = {seat.uuid for seat in seats}  # a GPU at both ends is the capsule's own already
    models = Counter(s.name for s in need.there if s.uuid in need.used - here)
    for model, count in sorted(models.items()):
        free = sum(s.free and s.name == model and s.uuid not in need.used for s in seats)
        if free < count:
            alike = sum(s.name == model for s in seats)
            return f"has {free} free of {alike} {model}, {count} needed"
    if len(seats) < len(need.there):
        return (
            f"has {len(seats)} GPUs and the source {len(need.there)}, each of which needs another"
            " that stands for it"
        )
    return None


def without(seats: tuple[GpuSeat, ...], need: GpuNeed) -> tuple[GpuSeat, ...]:
    """The host's GPUs once a capsule has come that lacks nothing here."""
    models = Counter(s.name for s in need.there if s.uuid in need.used)
    left = []
    for seat in sorted(seats, key=lambda seat: seat.uuid not in need.used):  # its own ones first
        taken = (seat.free or seat.uuid in need.used) and models[seat.name] > 0
        models[seat.name] -= taken
        left.append(GpuSeat(seat.uuid, seat.name, free=False) if taken else seat)
    return tuple(left)
