# SPDX-License-Identifier: Apache-2.0
"""The ladder of deadlines, and how late this host is at worst for no reason of ours."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ...runtime.config.timeouts import Timeouts
from ..show import ladder
from .finding import Finding, Verdict

LOOK_S = 0.5
NAP_S = 0.001
SYNCS = 8
PAGE = bytes(4096)


def deadlines(timeouts: Timeouts, state: Path, source: str) -> Iterator[Finding]:
    """A sign of life that is as late as this host's worst must not make it suspect.

    ``state``: the directory of the journal, whose writes are waited for before a move goes on.
    ``source`` says where the deadlines come from.
    """
    measured = {"a thread overslept by": _overslept(), "fsync took": _synced(state)}
    seen = [f"{what} {_ms(seconds)}" for what, seconds in measured.items() if seconds is not None]
    if measured["fsync took"] is None:
        seen.append(f"fsync in {state} could not be tried")
    worst = max(seconds for seconds in measured.values() if seconds is not None)
    good = worst <= timeouts.heartbeat
    yield Finding(
        "deadlines",
        f"{ladder.in_a_line(timeouts)} ({source}); at worst {', '.join(seen)}",
        f"at worst a heartbeat late: {timeouts.heartbeat:g} s",
        Verdict.OK if good else Verdict.WARN,
        ""
        if good
        else f"a busy host would be taken for a lost one: set timeouts.suspicion to {5 * worst:.1f}"
        " or more, or take load (or the journal) off this machine",
    )


def _overslept() -> float:
    """By how much the latest of many short sleeps was late, in seconds."""
    worst, until = 0.0, time.monotonic() + LOOK_S
    while (before := time.monotonic()) < until:
        time.sleep(NAP_S)
        worst = max(worst, time.monotonic() - before - NAP_S)
    return worst


def _synced(directory: Path) -> float | None:
    """The slowest of a few small durable writes beside the journal, in seconds; None if none can
    be tried. Where the directory is still to come, its place is tried."""
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
