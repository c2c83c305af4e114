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
    return "it does I/O past the page cache (O_DIRECT)" if _direct(pid) else ""


def _direct(pid: int) -> bool:
    """Whether a file is open that is read straight into memory."""
    about = f"/proc/{pid}/fdinfo"
    for name in os.listdir(about)[:_MANY]:
        with contextlib.suppress(OSError):
            flags = _FLAGS.search(Path(f"{about}/{name}").read_bytes())
            if flags and int(flags[1], 8) & os.O_DIRECT:
                return True
    return False
