# SPDX-License-Identifier: Apache-2.0
"""How many threads more a host can have, by the kernel and by the agent's control group."""

from __future__ import annotations

from pathlib import Path

import pytest

from liveshift.runtime.agent.host import task_limits


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    """A tree of control groups: name → (pids.max, pids.current)."""
    for name, most, now in (
        ("v2/system.slice", "max", "40"),
        ("v2/system.slice/agent.service", "4915", "15"),
        ("v2/user.slice", "7", "7"),
        ("v1/pids/system.slice", "300", "20"),
    ):
        group = tmp_path / name
        group.mkdir(parents=True)
        (group / "pids.max").write_text(f"{most}\n")
        (group / "pids.current").write_text(f"{now}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("version", "own", "found"),
    [
        ("v2", "0::/system.slice/agent.service\n", [(4915, 4900)]),
        ("v2", "0::/system.slice\n", []),
        ("v1", "9:name=systemd:/x\n8:pids:/system.slice\n0::/\n", [(300, 280)]),
        ("v2", "0::/../elsewhere\n", []),
    ],
)
def test_every_control_group_above_the_agent_counts(
    groups: Path, version: str, own: str, found: list[tuple[int, int]]
) -> None:
    (groups / "own").write_text(own)
    limits = list(task_limits._of_control_groups(groups / "own", groups / version))
    assert [(limit.most, limit.left) for limit in limits] == found
    assert all("TasksMax=infinity" in limit.remedy for limit in limits)


def test_the_kernels_limits_are_those_of_this_machine() -> None:
    most = int(Path("/proc/sys/kernel/threads-max").read_text())
    limit = task_limits.tightest()
    assert 0 < limit.left < limit.most
    assert limit.left < most
