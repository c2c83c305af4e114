# SPDX-License-Identifier: Apache-2.0
"""What an agent's start of a capsule asks of its sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from liveshift.criu_glue.capsule import sandboxes
from liveshift.criu_glue.capsule.sandboxes import SandboxPlan
from liveshift.criu_glue.network import network
from liveshift.runtime.agent.host.running_capsule import CapsuleFactory
from liveshift.runtime.config import cluster as config
from liveshift.runtime.messages import Book, CapsuleSpec


class Asked(Exception):
    """Ends the start once the sandbox is asked for."""


@pytest.mark.parametrize("umask", [-1, 0o077])
def test_the_command_gets_the_umask_of_its_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    text = f"""
[cluster]
name = "c"
orchestrator = "10.88.0.2:7400"
overlay = "10.99.0.0/16"
[hosts.h1]
address = "10.88.0.10"
[paths]
state = "{tmp_path}/state"
"""
    asked: list[int] = []

    def start(
        plan: SandboxPlan, argv: list[str], env: dict[str, str], cwd: str, umask: int = -1
    ) -> None:
        asked.append(umask)
        raise Asked

    for name in ("raise_overlay", "plug_in", "unplug"):
        monkeypatch.setattr(network, name, lambda *_, **__: None)
    monkeypatch.setattr(sandboxes, "start", start)
    spec = CapsuleSpec("gpt/1", "gpt", 1, ["true"], {}, "/", 0, 0, [], "", umask)
    with pytest.raises(Asked):
        CapsuleFactory(config.parse(text).cluster, "h1").start(
            spec, Book("gpt", 1, "10.99.0.0/24", {}), 1
        )
    assert asked == [umask]
