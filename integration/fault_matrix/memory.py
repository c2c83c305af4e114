# SPDX-License-Identifier: Apache-2.0
"""Processes that get no more memory: a memory control group (v1 or v2) with a small limit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LIMIT = 2 << 20
"""Bytes beyond what the processes have already: CRIU's images of a training job do not fit. Once
those are there the agent needs no more, for its pages lie in a CRIU that was started early."""

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


def unavailable() -> str:
    """Why memory cannot be made scarce on this machine; empty when it can."""
    top = _top()
    if top is None:
        return "no memory controller is mounted below /sys/fs/cgroup"
    return "" if os.access(top, os.W_OK) else f"{top} is not ours to write"


@contextmanager
def scarce(name: str, pids: Iterable[int]) -> Iterator[Callable[[], int]]:
    """Limit processes, and what they start; yields how often the limit was met.

    What they have already counts elsewhere. Afterwards the survivors are where this process is.
    """
    top = _top()
    assert top is not None, unavailable()
    group = top / name
    group.mkdir()
    v1 = top == _V1
    limit = group / ("memory.limit_in_bytes" if v1 else "memory.max")
    try:
        limit.write_text(str(LIMIT))
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))

        def failures() -> int:
            if v1:
                return int((group / "memory.failcnt").read_text())
            events = (group / "memory.events").read_text().split()
            return int(events[events.index("max") + 1])

        yield failures
    finally:
        limit.write_text("-1" if v1 else "max")
        home = _home(top)
        while left := (group / "cgroup.procs").read_text().split():
            for task in left:
                with suppress(ProcessLookupError):
                    (home / "cgroup.procs").write_text(task)
        group.rmdir()


def _top() -> Path | None:
    if (_V1 / "memory.limit_in_bytes").exists():
        return _V1
    controllers = _V2 / "cgroup.subtree_control"
    return _V2 if controllers.exists() and "memory" in controllers.read_text() else None


def _home(top: Path) -> Path:
    """The group of this process."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds == ("memory" if top == _V1 else ""):
            return top / path.lstrip("/")
    return top
