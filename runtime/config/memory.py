# SPDX-License-Identifier: Apache-2.0
"""How memory goes from host to host: the tables [wire] and [precopy] of the cluster file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from .choices import Compress, Seal, Way
from .values import Seconds

Share = Annotated[
    float,
    Meta(ge=0.01, le=0.9, description="a share from 0.01 to 0.9, such as 0.2 for a fifth"),
]


@dataclass(frozen=True, kw_only=True)
class WireSettings:
    """What lies between two hosts."""

    streams: Annotated[int, Meta(ge=1, le=32)] = 4  # connections that carry memory at once
    compress: Compress = Compress.AUTO
    seal: Seal = Seal.ON
    trusted: bool = False  # nobody else can read or change what goes over it


@dataclass(frozen=True, kw_only=True)
class Precopy:
    """What is sent of memory while the job still trains."""

    enabled: bool = True
    way: Way = Way.AUTO
    slow_down: Share | None = None  # of the job's speed, at most
    max_pause: Seconds | None = None  # of the way taken; None: from timeouts
    rounds: Annotated[int, Meta(ge=1, le=1000)] = 30  # at most
