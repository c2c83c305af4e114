# SPDX-License-Identifier: Apache-2.0
"""What samples say about growth.

Leaks show in the second half, after the caches are warm, and in the least of many samples: an agent
needs more memory while an image passes through it, or while it holds images. On a loaded machine
that lasts for minutes, so each window is an eighth of the run.

Memory is what a daemon has of its own: images lie in a tmpfs, whose bytes are counted apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from .watch import JOURNAL, Daemon, Sample

WINDOWS = 4
"""The second half is divided into so many. Of each, the least sample counts."""

JUDGED_S = 600.0
"""A shorter run says nothing about memory: it takes as long until it has been used once."""

MEMORY_ALLOWED = 24 << 20
NUMBERS_ALLOWED = 8
"""By how much a daemon may grow over a whole run of any length: bytes; descriptors, threads."""

BYTES_ALLOWED = 1 << 20
"""By how much files on hosts may grow: the job's output, some lines of a log."""


BASE_MEMORY, MEMORY_PER_JOB = 200 << 20, 1 << 20
"""Bytes that a daemon may have of its own at rest: with nothing but the job that moves, and for
each small job beside it."""
PEAK = 2.0
"""So many times that much while moves are under way, at any moment."""


class Usage(msgspec.Struct, frozen=True):
    """One quantity of one daemon: first, last, most, and its growth.

    ``per_hour`` is fitted to the second half, None where that is too short; ``over_run`` is that
    for as long as the run was.
    """

    first: float
    last: float
    most: float
    per_hour: float | None
    over_run: float


class DaemonUsage(msgspec.Struct, frozen=True):
    """Bytes, numbers; ``cpu_per_minute`` in seconds of CPU."""

    memory: Usage
    descriptors: Usage
    threads: Usage
    cpu_per_minute: float
    restarted: bool


def usage(samples: Sequence[Sample]) -> dict[str, DaemonUsage]:
    """By the daemon's host."""
    names = samples[0].daemons
    return {name: _of(samples, name) for name in names}


def suspicious(daemons: Mapping[str, DaemonUsage], seconds: float) -> list[str]:
    """What grew as it should not in a run of so many seconds, in words."""
    found = []
    for name, seen in daemons.items():
        if seen.restarted:
            found.append(f"{name}: its daemon is another than at the beginning")
        memory = seen.memory
        if seconds >= JUDGED_S and memory.over_run > MEMORY_ALLOWED:
            found.append(
                f"{name}: memory grows by {(memory.per_hour or 0) / 1e6:.1f} MB an hour"
                f" ({memory.over_run / 1e6:.1f} MB in this run)"
            )
        for what, value in (("descriptors", seen.descriptors), ("threads", seen.threads)):
            if value.over_run > NUMBERS_ALLOWED and value.last > value.first + NUMBERS_ALLOWED:
                found.append(f"{name}: {what} grow by {value.per_hour or 0:.0f} an hour")
    return found


def too_large(samples: Sequence[Sample], beside: int, times: float = 1.0) -> list[str]:
    """Which daemons had too much memory of their own at some sample, for so many small jobs: more
    than ``times`` of what they may have at rest."""
    allowed = times * (BASE_MEMORY + beside * MEMORY_PER_JOB)
    most = {
        name: max(sample.daemons[name].private for sample in samples) for name in samples[0].daemons
    }
    return [
        f"{name}: {private / 1e6:.0f} MB with {beside} small jobs on the hosts,"
        f" more than {allowed / 1e6:.0f} MB"
        for name, private in most.items()
        if private > allowed
    ]


def left_over(before: Mapping[str, int], after: Mapping[str, int], notes: int = 0) -> list[str]:
    """What hosts have more of than before; the journal may grow. ``notes``: so many files more are
    allowed in each directory."""
    allowed = {"bytes": BYTES_ALLOWED, "files": notes}
    return [
        f"{kind}: {before.get(kind, 0)} before the moves, {count} after them"
        for kind, count in after.items()
        if not kind.startswith(JOURNAL)
        and count > before.get(kind, 0) + allowed.get(kind.rpartition(" ")[2], 0)
    ]


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Of the line with the least squares of distances; 0 for less than two points."""
    count = len(times)
    if count < 2 or times[0] == times[-1]:
        return 0.0
    middle, mean = sum(times) / count, sum(values) / count
    spread = sum((t - middle) ** 2 for t in times)
    return sum((t - middle) * (v - mean) for t, v in zip(times, values, strict=True)) / spread


def _of(samples: Sequence[Sample], name: str) -> DaemonUsage:
    first, last = samples[0], samples[-1]
    minutes = max(last.when - first.when, 1e-9) / 60
    return DaemonUsage(
        _usage(samples, name, lambda daemon: daemon.private),
        _usage(samples, name, lambda daemon: daemon.descriptors),
        _usage(samples, name, lambda daemon: daemon.threads),
        (last.daemons[name].cpu - first.daemons[name].cpu) / minutes,
        last.daemons[name].pid != first.daemons[name].pid,
    )


def _usage(samples: Sequence[Sample], name: str, of: Callable[[Daemon], float]) -> Usage:
    values = [of(sample.daemons[name]) for sample in samples]
    half = len(samples) // 2
    window = max(1, half // WINDOWS)
    seen = [(value, sample.when) for value, sample in zip(values, samples, strict=True)]
    least = [min(seen[at : at + window]) for at in range(half, len(samples) - window + 1, window)]
    per_s = slope([when for _, when in least], [value for value, _ in least])
    whole = samples[-1].when - samples[0].when
    per_hour = per_s * 3600 if len(least) > 2 else None
    return Usage(values[0], values[-1], max(values), per_hour, per_s * whole if per_hour else 0.0)
