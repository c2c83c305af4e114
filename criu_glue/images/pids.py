# SPDX-License-Identifier: Apache-2.0
"""Which ids a capsule's tasks have in its pid namespace, and where CRIU may have its own.

A restore gives every process and thread its old id back. CRIU, its hooks and helpers run in the
same pid namespace, so none of them may have one of those ids. The kernel hands out ids in
ascending order from ``ns_last_pid`` + 1, and after the last one goes on at ``RESERVED``; a capsule
begins above ``room.PID_FLOOR``. So the ids between the two are CRIU's, unless the capsule's ids
have wrapped around: then CRIU gets the end of the widest gap between two of them. What the job
starts until the freeze gets its ids from the beginning of a gap.

The id of a process group or session is in use as long as the group is, whether its leader lives
or not: CRIU makes a helper of that id.
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

from ...errors import LiveshiftError
from ..capsule.room import PID_FLOOR, Room, enter
from .image_kinds import ImageFile
from .protobuf import Message

RESERVED = 300
"""Ids below this one are not given out again after a wrap (kernel: pid.c, RESERVED_PIDS)."""

WINDOW = PID_FLOOR - RESERVED
"""Ids in a row that CRIU is given. A restore takes about 15, and ending a failed one up to 100."""

LEAST = 200
"""With fewer ids in a row than this a restore is not tried."""

LARGEST = 1 << 22
"""``pid_max`` of a new pid namespace since Linux 6.14 (PID_MAX_LIMIT on 64 bits); earlier kernels
have one ``pid_max`` for all namespaces."""

LAST_PID = "/proc/sys/kernel/ns_last_pid"
_PGID, _SID = 2, 3  # fields of proc(5) stat, counted from the state


def limit() -> int:
    """The id at which those of a room on this host wrap around."""
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    if version and (int(version[1]), int(version[2])) >= (6, 14):
        return LARGEST
    return int(Path("/proc/sys/kernel/pid_max").read_text())


def in_use(room: Room) -> tuple[int, ...]:
    """Ids of all threads, process groups and sessions of the room but process 1, ascending."""
    proc, found = room.root / "proc", set[int]()
    for name in filter(str.isdigit, os.listdir(proc)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            stat = (proc / name / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            found.update((int(stat[_PGID]), int(stat[_SID])))
            found.update(map(int, os.listdir(proc / name / "task")))
    return tuple(sorted(filter(_is_id, found)))


def of_image(images: Path) -> set[int]:
    """The ids that a restore of the image needs."""
    found: set[int] = set()
    for raw in ImageFile(images / "pstree.img").entries:
        task = Message(raw)  # criu: images/pstree.proto
        found.update(task.uint(number) for number in (1, 3, 4))
        found.update(task.uints(5))
    return set(filter(_is_id, found))


def _is_id(number: int) -> bool:
    """Process 1 is the room's; a task that is just ending has group and session -1 (proc(5))."""
    return 1 < number < LARGEST


def place(taken: Iterable[int], end: int) -> int | None:
    """What ``ns_last_pid`` must be for CRIU to get none of the ids in ``taken``.

    ``end``: the room's :func:`limit`. None where one of them is not below it, or no ``LEAST`` ids
    in a row are free.
    """
    ids = sorted(i for i in taken if i >= RESERVED)
    if ids and ids[-1] >= end:
        return None
    if not ids or ids[0] > PID_FLOOR:
        return RESERVED
    ring = end - RESERVED  # after the last id the first one follows
    gaps = [(b - a - 1, b) for a, b in itertools.pairwise([*ids, ids[0] + ring])]
    width, behind = max(gaps)
    if width < LEAST:
        return None
    last = behind - min(width, WINDOW) - 1
    return last if last < end else last - ring


def within_reach(last: int, end: int, ids: Iterable[int]) -> list[int]:
    """Which of some ids CRIU may have got with ``ns_last_pid`` set to ``last``, ascending."""
    ring = end - RESERVED
    return sorted(i for i in ids if i >= RESERVED and 0 < (i - last) % ring <= WINDOW)


def highest(taken: Iterable[int]) -> int:
    """What ``ns_last_pid`` is to be once the tree runs: new ids go on above all others."""
    return max(taken, default=PID_FLOOR)


def set_last(room: Room, last: int) -> None:
    """Set ``ns_last_pid`` of the room; raises LiveshiftError."""
    script = [*enter(room, "--pid"), "sh", "-c", f"echo {last} > {LAST_PID}"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LiveshiftError(f"cannot set {LAST_PID} of {room.plan.hostname}: {done.stderr}")
