# SPDX-License-Identifier: Apache-2.0
"""Checks the deadlines against the delays that this host has for reasons other than liveshift."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ...runtime.config.timeouts import Timeouts
from ..show import timeouts_view
from .finding import Finding, Verdict, judged

LOOK_S = 0.5
NAP_S = 0.001
SYNCS = 8
PAGE = bytes(4096)


def deadlines(timeouts: Timeouts, state: Path, source: str) -> Iterator[Finding]:
    """Measure how late this host is at worst, and warn if that is more than one heartbeat.

    A heartbeat that is late for such a reason must not make the host suspect. ``state``: the
    journal's directory; a move waits for writes there. ``source`` says where the deadlines come
    from.
    """
    measured = {"a thread overslept by": _overslept(), "fsync took": _synced(state)}
    seen = [f"{what} {_ms(seconds)}" for what, seconds in measured.items() if seconds is not None]
    if measured["fsync took"] is None:
        seen.append(f"fsync in {state} could not be tried")
    worst = max(seconds for seconds in measured.values() if seconds is not None)
    yield judged(
        "deadlines",
        f"{timeouts_view.in_a_line(timeouts)} ({source}); at worst {', '.join(seen)}",
        f"at worst a heartbeat late: {timeouts.heartbeat:g} s",
        worst <= timeouts.heartbeat,
        f"a busy host would count as lost: set timeouts.suspicion to {5 * worst:.1f} or more, or"
        " take load (or the journal) off this machine",
        Verdict.WARN,
    )


def _overslept() -> float:
    """Return by how many seconds the latest of many short sleeps was late."""
    worst, until = 0.0, time.monotonic() + LOOK_S
    while (before := time.monotonic()) < until:
        time.sleep(NAP_S)
        worst = max(worst, time.monotonic() - before - NAP_S)
    return worst


def _synced(directory: Path) -> float | None:
    """Return the seconds that the slowest of a few small durable writes took; None if none can be
    tried. If the directory does not exist yet, the nearest one above it is tried."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    worst = 0.0
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            for _ in range(SYNCS):
                before = time.monotonic()
                file.write(PAGE)
                file.flush()
                os.fsync(file.fileno())
                worst = max(worst, time.monotonic() - before)
    except OSError:
        return None
    return worst


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
