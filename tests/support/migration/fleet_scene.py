# SPDX-License-Identifier: Apache-2.0
"""A cluster file with three hosts, and a fleet on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.runtime.config import cluster as config
from liveshift.runtime.fleet.fleet import Fleet
from liveshift.runtime.messages import RunJob
from liveshift.runtime.model.jobs import Capsule, Job

CLUSTER = """
[cluster]
name = "evacuation"
orchestrator = "10.88.0.2:7400"
overlay = "10.99.0.0/16"
[hosts.h0]
address = "10.88.0.10"
slots = 4
[hosts.h1]
address = "10.88.0.11"
slots = 4
[hosts.h2]
address = "10.88.0.12"
slots = 4
[paths]
state = "{state}"
"""


def a_fleet(state: Path, more: str = "", hosts: tuple[str, str] = ("h0", "h1")) -> Fleet:
    """A job of two on these hosts, in memory and in the journal."""
    made = Fleet(config.parse(CLUSTER.replace("{state}", str(state)) + more).cluster)
    owners = {f"a/{n}": (n, host) for n, host in enumerate(hosts)}
    run = RunJob("a", 2, ["true"], {}, "/", 0, [])
    spec = msgspec.msgpack.encode({"uid": 0, "run": msgspec.to_builtins(run)})
    started, epoch = made.journal.add_job("a", 1, "10.99.0.0/24", spec, owners)
    capsules = {name: Capsule(name, n, host, epoch) for name, (n, host) in owners.items()}
    made.jobs["a"] = Job("a", Overlay(1, "10.99.0.0/24"), run, 0, started, capsules)
    return made


def into_one_rack(fleet: Fleet, *names: str) -> None:
    """Put these hosts into one failure domain: none of them can hold another's images."""
    fleet.cluster = replace(
        fleet.cluster,
        hosts=tuple(
            replace(host, domain="rack-1") if host.name in names else host
            for host in fleet.cluster.hosts
        ),
    )
