# SPDX-License-Identifier: Apache-2.0
"""Writes sizes, pauses, times and lists for people. All messages use decimal units: 1 MB is 10^6
bytes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable


def size(value: float) -> str:
    """Write a number of bytes with three figures: ``512 B``, ``13.0 MB``, ``246 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" else f"{figures(value)} {unit}"
        value /= 1000
    return f"{figures(value)} TB"


def pause(value: float) -> str:
    """Write the length of a pause, to a hundredth of a second or three figures: ``12.3 s``."""
    if 0 < value < 0.005:
        return "< 0.01 s"
    return f"{value:.2f} s" if value < 9.995 else f"{figures(value)} s"


def moment(value: float) -> str:
    """Write a time, in seconds since 1970, as this machine's clock shows it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))


def day_time(value: float) -> str:
    """Write a time as :func:`moment` does; of one of today only the time of day: ``14:03:12``."""
    day, written = moment(time.time()).partition(" ")[0], moment(value)
    return written.removeprefix(f"{day} ")


def figures(value: float) -> str:
    """Write a number with three significant figures, never in exponent form."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    value = float(f"{value:.3g}")  # round before counting digits: 0.9996 becomes 1.00
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def some(words: Iterable[object], most: int, separator: str = ", ") -> str:
    """Write the first ``most`` of a list and count the rest: ``a, b and 7 more``."""
    first = [str(word) for word in words]
    more = f" and {len(first) - most} more" if len(first) > most else ""
    return separator.join(first[:most]) + more


def ranges(numbers: Iterable[int]) -> str:
    """Write whole numbers in short: ``0-3``, ``0,2``, ``0-1,4``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
