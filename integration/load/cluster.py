# SPDX-License-Identifier: Apache-2.0
"""A cluster file for hosts that are not there, and their keys. All addresses are loopback's."""

from __future__ import annotations

import math
import shutil
from ipaddress import IPv4Network
from pathlib import Path

from free_ports import free_port

from liveshift.runtime.config.cluster import (
    Cluster,
    Endpoint,
    HostSettings,
    Paths,
    SnapshotSettings,
    Timeouts,
    dump,
)
from liveshift.runtime.config.values import ORCHESTRATOR
from liveshift.runtime.control import keys

MOST_PER_JOB = 100
CAPSULES_PER_HOST = 10


def make(directory: Path, hosts: int, moves: int, timeouts: Timeouts | None = None) -> Cluster:
    """Write the cluster file and every key below ``directory``; returns what the file says.

    There are slots for ten capsules on each host, and for ``moves`` more on their way.
    """
    cluster = Cluster(
        name="load",
        orchestrator=Endpoint("127.0.0.1", free_port()),
        overlay=IPv4Network("10.99.0.0/16"),
        hosts=tuple(
            HostSettings(
                name=f"h{number}",
                address=f"127.77.{number // 250}.{number % 250 + 1}",
                slots=CAPSULES_PER_HOST + math.ceil(2 * moves / hosts),
            )
            for number in range(hosts)
        ),
        paths=Paths(
            state=directory / "state", run=directory / "run", keys=directory / "keys", criu=None
        ),
        timeouts=timeouts or Timeouts(),
        snapshots=SnapshotSettings(every=None),  # agents that are simulated take none
    )
    (directory / "cluster.toml").write_text(dump(cluster))
    keys.init(cluster.paths.keys, [host.name for host in cluster.hosts])
    _hand_out_keys(cluster)
    images(cluster).mkdir()
    return cluster


def agent_keys(cluster: Cluster) -> Path:
    """Where agents find their keys: each its own and the orchestrator's public half, as on a host
    of its own. From the orchestrator's directory each would read everybody's."""
    return cluster.paths.keys.with_name("agents")


def images(cluster: Cluster) -> Path:
    """Where simulated hosts find each other's images."""
    return cluster.paths.run.with_name("images")


def _hand_out_keys(cluster: Cluster) -> None:
    for host in cluster.hosts:
        _copy(keys.secret_path(cluster.paths.keys, host.name), agent_keys(cluster) / "hosts")
    public = keys.public_path(cluster.paths.keys, ORCHESTRATOR)
    _copy(public, agent_keys(cluster) / "public")


def _copy(key: Path, into: Path) -> None:
    into.mkdir(parents=True, exist_ok=True)
    shutil.copy(key, into)


def job_sizes(hosts: int) -> list[int]:
    """Capsules of each job: ten for each host in all, and a job spreads over as many hosts as it
    has capsules."""
    size = min(hosts, MOST_PER_JOB)
    return [size] * (hosts * CAPSULES_PER_HOST // size)
