# SPDX-License-Identifier: Apache-2.0
"""An agent starts a capsule: what it asks of the sandbox, and when it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from liveshift.criu_glue.capsule import sandboxes
from liveshift.criu_glue.capsule.sandboxes import SandboxPlan
from liveshift.criu_glue.network import network
from liveshift.errors import Refused
from liveshift.interposer.library import LIBRARY
from liveshift.runtime.agent.host.running_capsule import CapsuleFactory
from liveshift.runtime.config import cluster as config
from liveshift.runtime.messages import Book, CapsuleSpec

CLUSTER = """
[cluster]
name = "c"
orchestrator = "10.88.0.2:7400"
overlay = "10.99.0.0/16"
[hosts.h1]
address = "10.88.0.10"
[paths]
state = "{state}"
"""


def start(spec: CapsuleSpec, state: Path) -> None:
    """Let h1 start the capsule."""
    cluster = config.parse(CLUSTER.replace("{state}", str(state))).cluster
    CapsuleFactory(cluster, "h1").start(spec, Book("gpt", 1, "10.99.0.0/24", {}), 1)


class Asked(Exception):
    """Ends the start once the sandbox is asked for."""


@pytest.mark.parametrize("umask", [-1, 0o077])
def test_the_command_gets_the_umask_of_its_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    asked: list[int] = []

    def asked_for(
        plan: SandboxPlan, argv: list[str], env: dict[str, str], cwd: str, umask: int = -1
    ) -> None:
        asked.append(umask)
        raise Asked

    for name in ("raise_overlay", "plug_in", "unplug"):
        monkeypatch.setattr(network, name, lambda *_, **__: None)
    monkeypatch.setattr(sandboxes, "start", asked_for)
    spec = CapsuleSpec("gpt/1", "gpt", 1, ["true"], {}, "/", 0, 0, [], "", umask)
    with pytest.raises(Asked):
        start(spec, tmp_path / "state")
    assert asked == [umask]


def test_a_rank_is_not_started_without_gates(tmp_path: Path) -> None:
    """As where its Python is of another minor version than the orchestrator's."""
    there = tmp_path / "lib/python3.99/site-packages/liveshift/interposer" / LIBRARY
    spec = CapsuleSpec(
        name="gpt/1",
        job="gpt",
        index=1,
        argv=["true"],
        env={"LD_PRELOAD": f"{there}:libx.so"},
        cwd="/",
        uid=0,
        gid=0,
        groups=[],
        hosts_file="",
    )
    with pytest.raises(Refused, match=f"h1 has no {there}, which .* without gates") as refused:
        start(spec, tmp_path / "state")
    assert "the same minor version of Python" in (refused.value.hint or "")
    assert not (tmp_path / "state").exists()
