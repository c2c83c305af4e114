# SPDX-License-Identifier: Apache-2.0
"""Writes numbers as people read them: three figures and a decimal unit."""

from __future__ import annotations

from datetime import UTC, datetime

from ... import units
from ...units import figures, pause

__all__ = ["figures", "instant", "pause", "rate", "seconds", "share", "size"]


def seconds(value: float) -> str:
    """Write a duration: ``0.412 s``, ``1.23 s``, ``12.3 s``, ``214 s``."""
    if abs(value) < 0.0005:
        return "0 s" if value == 0 else "< 1 ms"
    if abs(value) < 0.9995:
        return f"{value:.3f} s"
    return f"{figures(value)} s"


def size(value: float | None) -> str:
    """Write a number of bytes in decimal units: ``246 MB``; an en dash for None."""
    return "–" if value is None else units.size(value)


def rate(value: float | None) -> str:
    """Write bytes per second: ``812 MB/s``; an en dash for None."""
    return "–" if value is None else f"{size(value)}/s"


def share(part: float, whole: float) -> str:
    """Write a part of a whole in per cent. Below 10 % it has a decimal."""
    if whole <= 0:
        return "–"
    percent = 100 * part / whole
    return f"{percent:.1f} %" if 0 < percent < 9.95 else f"{percent:.0f} %"


def instant(epoch_seconds: float) -> str:
    """Write a time of day to the tenth of a second, in UTC, with its date."""
    moment = datetime.fromtimestamp(round(epoch_seconds, 1), UTC)
    return f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 100_000} UTC"
