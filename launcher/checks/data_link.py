# SPDX-License-Identifier: Apache-2.0
"""Checks the interface that images go over: a cluster file names it by its address."""

from __future__ import annotations

from collections.abc import Iterator

from ...runtime.agent.host.data_link import interfaces, read_link
from ...runtime.config.cluster import Cluster
from ...runtime.model import link_rates
from ...runtime.model.link_rates import bits
from .finding import Finding, Verdict

NEEDED = "hosts.NAME.address: the fastest way to the others"


def data_link(cluster: Cluster | None) -> Iterator[Finding]:
    """Check which host of the cluster this machine is, over which interface its images go, and how
    fast that is."""
    if cluster is None:
        return
    among = interfaces()
    mine = {address for interface in among for address in interface.addresses}
    here = next((host for host in cluster.hosts if host.address in mine), None)
    if here is None:
        yield Finding(
            "data link",
            "no host has an address of this machine, which has " + ", ".join(sorted(mine)),
            NEEDED,
            Verdict.WARN,
            "correct the addresses of the cluster file, unless this machine is none of its hosts",
        )
        return
    link = read_link(here.name, here.address, link_rates.load(cluster.paths.run), among)
    found = f"{here.name}: {here.address} on {link.interface}"
    found += f", {bits(link.speed)}" if link.speed else ", speed unknown"
    found += "" if link.up else ", down"
    for name, rate in sorted(link.rates.items()):
        found += f"; {bits(8 * rate)} measured to {name}"
    yield Finding(
        "data link", found, NEEDED, Verdict.WARN if link.warning else Verdict.OK, link.warning
    )
