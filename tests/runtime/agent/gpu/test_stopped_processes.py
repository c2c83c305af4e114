# SPDX-License-Identifier: Apache-2.0
"""The note of the processes that a move has stopped."""

from __future__ import annotations

from pathlib import Path

from liveshift.runtime.agent.gpu.stopped_processes import NOTE, StoppedProcesses


def test_it_outlives_who_wrote_it_and_is_gone_with_its_last_process(tmp_path: Path) -> None:
    StoppedProcesses(tmp_path).add(7)
    StoppedProcesses(tmp_path).add(9, [4, 1])
    StoppedProcesses(tmp_path).add(7)
    assert StoppedProcesses(tmp_path).read() == {7: [], 9: [4, 1]}
    StoppedProcesses(tmp_path).forget({7, 8})
    assert StoppedProcesses(tmp_path).read() == {9: [4, 1]}
    StoppedProcesses(tmp_path).forget()
    assert not list(tmp_path.iterdir())
    StoppedProcesses(tmp_path).forget()
    assert not StoppedProcesses(tmp_path).read(), NOTE
