# SPDX-License-Identifier: Apache-2.0
"""The capsule's user, and work that root does with no more rights to files than that user has.

The destination acts on what the source sends for a capsule with the rights of the capsule's user.
So the kernel decides what is allowed, not a list of ours.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from ...errors import LiveshiftError

T = TypeVar("T")

_SETGROUPS = {"x86_64": 116, "aarch64": 159}.get(platform.machine(), -1)
"""The number of the setgroups system call. We do not use the C library's function, because it
changes all threads of a process."""

_FACCESSAT2 = 439  # on every architecture
_AT_EACCESS, _AT_EMPTY_PATH = 0x200, 0x1000  # linux/fcntl.h

_libc = ctypes.CDLL(None, use_errno=True)
_libc.setfsuid.restype = _libc.setfsgid.restype = ctypes.c_uint32


@dataclass(frozen=True)
class User:
    """The user of a capsule; ``groups`` are the supplementary groups."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()

    @property
    def is_root(self) -> bool:
        return self.uid == 0

    def is_in(self, gid: int) -> bool:
        return gid == self.gid or gid in self.groups


def become(user: User) -> None:
    """Give the calling thread the user's rights to files, for the rest of its life.

    Raises LiveshiftError if that is not possible. If the user is root, nothing changes.
    """
    if user.is_root:
        return
    groups = (ctypes.c_uint32 * len(user.groups))(*user.groups)
    if _libc.syscall(_SETGROUPS, ctypes.c_size_t(len(user.groups)), groups) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise LiveshiftError(f"cannot act with the groups of user {user.uid}: {reason}")
    # Both return the previous id. When the id changes from root, the kernel takes away the rights
    # to other users' files (capabilities(7)).
    _libc.setfsgid(user.gid)
    _libc.setfsuid(user.uid)
    if (_libc.setfsuid(-1), _libc.setfsgid(-1)) != (user.uid, user.gid):
        raise LiveshiftError(f"cannot act as user {user.uid}, group {user.gid}")


def may(fd: int, mode: int) -> bool:
    """True if the calling thread may use a descriptor's file; ``mode``: os.R_OK, W_OK, X_OK.

    faccessat2(2) (Linux 5.8) with the thread's own file rights, not those of the process.
    """
    return bool(_libc.syscall(_FACCESSAT2, fd, b"", mode, _AT_EMPTY_PATH | _AT_EACCESS) == 0)


def acting_as(user: User, work: Callable[[], T]) -> T:
    """Do ``work`` in a thread with the user's rights to files; return or raise what it does."""

    def run() -> T:
        become(user)
        return work()

    with ThreadPoolExecutor(1, "as-user") as thread:
        return thread.submit(run).result()
