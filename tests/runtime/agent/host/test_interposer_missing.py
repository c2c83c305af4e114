# SPDX-License-Identifier: Apache-2.0
"""A host that lacks the interposer which its orchestrator names runs no rank without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from liveshift.errors import Refused
from liveshift.interposer.library import LIBRARY
from liveshift.runtime.agent.host.running_capsule import CapsuleFactory
from liveshift.runtime.config import cluster as config
from liveshift.runtime.messages import Book, CapsuleSpec


def test_a_rank_is_not_started_without_gates(tmp_path: Path) -> None:
    """As where its Python is of another minor version than the orchestrator's."""
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
        CapsuleFactory(config.parse(text).cluster, "h1").start(
            spec, Book("gpt", 1, "10.99.0.0/24", {}), 1
        )
    assert "the same minor version of Python" in (refused.value.hint or "")
    assert not (tmp_path / "state").exists()
