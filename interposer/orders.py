# SPDX-License-Identifier: Apache-2.0
"""Writes the agent's part of a page: the gate's orders and targets. Then wakes the waiting threads.

The agent writes by pwrite: the job's user owns the file and may truncate it, and access to a
mapping without a file behind it would kill the agent. It maps the page only for FUTEX_WAKE: there
the kernel looks the address up without touching it, and returns EFAULT if nothing is behind it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import stat
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

from . import layout
from .layout import WantedState, check_of
from .page import PageError, PageFile

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_WAKE = 1
_libc = ctypes.CDLL(None, use_errno=True)


class OrderedPage(PageFile):
    """A page that this process gives orders to. One writer at a time.

    ``inode``: device and inode of the file. A program that was exec'ed has another file of the same
    name.
    """

    def __init__(self, fd: int, path: Path, inode: tuple[int, int] = (0, 0)) -> None:
        super().__init__(fd, path)
        self.inode = inode
        seen = self.order()
        self._attempt, self._version = seen["attempt"], seen["version"]
        self._heartbeat = seen["heartbeat"]

    @property
    def replaced(self) -> bool:
        """Whether the file has no name any more: another page took its place, or the file was
        removed."""
        try:
            return os.fstat(self.fd).st_nlink == 0
        except OSError:
            return True

    def arm(self, attempt: int, lease_ms: int, limit_ms: int) -> None:
        """Close the gate: from now on new operations wait for targets."""
        self._write_order("lease_ms", lease_ms)
        self._write_order("limit_ms", limit_ms)
        self.set_missing_clocks(())
        self.heartbeat()
        self.give(WantedState.ARMED, attempt, 0)

    def give(self, want: WantedState, attempt: int, version: int) -> None:
        """Give an order. The caller must have written its targets or rebuild ids before."""
        self._attempt, self._version = attempt, version
        # A thread sees from `want` at once whether the gate is closed. It believes the three
        # numbers only if `check` fits them.
        for name, value in (("attempt", attempt), ("version", version), ("want", want)):
            self._write_order(name, value)
        self._write_order("check", check_of(want, attempt, version))
        self._wake()

    def open(self) -> None:
        """Let operations pass again."""
        self.give(WantedState.OPEN, self._attempt, self._version)

    def heartbeat(self) -> None:
        """Give a sign of life. Without it, threads at the gate open the gate after the lease."""
        self._heartbeat = (self._heartbeat + 1) & 0xFFFFFFFF
        self._write_order("heartbeat", self._heartbeat)

    def set_targets(self, targets: Mapping[int, int]) -> None:
        """Write targets by clock row. Call it before the order that names their version."""
        offset = layout.CLOCK.offsets["target"]
        for row, target in targets.items():
            self._write(layout.CLOCKS_AT + row * layout.CLOCK.size + offset, "<Q", target)

    def set_missing_clocks(self, missing: Iterable[tuple[int, int, int]]) -> None:
        """Write id, target and communicator's row of clocks that the process does not have yet.
        Call it before the order. If there are more than layout.MISSING_CLOCKS, the later ones must
        wait until the process has made the others."""
        meant = list(missing)[: layout.MISSING_CLOCKS]
        for n, clock in enumerate(meant):
            self._write(layout.MISSING_CLOCKS_AT + n * layout.MISSING_CLOCK.size, "<QQI", *clock)
        self._write_order("missing_count", len(meant))

    def set_rebuild(self, row: int, order: int, unique_id: bytes) -> None:
        """Write the unique id with which a communicator must be rebuilt, and its place in the
        order."""
        at = layout.COMMUNICATORS_AT + row * layout.COMMUNICATOR.size
        self._write(at + layout.COMMUNICATOR.offsets["rebuild_id"], "128s", unique_id)
        self._write(at + layout.COMMUNICATOR.offsets["rebuild_order"], "<I", order)

    def _write_order(self, name: str, value: int) -> None:
        self._write(layout.ORDER_AT + layout.ORDER.offsets[name], "<I", value)

    def _write(self, at: int, code: str, *values: int | bytes) -> None:
        try:
            os.pwrite(self.fd, struct.pack(code, *values), at)
        except OSError as error:
            raise PageError(f"cannot write to the page {self.path}: {error.strerror}") from error

    def _wake(self) -> None:
        if _FUTEX is None:  # threads at the gate look every 20 ms anyhow
            return
        # Map it for this moment only: each mmap object keeps a descriptor of its own open.
        try:
            header = mmap.mmap(self.fd, mmap.PAGESIZE)
        except (OSError, ValueError):  # its owner has cut it short
            return
        with header:
            at = layout.ORDER_AT + layout.ORDER.offsets["check"]
            check = ctypes.c_uint32.from_buffer(header, at)
            _libc.syscall(_FUTEX, ctypes.byref(check), _FUTEX_WAKE, 0x7FFFFFFF, None, None, 0)
            del check


def open_ordered(path: Path, directory_fd: int) -> OrderedPage:
    """Open ``path.name`` in the directory. Raises FileNotFoundError, PageError.

    The job's user could put a link of either kind there, or mount a file of another file system, so
    that root writes elsewhere. This refuses such files.
    """
    try:
        fd = os.open(
            path.name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory_fd
        )
    except FileNotFoundError:
        raise
    except OSError as error:
        raise PageError(f"cannot open the page {path}: {error.strerror}") from error
    try:
        seen = os.fstat(fd)
        if not stat.S_ISREG(seen.st_mode) or seen.st_nlink != 1:
            raise PageError(f"{path} is not a page of the interposer: not a file of its own")
        if seen.st_dev != os.fstat(directory_fd).st_dev or seen.st_size < layout.HEADER_SIZE:
            raise PageError(f"{path} is not a page of the interposer")
        return OrderedPage(fd, path, (seen.st_dev, seen.st_ino))
    except BaseException:
        os.close(fd)
        raise
