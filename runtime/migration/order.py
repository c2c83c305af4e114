# SPDX-License-Identifier: Apache-2.0
"""The order for a migration: what is asked for, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from ..model.gpu_asked import GpuAsked
from ..model.jobs import Capsule, Job


@dataclass(frozen=True)
class Order:
    """The order to move a capsule.

    ``destination``: a host; "" lets the orchestrator choose one. ``gpu``: the GPU to use and the
    one to leave; on the capsule's own host this makes the migration a swap of GPUs. ``verify``:
    compare every byte of device memory after the migration. ``copy_way``: replaces precopy.way, if
    it is set. ``until``: the monotonic time by which the capsule must be gone.
    """

    job: Job
    capsule: Capsule
    destination: str = ""
    reason: str = ""
    by: str = ""
    gpu: GpuAsked | None = None
    verify: bool = False
    copy_way: str = ""
    until: float | None = None

    @property
    def is_swap(self) -> bool:
        """Whether the capsule stays on its host and only goes to another GPU."""
        return self.gpu is not None and self.gpu.host == self.capsule.host
