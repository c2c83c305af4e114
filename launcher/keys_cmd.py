# SPDX-License-Identifier: Apache-2.0
"""``liveshift keys init|add-host``: make the key pairs that let agents and orchestrator talk."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from ..runtime import keys
from ..runtime.config import Cluster, load


def init(config: Path) -> None:
    """Make the keys of the orchestrator and of every host in the cluster file."""
    cluster = load(config)
    _tell(cluster, keys.init(cluster.paths.keys, [host.name for host in cluster.hosts]))


def add_host(config: Path, name: str) -> None:
    """Make the keys of one host, which must be in the cluster file."""
    cluster = load(config)
    _tell(cluster, keys.add_host(cluster.paths.keys, cluster.host(name).name))


def _tell(cluster: Cluster, written: Iterable[Path]) -> None:
    for path in written:
        sys.stdout.write(f"{path}\n")
    directory = cluster.paths.keys
    sys.stderr.write(
        f"Copy {directory}/public to every machine, and each {directory}/hosts/NAME.key to its own"
        " host only, at the same place.\n"
    )
