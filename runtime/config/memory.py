# SPDX-License-Identifier: Apache-2.0
"""The tables [wire] and [precopy] of the cluster file: how memory goes from host to host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from .choices import Compress, SealChoice, Way
from .values import Seconds

Share = Annotated[
    float,
    Meta(ge=0.01, le=0.9, description="a share from 0.01 to 0.9, such as 0.2 for a fifth"),
]


@dataclass(frozen=True, kw_only=True)
class WireSettings:
    """The table [wire]: the connections between two hosts."""

    streams: Annotated[int, Meta(ge=1, le=32)] = 4  # connections that carry memory at once
    compress: Compress = Compress.AUTO
    seal: SealChoice = SealChoice.ON
    trusted: bool = False  # no other party can read or change its traffic


@dataclass(frozen=True, kw_only=True)
class PrecopySettings:
    """The table [precopy]: what the source sends of memory while the job still trains."""

    enabled: bool = True
    way: Way = Way.AUTO
    slow_down: Share | None = None  # the job may lose at most this share of its speed
    max_pause: Seconds | None = None  # the longest pause of the way taken; None: from timeouts
    rounds: Annotated[int, Meta(ge=1, le=1000)] = 30  # at most this many
