# SPDX-License-Identifier: Apache-2.0
"""What the way from this host to each other one was last measured to carry (wire.Lanes.measure).

Kept in a file of the run directory, so that an agent that is started anew, and the doctor, know.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

FILE = "link-rates.json"

STANDSTILL = 2.7e9
"""Bytes a second of memory at a standstill, where the link carries more: read, compared, sealed,
opened and stored on two cores that both ends share (docs/measurements.md)."""


class Measured(msgspec.Struct, frozen=True):
    """``rate`` in bytes a second; ``time`` in seconds since the epoch."""

    rate: float
    time: float


_rates = msgspec.json.Decoder(dict[str, Measured])


def load(run: Path) -> dict[str, Measured]:
    """By host; ``run`` is the cluster's run directory. Nothing where nothing was kept."""
    try:
        return _rates.decode((run / FILE).read_bytes())
    except (OSError, msgspec.DecodeError):  # it is only ever measured again
        return {}


def keep(run: Path, host: str, rate: float) -> None:
    """Keep what was measured to ``host`` just now. What cannot be written is not kept."""
    rates = {**load(run), host: Measured(rate, time.time())}
    staged = run / f".{FILE}.{os.getpid()}"
    with contextlib.suppress(OSError):
        staged.write_bytes(msgspec.json.encode(rates))
        staged.rename(run / FILE)


def bits(rate: float) -> str:
    """Bit/s as interfaces are called: ``25 Gbit/s``, ``940 Mbit/s``."""
    if rate >= 999.5e6:
        return f"{rate / 1e9:.3g} Gbit/s"
    return f"{rate / 1e6:.3g} Mbit/s"
