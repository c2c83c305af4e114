# SPDX-License-Identifier: Apache-2.0
"""Instructions that this process and its threads have executed in user mode: perf_event_open(2).

Unlike time they hardly depend on what else the machine does.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_SYSCALL = {"x86_64": 298, "aarch64": 241}
_SIZE = 64  # PERF_ATTR_SIZE_VER0
_HARDWARE, _INSTRUCTIONS = 0, 1
_INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6


class UserInstructions:
    """Counts from its making on, threads included that are started later. Where the machine has no
    such counter, or does not give it to us, ``read`` gives 0."""

    def __init__(self) -> None:
        flags = _INHERIT | _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR
        attributes = struct.pack("<IIQQQQQ", _HARDWARE, _SIZE, _INSTRUCTIONS, 0, 0, 0, flags)
        number = _SYSCALL.get(platform.machine())
        self._fd = -1
        if number is not None:
            libc = ctypes.CDLL(None, use_errno=True)
            buffer = ctypes.create_string_buffer(attributes.ljust(_SIZE, b"\0"), _SIZE)
            self._fd = libc.syscall(number, buffer, 0, -1, -1, 0)

    def read(self) -> int:
        if self._fd < 0:
            return 0
        (count,) = struct.unpack("<Q", os.read(self._fd, 8))
        return int(count)
