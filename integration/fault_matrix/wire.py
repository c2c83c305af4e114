# SPDX-License-Identifier: Apache-2.0
"""Bits that flip between two hosts of a lab.

A rule at the destination's network device overwrites 32 bits inside one packet of the image, or of
pages of memory. Packets of a veth pair carry no checksum (the kernel trusts its own memory), so
the receiving socket takes it, and whoever reads must notice.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from liveshift.launcher.lab import Lab
from liveshift.launcher.lab.wiring import NAMED
from liveshift.runtime.config.cluster import load

_TABLE = "lab_flip"

# From 20 + 32 bytes of TCP header and 17 of ZMTP's on, a CURVE message is one sealed box; a chunk
# of pages is from some 50 on.
_RULES = """table netdev {table} {{
chain in {{
type filter hook ingress device "eth0" priority 0;
tcp dport {{ {ports} }} meta length > 200 limit rate 1/day burst 1 packets \
  @th,800,32 set 0xa5a5a5a5 counter
}}
}}
"""


@contextmanager
def flipped(lab: Lab, destination: str) -> Iterator[Callable[[], int]]:
    """Spoil the next packet of an image that comes to a host; yields how many it has been."""
    machine = lab.machine(destination)
    host = load(lab.config).host(destination)
    ports = f"{host.data_port}, {host.pages_port}"
    inside = ["nsenter", f"--net={NAMED / machine.netns}", "--", "nft"]

    def nft(*words: str, rules: str = "") -> str:
        done = subprocess.run([*inside, *words], input=rules, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def hits() -> int:
        listed = json.loads(nft("--json", "list", "table", "netdev", _TABLE))["nftables"]
        expressions = (e for item in listed if "rule" in item for e in item["rule"]["expr"])
        return sum(int(e["counter"]["packets"]) for e in expressions if "counter" in e)

    nft("-f", "-", rules=_RULES.format(table=_TABLE, ports=ports))
    try:
        yield hits
    finally:
        nft("delete", "table", "netdev", _TABLE)
