# SPDX-License-Identifier: Apache-2.0
"""The values with which the helper and its clients describe device memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

Natural = Annotated[int, msgspec.Meta(ge=0)]
"""A number from 0; checked also when the value comes from another host."""


@dataclass(frozen=True)
class Block:
    """One device allocation of a process."""

    address: Natural
    size: Natural
    """The size in bytes."""
    gpu: str
    """The UUID of the GPU that has, had or will have the block's memory."""
    kind: int
    """A layout.MemoryKind of the interposer."""


@dataclass(frozen=True)
class Figures:
    """Size and times of a copy through a ring, measured in the helper (CLOCK_MONOTONIC)."""

    bytes: int
    seconds: float
    """Time from the first slot to the last."""
    waited_s: float
    """The part of ``seconds`` in which the GPU had no work because the client had all slots."""
