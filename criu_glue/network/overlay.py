# SPDX-License-Identifier: Apache-2.0
"""The names and numbers of a job's overlay, which all follow from its subnet and its VXLAN id."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from functools import lru_cache

VXLAN_PORT = 4789
VXLAN_OVERHEAD = 50
BRIDGES = "lsb*"
"""The pattern by which nft matches the bridges of all jobs."""


@dataclass(frozen=True)
class Overlay:
    """A job's overlay. ``vni`` is its VXLAN id, which is also part of its devices' names."""

    vni: int
    subnet: str

    @property
    def bridge(self) -> str:
        return f"lsb{self.vni}"

    @property
    def vxlan(self) -> str:
        return f"lsx{self.vni}"

    @property
    def prefix(self) -> int:
        return ipaddress.ip_network(self.subnet).prefixlen

    @property
    def gateway(self) -> str:
        return str(ipaddress.ip_network(self.subnet)[-2])

    @property
    def relay(self) -> str:
        """The address to which capsules send traffic for the world, if one host relays it all."""
        return str(ipaddress.ip_network(self.subnet)[-3])

    def address(self, index: int) -> str:
        """The mobile address of capsule ``index``; capsule 0 has address number 1."""
        return _address(self.subnet, index + 1)

    def veth(self, index: int) -> str:
        return f"lsv{self.vni}.{index}"

    def index(self, device: str) -> int | None:
        """The index of the capsule whose veth ``device`` is; None if it is none of this overlay."""
        start, _, index = device.rpartition(".")
        return int(index) if start == f"lsv{self.vni}" and index.isdecimal() else None


@lru_cache(maxsize=1 << 16)
def _address(subnet: str, number: int) -> str:
    """Cached, because an orchestrator sends every address of every job to every host."""
    return str(ipaddress.ip_network(subnet)[number])


def most_jobs(overlays: str) -> int:
    """The number of jobs that fit into a network. Each job has a /24, and its number, which counts
    from 1, is its VXLAN id."""
    return max(1, 1 << 24 - ipaddress.ip_network(overlays).prefixlen)


def mac(address: str) -> str:
    """The MAC of a mobile address: locally administered, ``ls`` and the four address bytes."""
    packed = ipaddress.ip_address(address).packed
    return "06:6c:" + ":".join(f"{byte:02x}" for byte in packed)


def address_of(mac: str) -> str:
    """The mobile address of a MAC that :func:`mac` made."""
    return ".".join(str(int(byte, 16)) for byte in mac.split(":")[2:])
