# SPDX-License-Identifier: Apache-2.0
"""The rates last measured from this host to each other host (wire.Lanes.measure).

They are kept in a file of the run directory, for a restarted agent and for the doctor.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

FILE = "link-rates.json"

PAUSE_RATE = 2.7e9
"""During the freeze memory goes at this many bytes per second if the link is not the limit: read,
compared, sealed, opened and stored on two cores that both ends share (docs/measurements.md)."""


class Measured(msgspec.Struct, frozen=True):
    """A measurement. ``rate``: bytes per second. ``time``: seconds since the epoch."""

    rate: float
    time: float


_rates = msgspec.json.Decoder(dict[str, Measured])


def load(run: Path) -> dict[str, Measured]:
    """The measurements by host; empty if there are none. ``run``: the cluster's run directory."""
    try:
        return _rates.decode((run / FILE).read_bytes())
    except (OSError, msgspec.DecodeError):  # the next move measures again
        return {}


def rate(run: Path, host: str) -> float:
    """The rate last measured to ``host``, in bytes per second; 0.0 if there is none."""
    measured = load(run).get(host)
    return measured.rate if measured is not None else 0.0


def keep(run: Path, host: str, rate: float) -> None:
    """Keep a rate to ``host`` that was measured just now. If writing fails, it is dropped."""
    rates = {**load(run), host: Measured(rate, time.time())}
    staged = run / f".{FILE}.{os.getpid()}"
    with contextlib.suppress(OSError):
        staged.write_bytes(msgspec.json.encode(rates))
        staged.rename(run / FILE)


def bits(rate: float) -> str:
    """A rate in bit/s, as interfaces are named: ``25 Gbit/s``, ``940 Mbit/s``."""
    if rate >= 999.5e6:
        return f"{rate / 1e9:.3g} Gbit/s"
    return f"{rate / 1e6:.3g} Mbit/s"
