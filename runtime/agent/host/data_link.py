# SPDX-License-Identifier: Apache-2.0
"""Which interface carries the images of a host, and whether it is the right one.

The host's ``address`` in the cluster file decides which interface that is.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from ...messages import DataLink
from ...model.link_rates import PAUSE_RATE, Measured, bits

WIRE_RATE = 2 * PAUSE_RATE / 3
"""The wire carries this many bytes per second on two cores, even slightly slow ones. If an
interface is faster than this, a lower rate is not its fault: the cores may be the limit."""

FAR_BELOW = 0.5

CLASS = Path("/sys/class/net")


@dataclass(frozen=True)
class Interface:
    """A network interface. ``speed`` is in bit/s, 0 if the driver does not report it.
    ``physical``: software did not make it, or it is a bond."""

    name: str
    up: bool
    speed: int
    addresses: tuple[str, ...]
    physical: bool

    def words(self) -> str:
        """A text such as ``eth0 (25 Gbit/s)``."""
        state = "" if self.up else ", down"
        return f"{self.name} ({bits(self.speed) if self.speed else 'speed unknown'}{state})"


def interfaces() -> list[Interface]:
    """The interfaces of this network namespace that have an IPv4 address."""
    addresses, stats = psutil.net_if_addrs(), psutil.net_if_stats()
    found = []
    for name, held in addresses.items():
        own = tuple(a.address for a in held if a.family == socket.AF_INET)
        if own and name in stats:
            here = CLASS / name
            physical = (here / "device").exists() or (here / "bonding").exists()
            speed = stats[name].speed * 10**6
            found.append(Interface(name, stats[name].isup, speed, own, physical))
    return found


def read_link(
    host: str, address: str, rates: Mapping[str, Measured], among: list[Interface] | None = None
) -> DataLink:
    """Find the interface that has ``address`` of ``host``, and warn if it is a bad choice.
    ``rates``: the measured rates to other hosts; ``among``: the interfaces, None to list them."""
    among = interfaces() if among is None else among
    holder = next((i for i in among if address in i.addresses), None)
    measured = {name: seen.rate for name, seen in rates.items()}
    setting = f"hosts.{host}.address"
    if holder is None:
        warning = f"no interface of this machine has the address {address} ({setting})"
        return DataLink("", 0, False, measured, warning)
    warning = _warning(setting, address, holder, measured, among)
    return DataLink(holder.name, holder.speed, holder.up, measured, warning)


def _warning(
    setting: str,
    address: str,
    holder: Interface,
    rates: Mapping[str, float],
    among: list[Interface],
) -> str:
    """What is wrong and what to do about it; "" if nothing is wrong."""
    if not holder.up:
        return f"{holder.name}, which has the address {address} ({setting}), is down"
    others = [i for i in among if i.physical and i.up and i.speed > holder.speed > 0]
    if others:
        fastest = max(others, key=lambda i: i.speed)
        return (
            f"images go over {holder.words()}, though {fastest.words()} is up: if it reaches the"
            f" other hosts, set {setting} to {fastest.addresses[0]} in every cluster file"
        )
    most = min(holder.speed / 8, WIRE_RATE)
    slow = {name: rate for name, rate in rates.items() if rate < FAR_BELOW * most}
    if slow:
        name = min(slow, key=lambda n: slow[n])
        return (
            f"only {bits(8 * slow[name])} were measured to {name}, and {holder.words()} is what"
            " they went over: the way between is slower, or busy, or the processors are"
        )
    return ""
