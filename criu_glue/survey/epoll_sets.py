# SPDX-License-Identifier: Apache-2.0
"""Takes entries that CRIU cannot dump out of epoll sets for the time of a move.

An epoll set holds files by (file, descriptor's number). If a process closes the descriptor while
another process still has the file, the entry stays in the set. That happens after a fork, or when
the file was passed on. CRIU dumps a set from the first process that has it, and only if each file
of the set is open under its number in that process (criu: eventpoll.c,
flush_eventpoll_dinfo_queue).

epoll_ctl(2) looks up the number in its caller's descriptor table, so the caller may be another
process. A thread of ours with its own table duplicates the set and the file (pidfd_getfd(2)), gives
the file the number and takes the entry out, while the tree runs. In the same way we put the entry
back before the tree goes on, here or at the destination. The kernel then checks whether the file is
ready, so no event is lost.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from ... import proc_text
from ..capsule.tree import descriptors
from ..files.lent import lent

_KCMP = {"x86_64": 312, "aarch64": 272}.get(platform.machine(), -1)
_FILE, _EPOLL_TFD = 0, 7  # linux/kcmp.h
_CLONE_FILES = 0x400
_ADD, _DEL = 1, 2
_SET = "anon_inode:[eventpoll]"
_LINE = re.compile(
    r"^tfd: +(\d+) events: +([0-9a-f]+) data: +([0-9a-f]+) .*ino:([0-9a-f]+) sdev:([0-9a-f]+)", re.M
)
"""A line of an epoll set's fdinfo (kernel: fs/eventpoll.c, ep_show_fdinfo)."""

_libc = ctypes.CDLL(None, use_errno=True)


class _Slot(ctypes.Structure):
    _fields_ = (("set", ctypes.c_uint32), ("number", ctypes.c_uint32), ("which", ctypes.c_uint32))


class _Event(ctypes.Structure):
    _pack_ = 1 if platform.machine() == "x86_64" else 0
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


@dataclass(frozen=True)
class EpollEntry:
    """An entry that CRIU cannot dump; pids are the capsule's.

    The set is descriptor ``epoll`` of process ``owner``. Under ``number`` it holds the file that
    process ``holder`` has open as ``held``; ``inode`` is the file's inode at the source.
    """

    owner: int
    epoll: int
    number: int
    holder: int
    held: int
    inode: int
    events: int
    data: int


def find(tree: Mapping[int, int]) -> tuple[list[EpollEntry], list[tuple[str, str]]]:
    """The entries of a tree that CRIU cannot dump, and the problems that prevent a move.

    A problem is (what prevents the move, what to do), for an entry whose file no process of the
    tree has open. ``tree`` is the result of tree.in_order."""
    found: list[EpollEntry] = []
    problems: dict[tuple[str, str], None] = {}
    files: dict[int, list[tuple[int, int]]] = {}
    for pid, fd, text in _sets(tree):
        seen: dict[int, int] = {}
        for number, events, data, inode, device in _entries(text):
            slot = _Slot(fd, number, seen.get(number, 0))
            seen[number] = slot.which + 1
            if _is(pid, number, pid, slot):
                continue
            files = files or _files(tree)
            has = next((at for at in files.get(inode, ()) if _is(*at, pid, slot)), None)
            if has is not None:
                there = tree[pid], fd, number, tree[has[0]], has[1]
                found.append(EpollEntry(*there, inode, events, data))
            elif os.path.exists(f"/proc/{pid}") and not _has_gone(pid, slot):
                problems[
                    f"process {tree[pid]} ({_name(pid)}) has an epoll set, descriptor {fd}, that"
                    f" still holds descriptor {number}, of a file that no process of the capsule"
                    f" has open any more: {_words(inode, device)}",
                    "have the program take files out of the set before it closes them",
                ] = None
    return found, list(problems)


def take_out(entries: Iterable[EpollEntry], pids: Mapping[int, int]) -> list[EpollEntry]:
    """Take entries out; returns those that existed. ``pids``: the capsule's pid → the host's."""
    return [entry for entry, failed in _change(_DEL, entries, pids) if failed is None]


def put_in(entries: Iterable[EpollEntry], pids: Mapping[int, int]) -> None:
    """Put entries back; raises OSError if that fails. An entry that is in the set already is
    accepted."""
    for _, failed in _change(_ADD, entries, pids):
        if failed is not None and failed.errno != errno.EEXIST:
            raise failed


def unchanged(entries: Iterable[EpollEntry], pids: Mapping[int, int]) -> list[EpollEntry]:
    """The entries whose holder still has the file open; the other files are closed, and the
    kernel has removed their entries."""
    return [entry for entry in entries if _inode(pids.get(entry.holder), entry.held) == entry.inode]


def _name(pid: int) -> str:
    with suppress(OSError):
        return proc_text.read(f"/proc/{pid}/comm").strip()
    return "ended"


def _inode(pid: int | None, fd: int) -> int:
    with suppress(OSError):
        return os.stat(f"/proc/{pid}/fd/{fd}").st_ino
    return 0


def _sets(pids: Iterable[int]) -> Iterator[tuple[int, int, str]]:
    """(pid, descriptor, fdinfo) of each epoll set that is not empty, by the first process that has
    it."""
    seen: dict[str, list[tuple[int, int]]] = {}
    for pid in pids:
        with suppress(OSError):
            for fd, target in descriptors(pid):
                text = ""
                if target == _SET:
                    with suppress(FileNotFoundError):
                        text = proc_text.read(f"/proc/{pid}/fdinfo/{fd}")
                if "tfd:" not in text:
                    continue
                alike = seen.setdefault(text.partition("tfd:")[2], [])
                if not any(_kcmp(pid, other, _FILE, fd, at) == 0 for other, at in alike):
                    alike.append((pid, fd))
                    yield pid, fd, text


def _entries(text: str) -> Iterator[tuple[int, int, int, int, int]]:
    """(number, events, data, inode, device) of each entry in the fdinfo of a set."""
    for number, *others in _LINE.findall(text):
        events, data, inode, device = (int(digits, 16) for digits in others)
        yield int(number), events, data, inode, device


def _words(inode: int, device: int) -> str:
    """The name of a file that no process has open, as /proc/PID/fd would show it.

    Only sockets and pipes have such a name here; others are named by inode and device."""
    major, minor = device >> 20, device & 0xFFFFF  # linux/kdev_t.h
    with socket.socket(socket.AF_UNIX) as ours:
        if os.fstat(ours.fileno()).st_dev == os.makedev(major, minor):
            return f"socket:[{inode}]"
    ends = os.pipe()
    try:
        if os.fstat(ends[0]).st_dev == os.makedev(major, minor):
            return f"pipe:[{inode}]"
    finally:
        for end in ends:
            os.close(end)
    return f"inode {inode} of device {major}:{minor}"


def _files(pids: Iterable[int]) -> dict[int, list[tuple[int, int]]]:
    """Inode → (pid, descriptor) of all descriptors of that file."""
    found: dict[int, list[tuple[int, int]]] = {}
    for pid in pids:
        with suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                if inode := _inode(pid, int(name)):
                    found.setdefault(inode, []).append((pid, int(name)))
    return found


def _is(pid: int, fd: int, owner: int, slot: _Slot) -> bool:
    """True if descriptor ``fd`` of ``pid`` is the file that ``slot`` of ``owner`` holds."""
    return _kcmp(pid, owner, _EPOLL_TFD, fd, ctypes.addressof(slot)) == 0


def _has_gone(pid: int, slot: _Slot) -> bool:
    """True if the set no longer has the entry, because the program has closed the file."""
    failed = _kcmp(pid, pid, _EPOLL_TFD, slot.set, ctypes.addressof(slot)) == -1
    return failed and ctypes.get_errno() == errno.ENOENT


def _kcmp(first: int, second: int, kind: int, a: int, b: int) -> int:
    return int(_libc.syscall(_KCMP, first, second, kind, ctypes.c_ulong(a), ctypes.c_ulong(b)))


def _change(
    what: int, entries: Iterable[EpollEntry], pids: Mapping[int, int]
) -> list[tuple[EpollEntry, OSError | None]]:
    """Change entries in a thread with its own descriptor table, which ends with the thread."""
    done: list[tuple[EpollEntry, OSError | None]] = []
    if wanted := list(entries):

        def work() -> None:
            if _libc.unshare(_CLONE_FILES) != 0:
                raise _error("cannot get a descriptor table of our own")
            for entry in wanted:
                try:
                    _change_one(what, entry, pids)
                    done.append((entry, None))
                except OSError as error:
                    done.append((entry, error))
                except (OverflowError, ValueError, KeyError) as error:
                    done.append((entry, OSError(errno.EINVAL, str(error))))

        with ThreadPoolExecutor(1, "epoll-sets") as thread:
            thread.submit(work).result()
    return done


def _change_one(what: int, entry: EpollEntry, pids: Mapping[int, int]) -> None:
    made = [lent(pids[entry.owner], entry.epoll)]
    try:
        made.append(lent(pids[entry.holder], entry.held))
        if entry.number in made[:1]:  # dup2 must not overwrite our descriptor of the set
            made.insert(0, os.dup(made[0]))
        if made[-1] != entry.number:
            made.append(os.dup2(made[-1], entry.number, inheritable=False))
        event = _Event(entry.events, entry.data)
        if _libc.epoll_ctl(made[0], what, entry.number, ctypes.byref(event)) != 0:
            raise _error(f"descriptor {entry.number} of process {entry.owner}'s epoll set")
    finally:
        for fd in set(made):
            os.close(fd)


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), what)
