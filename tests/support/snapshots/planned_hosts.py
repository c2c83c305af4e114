# SPDX-License-Identifier: Apache-2.0
"""Hosts, and a snapshot of the job gpt on h0 and h1, for tests of functions that choose."""

from __future__ import annotations

from liveshift.runtime.messages import GpuSeat
from liveshift.runtime.model.snapshots import Generation
from liveshift.runtime.model.spares import GpuNeed, HostView

OWNERS = {"gpt/0": "h0", "gpt/1": "h1"}


def seat(uuid: str, *, free: bool = True, model: str = "H100") -> GpuSeat:
    return GpuSeat(uuid, model, free)


NEED = GpuNeed(frozenset({"b0"}), (seat("b0", free=False),))
"""One GPU of h1."""


def host(
    name: str,
    used: int = 0,
    slots: int = 2,
    spare: str = "floating",
    up: bool = True,
    tainted: bool = False,
    gpus: tuple[GpuSeat, ...] = (),
) -> HostView:
    return HostView(name, spare, slots, used, up, tainted, gpus)


def generation(**holders: str) -> Generation:
    """Of gpt/0 and gpt/1; ``a`` and ``b`` name the holders of their images."""
    held = {"gpt/0": [holders["a"]], "gpt/1": [holders["b"]]}
    return Generation(17, "gpt", "step 9", 5.0, 0, {"gpt/0": ("h0", 1), "gpt/1": ("h1", 1)}, held)
