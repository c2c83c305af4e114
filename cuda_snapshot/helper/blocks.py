# SPDX-License-Identifier: Apache-2.0
"""What the helper and its clients say about device memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

Natural = Annotated[int, msgspec.Meta(ge=0)]
"""Also where it comes from another host."""


@dataclass(frozen=True)
class Block:
    """One device allocation of a process."""

    address: Natural
    size: Natural
    """Bytes."""
    gpu: str
    """The UUID of the GPU that has, had or shall have its memory."""
    kind: int
    """A layout.Memory of the interposer."""


@dataclass(frozen=True)
class Figures:
    """How a copy through a ring went, measured in the helper (CLOCK_MONOTONIC)."""

    bytes: int
    seconds: float
    """From the first slot to the last."""
    waited_s: float
    """Of these, what the GPU had nothing to do: all slots were with the client."""

    @property
    def gb_per_s(self) -> float:
        """10⁹ bytes a second."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0
