# SPDX-License-Identifier: Apache-2.0
"""The names and numbers of a job's overlay: all of them follow from its subnet and its VXLAN id."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from functools import lru_cache

VXLAN_PORT = 4789
VXLAN_OVERHEAD = 50
BRIDGES = "lsb*"
"""All jobs' bridges, as nft has it."""


@dataclass(frozen=True)
class Overlay:
    """A job's subnet. ``vni`` is its VXLAN id and also names its devices."""

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
        """Where capsules send what is for the world, if one host relays all of it."""
        return str(ipaddress.ip_network(self.subnet)[-3])

    def address(self, index: int) -> str:
        """The mobile address of capsule ``index``, the first being .1."""
        return _address(self.subnet, index + 1)

    def veth(self, index: int) -> str:
        return f"lsv{self.vni}.{index}"

    def index(self, device: str) -> int | None:
        """Whose veth a device is; None when it is not one of this overlay's."""
        start, _, index = device.rpartition(".")
        return int(index) if start == f"lsv{self.vni}" and index.isdecimal() else None


@lru_cache(maxsize=1 << 16)
def _address(subnet: str, number: int) -> str:
    """Kept: an orchestrator says every address of every job to every host."""
    return str(ipaddress.ip_network(subnet)[number])


def most_jobs(overlays: str) -> int:
    """How many jobs have room in a network: each has a /24, and its number, from 1, as VXLAN id."""
    return max(1, 1 << 24 - ipaddress.ip_network(overlays).prefixlen)


def mac(address: str) -> str:
    """The MAC of a mobile address: locally administered, ``ls`` and the four address bytes."""
    packed = ipaddress.ip_address(address).packed
    return "06:6c:" + ":".join(f"{byte:02x}" for byte in packed)


def address_of(mac: str) -> str:
    """The mobile address that a MAC follows from."""
    return ".".join(str(int(byte, 16)) for byte in mac.split(":")[2:])
