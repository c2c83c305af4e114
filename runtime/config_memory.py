# SPDX-License-Identifier: Apache-2.0
"""How memory goes from host to host: the tables [wire] and [precopy] of the cluster file."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from .config_values import Choice, Flag, Seconds, Share, WholeNumber


class Compress(StrEnum):
    """Whether memory is compressed on its way."""

    AUTO = "auto"  # while the link is measured to be slower than the compressor
    NEVER = "never"
    ALWAYS = "always"


class Seal(StrEnum):
    """Whether memory is sealed on its way."""

    ON = "on"
    OFF = "off"  # only on a network that the file calls trusted


class Way(StrEnum):
    """How memory goes to the destination."""

    AUTO = "auto"  # what costs the job least (cost.py)
    STOP = "stop"  # all of it while the job is paused
    ROUND = "round"  # once while the job trains; what is written meanwhile during the pause
    ROUNDS = "rounds"  # again and again, until a round finds no less than the one before


@dataclass(frozen=True, kw_only=True)
class WireSettings:
    """What lies between two hosts."""

    streams: Annotated[int, WholeNumber(1, 32)] = 4  # connections that carry memory at once
    compress: Annotated[Compress, Choice(Compress)] = Compress.AUTO
    seal: Annotated[Seal, Choice(Seal)] = Seal.ON
    trusted: Annotated[bool, Flag()] = False  # nobody else can read or change what goes over it


@dataclass(frozen=True, kw_only=True)
class Precopy:
    """What is sent of memory while the job still trains."""

    enabled: Annotated[bool, Flag()] = True
    way: Annotated[Way, Choice(Way)] = Way.AUTO
    slow_down: Annotated[float | None, Share(0.01, 0.9)] = None  # of the job's speed, at most
    max_pause: Annotated[float | None, Seconds()] = None  # of the way taken; None: from timeouts
    rounds: Annotated[int, WholeNumber(1, 1000)] = 30  # at most
