# SPDX-License-Identifier: Apache-2.0
"""The helper hides the processes of its trial, also if that begins or ends while NVML answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from liveshift.cuda_snapshot.devices import NvmlGpu
from liveshift.cuda_snapshot.helper.calls import GetHost
from liveshift.cuda_snapshot.helper.service import Service

RANK, JOB = 5, 7
HELD: dict[int, int | None] = {RANK: 4 << 20, JOB: 1 << 20}


@pytest.mark.parametrize("before", [True, False])
def test_a_trial_that_ends_or_begins_meanwhile_is_not_told(before: bool) -> None:
    pids = {RANK} if before else set()

    def inventory() -> Any:
        pids.symmetric_difference_update({RANK})
        gpu = NvmlGpu(0, "GPU-1", "H200", 1 << 30, 1 << 29, "0", (9, 0), None, None, HELD)
        return SimpleNamespace(devices=(gpu,), driver="580.159.03", why_none=None)

    driver = SimpleNamespace(cuda=(13, 0), can_remap=True)
    operations: Any = SimpleNamespace(nvml=SimpleNamespace(inventory=inventory), driver=driver)
    trial: Any = SimpleNamespace(pids=pids, why="", sessions=False)
    cuda: Any = SimpleNamespace(uuids=list)
    caller: Any = None
    host = Service(operations, trial, cuda).answer(caller, GetHost())
    assert [gpu.processes for gpu in host.gpus] == [{JOB: 1 << 20}]
