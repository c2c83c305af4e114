# SPDX-License-Identifier: Apache-2.0
"""Says which other hosts this host reaches."""

from __future__ import annotations

import asyncio

from ..config.cluster import Cluster
from ..control.kernels import Kernels
from ..messages import HostsReached, TryHosts


async def try_hosts(cluster: Cluster, kernels: Kernels, request: TryHosts) -> HostsReached:
    """Try all hosts at once. A host that the cluster file does not have is not reached."""
    known = {host.name: str(host.data) for host in cluster.hosts}
    names = [name for name in request.hosts if name in known]
    answers = await asyncio.gather(*(kernels.answers(known[n], request.limit) for n in names))
    return HostsReached([name for name, yes in zip(names, answers, strict=True) if yes])
