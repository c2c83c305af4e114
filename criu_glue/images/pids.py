# SPDX-License-Identifier: Apache-2.0
"""The ids of a capsule's tasks in its pid namespace, and the ids that CRIU may use there.

A restore gives every process and thread its old id back. CRIU, its hooks and helpers run in the
same pid namespace, so none of them may have one of those ids. The kernel gives out ids in
ascending order from ``ns_last_pid`` + 1, and after the last one goes on at ``RESERVED``. A capsule
begins above ``sandboxes.PID_FLOOR``, so the ids between the two are CRIU's. If the capsule's ids
have wrapped around, CRIU gets the end of the widest gap between two of them. The processes that the
job starts before the freeze take their ids from the beginning of a gap.

The id of a process group or session is in use as long as the group exists, even after its leader
has ended, because CRIU makes a helper with that id.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from ... import proc_text
from ...errors import LiveshiftError
from ..capsule.sandboxes import PID_FLOOR, Sandbox, enter
from .image_kinds import ImageFile
from .protobuf import ProtobufMessage

RESERVED = 300
"""The kernel gives out no ids below this one after a wrap (kernel: pid.c, RESERVED_PIDS)."""

WINDOW = PID_FLOOR - RESERVED
"""CRIU gets this many ids in a row. A restore takes about 15 of them, and ending a failed restore
up to 100."""

LEAST = 200
"""A restore is not tried with fewer free ids in a row than this."""

LARGEST = 1 << 22
"""The ``pid_max`` of a new pid namespace since Linux 6.14 (PID_MAX_LIMIT on 64 bits). Earlier
kernels have one ``pid_max`` for all namespaces."""

LAST_PID = "/proc/sys/kernel/ns_last_pid"
_PGID, _SID = 2, 3  # fields of proc(5) stat, counted from the state


def limit() -> int:
    """The id at which the ids of a sandbox on this host wrap around."""
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    if version and (int(version[1]), int(version[2])) >= (6, 14):
        return LARGEST
    return int(Path("/proc/sys/kernel/pid_max").read_text())


def in_use(sandbox: Sandbox) -> tuple[int, ...]:
    """The ids of all threads, process groups and sessions of the sandbox, ascending, without 1."""
    proc, found = sandbox.root / "proc", set[int]()
    for name in filter(str.isdigit, os.listdir(proc)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            stat = proc_text.read(proc / name / "stat").rpartition(")")[2].split()
            found.update((int(stat[_PGID]), int(stat[_SID])))
            found.update(map(int, os.listdir(proc / name / "task")))
    return tuple(sorted(filter(_is_id, found)))


def of_image(images: Path) -> set[int]:
    """The ids that a restore of the image needs."""
    found: set[int] = set()
    for raw in ImageFile(images / "pstree.img").entries:
        task = ProtobufMessage(raw)  # criu: images/pstree.proto
        found.update(task.uint(number) for number in (1, 3, 4))
        found.update(task.uints(5))
    return set(filter(_is_id, found))


def _is_id(number: int) -> bool:
    """False for process 1, which is the sandbox's, and for -1, the group and session of a task that
    is just ending (proc(5))."""
    return 1 < number < LARGEST


def place(taken: Iterable[int], end: int) -> int | None:
    """The ``ns_last_pid`` with which CRIU gets none of the ids in ``taken``.

    ``end`` is the sandbox's :func:`limit`. Returns None if a taken id is not below it, or if fewer
    than ``LEAST`` ids in a row are free.
    """
    ids = sorted(i for i in taken if i >= RESERVED)
    if ids and ids[-1] >= end:
        return None
    if not ids or ids[0] > PID_FLOOR:
        return RESERVED
    ring = end - RESERVED  # ids form a ring: RESERVED follows the last one
    gaps = [(b - a - 1, b) for a, b in itertools.pairwise([*ids, ids[0] + ring])]
    width, behind = max(gaps)
    if width < LEAST:
        return None
    last = behind - min(width, WINDOW) - 1
    return last if last < end else last - ring


def within_reach(last: int, end: int, ids: Iterable[int]) -> list[int]:
    """Those of ``ids`` that CRIU may get with ``ns_last_pid`` set to ``last``, ascending."""
    ring = end - RESERVED
    return sorted(i for i in ids if i >= RESERVED and 0 < (i - last) % ring <= WINDOW)


def highest(taken: Iterable[int]) -> int:
    """The ``ns_last_pid`` for the running tree: new ids then come after all existing ones."""
    return max(taken, default=PID_FLOOR)


def set_last(sandbox: Sandbox, last: int) -> None:
    """Set ``ns_last_pid`` of the sandbox; raises LiveshiftError."""
    script = [*enter(sandbox, "--pid"), "sh", "-c", f"echo {last} > {LAST_PID}"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LiveshiftError(f"cannot set {LAST_PID} of {sandbox.plan.hostname}: {done.stderr}")
