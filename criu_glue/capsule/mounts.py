# SPDX-License-Identifier: Apache-2.0
"""The kind of place where a file of a capsule lies, which decides what a move does with the file.

A listed path covers all files below it on its own file system, but not on mounts below it, as
``du -x`` and ``find -xdev`` do. The longest listed path wins.
"""

from __future__ import annotations

import enum
import errno
import os
import re
from dataclasses import dataclass

from ... import proc_text
from .sandboxes import PRIVATE

PSEUDO = frozenset(
    [
        "proc",
        "sysfs",
        "devtmpfs",
        "devpts",
        "cgroup",
        "cgroup2",
        "mqueue",
        "nsfs",
        "tracefs",
        "debugfs",
        "securityfs",
        "bpf",
        "binfmt_misc",
        "configfs",
        "pstore",
    ]
)


class PathKind(enum.Enum):
    """The kinds of place; each decides what a move does with a file there."""

    PRIVATE = "private"  # the capsule's own /tmp and /dev/shm: both move as a whole
    SHARED = "shared"  # listed under files.shared: left alone
    CARRIED = "carried"  # listed under files.carried: the listed directory moves as a whole
    LOCAL = "local"  # unlisted, on the root file system: only files open for writing move
    FOREIGN = "foreign"  # unlisted, on another file system: not touched, not moved
    PSEUDO = "pseudo"  # /proc, /sys and the like: the kernel of the destination has its own


@dataclass(frozen=True)
class Mount:
    """A line of /proc/PID/mountinfo (proc(5)): the directory ``root`` of a file system appears at
    ``point``; ``device`` is the file system's major:minor."""

    device: str
    root: str
    point: str
    kind: str
    source: str


Mounts = dict[int, Mount]
"""Mount id → mount."""


def mount_table(pid: int | str) -> Mounts:
    """The mounts as task ``pid`` sees them. Raises FileNotFoundError or ProcessLookupError
    if the task has ended, also if it is still a zombie."""
    table: Mounts = {}
    try:
        lines = proc_text.lines(f"/proc/{pid}/mountinfo")
    except OSError as error:
        if error.errno == errno.EINVAL:  # a zombie is in no mount namespace any more
            raise ProcessLookupError(errno.ESRCH, "it has ended", str(pid)) from error
        raise
    for line in lines:
        left, right = line.split(" - ", 1)
        number, _, device, root, point, *_ = left.split()
        kind, source, *_ = (*right.split(" "), "")
        table[int(number)] = Mount(
            device, _unescape(root), _unescape(point), kind, _unescape(source)
        )
    return table


@dataclass(frozen=True)
class Placement:
    """The cluster file's ``files`` section, as lists of absolute paths."""

    shared: tuple[str, ...]
    carried: tuple[str, ...]

    def of_path(self, path: str, mounts: Mounts) -> PathKind:
        """Like :meth:`of_open_file`, for a file that need not be open."""
        return self.of_open_file(path, mount_of(path, mounts))

    def of_open_file(self, path: str, mount: Mount) -> PathKind:
        if mount.kind in PSEUDO:
            return PathKind.PSEUDO
        listed = [
            (len(prefix), place)
            for prefixes, place in (
                (self.shared, PathKind.SHARED),
                (self.carried, PathKind.CARRIED),
            )
            for prefix in prefixes
            if below(path, prefix) and (mount.point == prefix or below(prefix, mount.point))
        ]
        private = [(len(p) - 1, PathKind.PRIVATE) for p in PRIVATE if path.startswith(p)]
        if best := max(listed + private, key=lambda entry: entry[0], default=None):
            return best[1]
        return PathKind.LOCAL if mount.point == "/" else PathKind.FOREIGN


def mount_of(path: str, mounts: Mounts) -> Mount:
    """The mount with the longest mount point above an absolute path."""
    above = (mount for mount in mounts.values() if below(path, mount.point))
    return max(above, key=lambda mount: len(mount.point))


def below(path: str, prefix: str) -> bool:
    """Whether an absolute path is ``prefix`` or lies below it."""
    return prefix == "/" or path == prefix or path.startswith(prefix.rstrip("/") + "/")


def _unescape(text: str) -> str:
    raw = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), os.fsencode(text))
    return os.fsdecode(raw)
