# SPDX-License-Identifier: Apache-2.0
"""A real sandbox with the real capsule-init: made, started, waited for, and ended
after the test."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from captured import ENV, numbers
from waits import until

from liveshift.criu_glue.capsule import output, sandboxes
from liveshift.criu_glue.capsule.output import STDOUT, OutputRecord
from liveshift.criu_glue.capsule.sandboxes import Sandbox, SandboxPlan


@pytest.fixture
def netns() -> Iterator[Path]:
    name = f"ls-test-{os.getpid()}-{next(numbers)}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    yield Path("/run/netns") / name
    subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.fixture
def plan(tmp_path: Path, netns: Path) -> SandboxPlan:
    directory = tmp_path / "capsules" / "gpt.1"
    directory.mkdir(parents=True)
    hosts = "127.0.0.1 localhost\n10.99.0.2 gpt-1\n"
    return SandboxPlan(directory, netns, "gpt-1", hosts, 0, 0, ())


Start = Callable[..., Sandbox]


@pytest.fixture
def start(plan: SandboxPlan) -> Iterator[Start]:
    made: list[Sandbox] = []

    def begin(*argv: str, cwd: str = "/", plan: SandboxPlan = plan) -> Sandbox:
        made.append(sandboxes.start(plan, argv, ENV, cwd))
        return made[-1]

    yield begin
    for stands in made:
        sandboxes.end(stands)


def ended(stands: Sandbox) -> str:
    until(lambda: not stands.alive())
    return stands.plan.status.read_text().strip()


def records(stands: Sandbox) -> list[OutputRecord]:
    """All that is kept of what was printed."""
    found: list[OutputRecord] = []
    at = 0
    while True:
        at, raw = output.read(stands.plan.log, at, 1 << 20)
        if not raw:
            return found
        found += output.split(raw)
        at += len(raw)


def said(stands: Sandbox, stream: int = STDOUT) -> str:
    return b"".join(r.data for r in records(stands) if r.stream == stream).decode()
