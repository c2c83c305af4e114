# SPDX-License-Identifier: Apache-2.0
"""The names and numbers of a job's overlay, which all follow from its subnet, its number, and how
often the job was rewound.

Each rewind takes all capsules of a job back to a snapshot. From then on the job's frames have
another VXLAN id. Frames from before may still be on their way, and a socket that was restored would
take them: addresses, ports and sequence numbers fit. But no device has their id any more.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from functools import lru_cache

VXLAN_PORT = 4789
VXLAN_OVERHEAD = 50
BRIDGES = "lsb*"
"""The pattern by which nft matches the bridges of all jobs."""
JOB_PREFIX = 24
"""The length of the prefix of each job's subnet."""
STRIDE = 1 << 16
"""The distance between two VXLAN ids of a job. The number of a job is at most this, because the
largest network for overlays, a /8, has so many /24."""
ROUNDS = 64
"""The number of VXLAN ids that a job has: after so many rewinds the first one comes again. No link
holds a frame back for that long. All ids are below 1 << 24, the limit of VXLAN."""


@dataclass(frozen=True)
class Overlay:
    """A job's overlay. ``vni`` is its number, which is part of its devices' names and stays.
    ``rewinds``: how often the job was rewound."""

    vni: int
    subnet: str
    rewinds: int = 0

    @classmethod
    def numbered(cls, subnet: str, overlays: str) -> Overlay | None:
        """The overlay that has this subnet where jobs get theirs from the network ``overlays``;
        None if none has. Raises ValueError if ``subnet`` is no network."""
        own, network = ipaddress.IPv4Network(subnet), ipaddress.IPv4Network(overlays)
        if own.prefixlen != JOB_PREFIX or not own.subnet_of(network):
            return None
        first, each = int(network.network_address), own.num_addresses
        return cls((int(own.network_address) - first) // each + 1, subnet)

    @property
    def wire_id(self) -> int:
        """The VXLAN id of the job's frames; ``vni`` for a job that was never rewound."""
        return self.vni + self.rewinds % ROUNDS * STRIDE

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
    from 1, is its first VXLAN id."""
    return max(1, 1 << 24 - ipaddress.ip_network(overlays).prefixlen)


def mac(address: str) -> str:
    """The MAC of a mobile address: locally administered, ``ls`` and the four address bytes."""
    packed = ipaddress.ip_address(address).packed
    return "06:6c:" + ":".join(f"{byte:02x}" for byte in packed)


def address_of(mac: str) -> str:
    """The mobile address of a MAC that :func:`mac` made."""
    return ".".join(str(int(byte, 16)) for byte in mac.split(":")[2:])
