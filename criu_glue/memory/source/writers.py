# SPDX-License-Identifier: Apache-2.0
"""Whether a process's memory may be written past its page tables, which nobody can track.

A device, or the kernel in its stead, that has pages pinned writes to them later, without another
look at the page tables: after they were protected and read, too. Such a process is read again at
the standstill, when nothing is on its way any more.
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
"""File systems that may read straight into memory without being asked to (of FUSE, those mounted
with direct_io). Most that use them do not, so it counts while a thread is in such a call."""
_READS = frozenset({b"0", b"17", b"19", b"295", b"327"})
"""System calls of x86-64: read, pread64, readv, preadv, preadv2."""
_MANY = 4096
"""Descriptors that are looked at."""


def past_page_tables(pid: int) -> str:
    """ "" or why, in words. Raises FileNotFoundError or ProcessLookupError when it has gone.

    What CUDA pins the kernel does not count: who uses a GPU is for others to say.
    """
    if status(pid).get(b"VmPin") != [b"0", b"kB"]:
        return "it has memory pinned for a device"
    if b" /[aio]" in Path(f"/proc/{pid}/maps").read_bytes():
        return "it does asynchronous I/O"
    if _direct(pid):
        return "it does I/O past the page cache (O_DIRECT)"
    return "it reads from a file system that may pass by the page cache" if _reading(pid) else ""


def _reading(pid: int) -> bool:
    """Whether a thread reads at this moment from a file system that may read straight into
    memory."""
    try:
        about = Path(f"/proc/{pid}/mountinfo").read_bytes()
    except OSError as error:  # EINVAL of one that has ended
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
    """Whether a file is open that is read straight into memory."""
    about = f"/proc/{pid}/fdinfo"
    for name in os.listdir(about)[:_MANY]:
        with contextlib.suppress(OSError):
            flags = _FLAGS.search(Path(f"{about}/{name}").read_bytes())
            if flags and int(flags[1], 8) & os.O_DIRECT:
                return True
    return False
