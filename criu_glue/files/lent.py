# SPDX-License-Identifier: Apache-2.0
"""Duplicates a descriptor of another process without opening its file (pidfd_getfd(2)).

Opening the file by /proc/PID/fd would not always work. A socket cannot be opened, opening a pipe
may make us wait, and if a file has a lease (fcntl(2), F_SETLEASE), the kernel signals its holder.
"""

from __future__ import annotations

import ctypes
import os

_PIDFD_GETFD = 438  # on every architecture

_libc = ctypes.CDLL(None, use_errno=True)


def lent(pid: int, fd: int) -> int:
    """A duplicate of ``fd`` of process ``pid``, for the caller to close; raises OSError."""
    pidfd = os.pidfd_open(pid)
    try:
        got = _libc.syscall(_PIDFD_GETFD, pidfd, fd, 0)
        if got < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), f"descriptor {fd} of process {pid}")
        return int(got)
    finally:
        os.close(pidfd)
