# SPDX-License-Identifier: Apache-2.0
"""What a capsule needs of the GPUs of a host to which it may go."""

from __future__ import annotations

import time
from pathlib import Path

from fleet_scene import a_fleet

from liveshift.runtime.messages import CapsuleState, GpuSeat
from liveshift.runtime.model.spares import NO_GPUS

SEATS = tuple(GpuSeat(f"GPU-{n}", "H100", free=False) for n in range(2))


def test_device_memory_that_is_off_its_gpu_for_a_snapshot_counts(tmp_path: Path) -> None:
    fleet = a_fleet(tmp_path)
    fleet.hosts["h1"].gpus = SEATS
    capsule = fleet.jobs["a"].capsules["a/1"]
    assert fleet.gpu_need(capsule, "h1") is NO_GPUS, "nobody has reported it yet"
    capsule.seen = CapsuleState("a/1", 1, 1, 1, 1, 1.0, [1], "train", gpus=["GPU-1"])
    assert fleet.gpu_need(capsule, "h1").used == {"GPU-1"}
    capsule.seen = CapsuleState("a/1", 1, 1, 1, 1, 1.0, [1], "train")
    capsule.gpus_used = {"GPU-1": time.monotonic() - 5.0, "GPU-9": time.monotonic()}
    assert fleet.gpu_need(capsule, "h1").used == {"GPU-1"}, "that of another host is of before"
    long_ago = time.monotonic() - fleet.cluster.timeouts.collective
    capsule.gpus_used = {"GPU-1": long_ago}
    assert fleet.gpu_need(capsule, "h1") is NO_GPUS
