# SPDX-License-Identifier: Apache-2.0
"""Finds out whether a process's memory may be written past its page tables.

A device that has pages pinned, or the kernel for it, writes to them later without the page tables.
It can do so also after the tracker has protected and read the pages, and the tracker does not see
such a write. So the tracker reads such a process again at the freeze, when no I/O is under way any
more.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from .proc import status

_FLAGS = re.compile(rb"^flags:\s+([0-7]+)$", re.MULTILINE)
_MOUNT = re.compile(rb"^mnt_id:\s+(\d+)$", re.MULTILINE)
_PAST_CACHE = (b"fuse", b"virtiofs", b"9p", b"cifs", b"smb3")
"""These file systems may read straight into a process's memory, also without O_DIRECT (FUSE does
so if it is mounted with direct_io). Most processes that use them are not affected. So a process
counts only while one of its threads is in such a read."""
_READS = frozenset({b"0", b"17", b"19", b"295", b"327"})
"""The system calls of x86-64 that read: read, pread64, readv, preadv, preadv2."""
_MANY = 4096
"""At most this many descriptors of a process are examined."""


def past_page_tables(pid: int) -> str:
    """Return why the process's memory may be written past its page tables, in words, or "".

    The kernel does not count memory that CUDA pins, so the caller must know which processes use a
    GPU. Raises FileNotFoundError or ProcessLookupError when the process has ended.
    """
    if status(pid).get(b"VmPin") != [b"0", b"kB"]:
        return "it has memory pinned for a device"
    if b" /[aio]" in Path(f"/proc/{pid}/maps").read_bytes():
        return "it does asynchronous I/O"
    if _direct(pid):
        return "it does I/O past the page cache (O_DIRECT)"
    return "it reads from a file system that may pass by the page cache" if _reading(pid) else ""


def _reading(pid: int) -> bool:
    """Whether a thread is now in a read from a file system that may read straight into memory."""
    try:
        about = Path(f"/proc/{pid}/mountinfo").read_bytes()
    except OSError as error:  # EINVAL: the process has ended
        raise ProcessLookupError(error.errno, "it has ended", str(pid)) from error
    mounts = {
        line.split(b" ", 1)[0]
        for line in about.splitlines()
        if line.partition(b" - ")[2].startswith(_PAST_CACHE)
    }
    for tid in os.listdir(f"/proc/{pid}/task") if mounts else ():
        with contextlib.suppress(OSError):
            call = Path(f"/proc/{pid}/task/{tid}/syscall").read_bytes().split()
            if call[0] in _READS:
                about = Path(f"/proc/{pid}/fdinfo/{int(call[1], 16)}").read_bytes()
                if (found := _MOUNT.search(about)) and found[1] in mounts:
                    return True
    return False


def _direct(pid: int) -> bool:
    """Whether the process has a file open with O_DIRECT, which reads straight into memory."""
    about = f"/proc/{pid}/fdinfo"
    for name in os.listdir(about)[:_MANY]:
        with contextlib.suppress(OSError):
            flags = _FLAGS.search(Path(f"{about}/{name}").read_bytes())
            if flags and int(flags[1], 8) & os.O_DIRECT:
                return True
    return False
