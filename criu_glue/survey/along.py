# SPDX-License-Identifier: Apache-2.0
"""Measures a directory that moves with a capsule, and finds out which directory it really is."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from ..capsule.mounts import mount_table
from ..files import below, sparse, statx, trees, walking
from .found import Along

RECENT_S = 2.0
"""A file that was written in the last RECENT_S seconds will probably change again and be sent
twice."""

NETWORK = frozenset(
    ["nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "fuse.glusterfs"]
)
"""Types of file systems whose mount source means the same directory on every host."""


def measure(path: str, top: Path) -> Along:
    """Count and measure the files below ``top``; all counts are 0 if there is no such directory."""
    files = size = recent = 0
    since_ns = (time.time() - RECENT_S) * 1e9
    for name, s in walking.walk(top):
        files += 1
        if not stat.S_ISREG(s.mode):
            continue
        sent = s.size if s.blocks * 512 >= s.size else min(s.size, _data(top, name))
        size += sent
        recent += sent if s.mtime_ns > since_ns else 0
    return Along(path, files, size, recent, place_of(top) if files else ("", ""))


def size_of(paths: Iterable[str]) -> int:
    """Bytes to send for single files, without holes; a file that is gone counts 0."""
    return sum(_data(Path("/"), path.lstrip("/")) for path in paths)


def _data(top: Path, name: str) -> int:
    try:
        with trees.open_file(top, name) as file:
            return sparse.Packed(file).size
    except below.GONE:
        return 0


def place_of(path: Path) -> tuple[str, str]:
    """(file system, directory in it). Two are equal only for the same directory, on any host and
    by any mount. Raises OSError."""
    mount = mount_table("self").get(statx.stat(path).mount)
    if mount is None:
        raise OSError(errno.ESTALE, "its mount has just gone", str(path))
    inside = os.path.relpath(os.path.realpath(path), mount.point)
    within = os.path.normpath(f"/{mount.root}/{inside}")
    if mount.kind in NETWORK:
        return mount.kind, os.path.normpath(f"{mount.source}/{within}")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {mount.device}", within.replace("//", "/")


def overlap(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """True if two places are the same directory, or one contains the other."""
    if one[0] != other[0] or not one[0]:
        return False
    first, second = sorted((f"{one[1].rstrip('/')}/", f"{other[1].rstrip('/')}/"), key=len)
    return second.startswith(first)
