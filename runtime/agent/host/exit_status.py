# SPDX-License-Identifier: Apache-2.0
"""The exit status of a process that is not our child, from its pidfd."""

from __future__ import annotations

import fcntl
import struct

from .... import proc_text

INFO = struct.Struct("=QQ11Ii")
"""struct pidfd_info of include/uapi/linux/pidfd.h, up to ``exit_code``: mask, cgroupid, eleven
numbers of pids and users, exit_code."""

GET_INFO = 3 << 30 | INFO.size << 16 | 0xFF << 8 | 11
"""PIDFD_GET_INFO of that file: _IOWR(0xFF, 11, struct pidfd_info)."""

HAS_EXIT = 1 << 3
"""PIDFD_INFO_EXIT (Linux 6.15): set in the answer once the process was waited for."""

STAT_EXIT = 52
"""The field exit_code of /proc/PID/stat (proc_pid_stat(5)), as waitpid(2) would return it."""


def exit_status(pidfd: int, pid: int) -> int | None:
    """The status of a process that has ended, as waitpid(2) returns it; None if it is not known.

    A zombie shows it in /proc. Once its parent has waited for it, the pidfd alone does, from Linux
    6.15 on. ``pid``: as this host sees it; nothing else can have it before the parent has waited.
    """
    for look in (_of_reaped(pidfd), _of_zombie(pid), _of_reaped(pidfd)):
        if look is not None:
            return look
    return None


def _of_reaped(pidfd: int) -> int | None:
    raw = bytearray(INFO.size)
    struct.pack_into("=Q", raw, 0, HAS_EXIT)
    try:
        fcntl.ioctl(pidfd, GET_INFO, raw)
    except OSError:  # ENOTTY, EINVAL: the kernel is older; ESRCH: it was not waited for yet
        return None
    mask, *_, status = INFO.unpack(raw)
    return int(status) if mask & HAS_EXIT else None


def _of_zombie(pid: int) -> int | None:
    try:
        fields = proc_text.read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[STAT_EXIT - 3]) if fields[0] == "Z" else None
