# SPDX-License-Identifier: Apache-2.0
"""The kernel: what CRIU and capsules need of it, found by doing it rather than by its config."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from .finding import Finding, Verdict, attempt

MINIMUM = (5, 9)
"""close_range, which empties a capsule of inherited descriptors, came with 5.9; time namespaces,
without which a moved rank's CLOCK_MONOTONIC jumps, with 5.6."""

NAMESPACES = ("pid", "mount", "uts", "ipc", "net", "time")

# asm/unistd.h, linux/userfaultfd.h, linux/fs.h: for what Python has no name.
_SYS_USERFAULTFD = {"x86_64": 323, "aarch64": 282}
_UFFD_API = 0xAA
_UFFDIO_API = 0xC018AA3F
_UFFD_FEATURE_WP_ASYNC = 1 << 15
_PAGEMAP_SCAN = 0xC0606610
_SCAN_ARGUMENT = "12Q"


def release() -> Iterator[Finding]:
    """The kernel's version."""
    found = platform.release()
    match = re.match(r"(\d+)\.(\d+)", found)
    new_enough = match is not None and (int(match[1]), int(match[2])) >= MINIMUM
    yield Finding(
        "kernel",
        f"Linux {found}, {platform.machine()}",
        f"Linux {MINIMUM[0]}.{MINIMUM[1]} or newer",
        Verdict.OK if new_enough else Verdict.FAIL,
        "" if new_enough else "boot a newer kernel",
    )


def checkpoint_restore() -> Iterator[Finding]:
    """CONFIG_CHECKPOINT_RESTORE, by two files that exist only with it."""
    needed = "CONFIG_CHECKPOINT_RESTORE"
    places = (Path("/proc/self/map_files"), Path("/proc/sys/kernel/ns_last_pid"))
    missing = [str(place) for place in places if not place.exists()]
    yield Finding(
        "checkpoint/restore",
        f"{' and '.join(missing)} missing" if missing else "map_files, ns_last_pid",
        needed,
        Verdict.FAIL if missing else Verdict.OK,
        f"boot a kernel built with {needed}=y (the distributions' are)" if missing else "",
    )


def namespaces() -> Iterator[Finding]:
    """Every namespace of a capsule, all at once in a child that ends at once."""
    needed = f"{', '.join(NAMESPACES)} namespaces"
    trouble = attempt("unshare", "--fork", *(f"--{kind}" for kind in NAMESPACES), "true")
    if trouble is None:
        yield Finding("namespaces", "made all of them", needed, Verdict.OK)
        return
    kinds_by_reason: dict[str, list[str]] = {}
    for kind in NAMESPACES:
        reason = attempt("unshare", "--fork", f"--{kind}", "true")
        if reason is not None:
            kinds_by_reason.setdefault(reason, []).append(kind)
    refused = [f"{', '.join(kinds)}: {reason}" for reason, kinds in kinds_by_reason.items()]
    yield Finding(
        "namespaces",
        "; ".join(refused) or trouble,
        needed,
        Verdict.FAIL,
        "run as root, outside of containers that forbid namespaces; unshare is in util-linux",
    )


def write_tracking() -> Iterator[Finding]:
    """userfaultfd's asynchronous write protection and PAGEMAP_SCAN (6.7), for pre-copy."""
    tried = {"userfaultfd WP_ASYNC": _try_write_protection(), "PAGEMAP_SCAN": _try_pagemap_scan()}
    missing = [f"{name}: {trouble}" for name, trouble in tried.items() if trouble is not None]
    yield Finding(
        "write tracking",
        "; ".join(missing) or ", ".join(tried),
        "optional: pre-copy, Linux 6.7 or newer",
        Verdict.WARN if missing else Verdict.OK,
        "jobs move without it, but stand still for longer" if missing else "",
    )


def _try_write_protection() -> str | None:
    number = _SYS_USERFAULTFD.get(platform.machine())
    if number is None:
        return f"not tried on {platform.machine()}"
    fd = ctypes.CDLL(None, use_errno=True).syscall(number, os.O_CLOEXEC | os.O_NONBLOCK)
    if fd < 0:
        return os.strerror(ctypes.get_errno())
    try:
        # With no feature asked for, the kernel answers with all that it has.
        answer = fcntl.ioctl(fd, _UFFDIO_API, struct.pack("3Q", _UFFD_API, 0, 0))
    except OSError as error:
        return error.strerror
    finally:
        os.close(fd)
    features: int = struct.unpack("3Q", answer)[1]
    return None if features & _UFFD_FEATURE_WP_ASYNC else "not in this kernel"


def _try_pagemap_scan() -> str | None:
    # A scan of no range for no category: ENOTTY where the kernel doesn't know the request.
    argument = struct.pack(_SCAN_ARGUMENT, struct.calcsize(_SCAN_ARGUMENT), *([0] * 11))
    try:
        with open("/proc/self/pagemap", "rb") as pagemap:
            fcntl.ioctl(pagemap, _PAGEMAP_SCAN, bytearray(argument))
    except OSError as error:
        return "not in this kernel" if error.errno == errno.ENOTTY else error.strerror
    return None
