# SPDX-License-Identifier: Apache-2.0
"""Surveys a capsule's tree while it runs: what a move needs, and what prevents it.

It reads /proc only; nothing is stopped. The result is a snapshot. If the job opens something that
cannot move a moment later, CRIU finds it while the job can still go on at its source.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import struct
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import psutil

from ... import proc_text
from ..capsule.mounts import Mounts, PathKind, Placement, mount_of, mount_table
from ..capsule.sandboxes import Sandbox
from ..capsule.tree import descriptors, in_order, inner_pid, tasks
from ..files import statx
from ..files.identity import Identity
from ..files.rights import User
from ..images import file_locks, pids
from ..images.file_locks import FileLock
from . import (
    databases,
    epoll_sets,
    foreign_ids,
    gpu_tasks,
    lost_names,
    odd_sockets,
    terminals,
    traced,
    unaccepted,
    undelivered,
    unix_sockets,
    unread,
    unwaited,
)
from .found import GpuTask, NeededFile, Survey

UNMOVABLE = {
    "anon_inode:[io_uring]": (
        "an io_uring, which CRIU cannot dump",
        "turn io_uring off in the program (for libuv: UV_USE_IO_URING=0)",
    ),
    "anon_inode:[userfaultfd]": ("a userfaultfd, which CRIU cannot dump", "close it"),
    "anon_inode:[perf_event]": ("a perf event, which CRIU cannot dump", "end the profiler"),
    "anon_inode:kvm-vm": ("a virtual machine, which CRIU cannot dump", "end it"),
    "anon_inode:[fanotify]": ("a fanotify group, which CRIU cannot dump", "close it"),
}
_PT_NOTE = 4  # elf(5)
_SEGMENTS = 256  # at most so many are read: libraries have a dozen, a job's file may claim more
_FAR = 1 << 62  # every file is smaller; a seek beyond it would fail
SEMAPHORE = (
    "an eventfd that is a semaphore (EFD_SEMAPHORE), which CRIU restores as a plain one",
    "use a semaphore of the C library, or an eventfd without that flag",
)
OWN_NUMBERS = ("fuse", "cifs", "smb", "9p")
"""A file system may give its inodes other numbers on each host if its kind begins with one of
these."""
PLAIN_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts/")


_ALSO_PASSING = (unwaited.find, unaccepted.find, traced.find)
"""These find what a program may have for moments only, and what no descriptor of a task shows."""


@dataclass(frozen=True)
class Changing:
    """The part of a survey that is taken again once the tree is frozen.

    It holds files whose content may change without a change of size and time, and files that move
    only while they are open. Paths are as the capsule sees them."""

    single_files: tuple[str, ...]
    mapped_writable: tuple[str, ...]
    passing: tuple[tuple[str, str], ...] = ()
    """(what prevents the move, what to do) for file locks, for open databases that would be
    read-only on another host (databases.py), and for what is not read yet (unread.py)."""
    shared: Mapping[str, Identity] = field(default_factory=dict)
    """The files that are open on shared paths, by path; but for those whose inodes may have other
    numbers on each host."""
    written: Mapping[str, int] = field(default_factory=dict)
    """The files that are open for writing on shared paths: path → bytes."""


@dataclass
class _Findings:
    needed: set[str] = field(default_factory=set)
    directories: set[str] = field(default_factory=set)
    single: set[str] = field(default_factory=set)
    mapped_writable: set[str] = field(default_factory=set)
    problems: dict[tuple[str, str], None] = field(default_factory=dict)
    passing: dict[tuple[str, str], None] = field(default_factory=dict)
    nameless: dict[tuple[int, int], int] = field(default_factory=dict)
    foreign: set[str] = field(default_factory=set)
    """The paths of files that prevent the move, since a task has them open for writing."""
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Path of each open file on a shared path → its device and inode."""
    identities: dict[str, Identity] = field(default_factory=dict)
    """Those of them whose inodes have the same numbers on all hosts, by path."""
    written: dict[str, int] = field(default_factory=dict)
    """Those of ``shared`` that are open for writing: path → bytes."""
    linked: set[str] = field(default_factory=set)


def survey(sandbox: Sandbox, root_pid: int, placement: Placement) -> Survey:
    """Survey the tree whose root task is ``root_pid`` in the sandbox; raises ProcessLookupError
    if the capsule has ended meanwhile."""
    try:
        return _survey(sandbox, root_pid, placement)
    except (FileNotFoundError, psutil.NoSuchProcess) as gone:
        raise ProcessLookupError(f"{sandbox.plan.hostname} has just ended") from gone


def _survey(sandbox: Sandbox, root_pid: int, placement: Placement) -> Survey:
    found = _Findings()
    seen: dict[int, int] = {}  # the host's pid → the capsule's
    on_gpus: list[GpuTask] = []
    resident = 0
    init = psutil.Process(sandbox.init)
    own_pipes = {f"pipe:[{inode}]" for inode in sandbox.pipes()}
    user = User(sandbox.plan.uid, sandbox.plan.gid, tuple(sandbox.plan.groups))
    for task in tasks(sandbox):
        try:
            inner = inner_pid(task.pid)
            who = _who(task.pid)
            seen[task.pid] = inner
            resident += task.memory_info().rss
            if task.ppid() == init.pid and inner != root_pid:
                found.problems[
                    f"{who} has left the command's process tree (it made itself a daemon)",
                    "start it as an ordinary child of the command",
                ] = None
            if _only_main_ended(task):
                found.problems[
                    f"{who} has threads although its main thread has ended, which CRIU cannot dump",
                    "have the main thread wait for the others (pthread_join) before it ends",
                ] = None
            _look_at_user_namespace(task.pid, who, init.pid, found)
            found.problems |= dict.fromkeys(foreign_ids.of_task(task.pid, who, user))
            mounts = mount_table(task.pid)
            _look_at_maps(task.pid, found)
            _look_at_descriptors(task.pid, who, own_pipes, placement, mounts, found)
            found.problems |= dict.fromkeys(lost_names.look(task.pid, who, placement, mounts))
            found.nameless |= lost_names.nameless(task.pid)
            found.problems |= dict.fromkeys(terminals.of_task(task.pid, who))
            found.problems |= dict.fromkeys(odd_sockets.of_task(task.pid, who))
            if (gpu_task := gpu_tasks.look(task.pid, inner, task.name())) is not None:
                on_gpus.append(gpu_task)
            cwd = os.readlink(f"/proc/{task.pid}/cwd")
            if placement.of_path(cwd, mounts) not in (PathKind.PRIVATE, PathKind.CARRIED):
                found.directories.add(cwd)
        except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
            continue  # the task has ended, so only its exit status is left
    if not seen:
        raise ProcessLookupError(f"no task runs in {sandbox.plan.hostname}")
    found.problems |= dict.fromkeys(terminals.of_sandbox(sandbox.root))
    for stale in file_locks.lasting(
        epoll_sets.find(in_order(sandbox, root_pid))[1],
        lambda: epoll_sets.find(in_order(sandbox, root_pid))[1],
    ):
        found.problems[stale] = None
    found.problems |= dict.fromkeys(unix_sockets.outside(sandbox, [*seen.items()]))
    for problem in file_locks.lasting(
        found.passing, lambda: _look_again(sandbox, placement, maps=False).passing
    ):
        found.problems[problem] = None
    for look in (*_ALSO_PASSING, traced.find_in_threads):
        found.problems |= dict.fromkeys(
            file_locks.lasting(look(sandbox), functools.partial(look, sandbox))
        )
    found.problems |= dict.fromkeys(undelivered.stuck(sandbox.init))
    mounts = mount_table(sandbox.init)
    _look_at_mapped(placement, mounts, found)
    needed_here = sorted(found.needed - found.single)
    places = {path: placement.of_path(path, mounts) for path in needed_here}
    needed = []
    for path, place in places.items():
        if place in (PathKind.PRIVATE, PathKind.CARRIED):
            continue
        if (file := fingerprint(path, sandbox.root)) is not None:
            needed.append(replace(file, size=-1, mode=0) if place is PathKind.SHARED else file)
    for path, (device, inode) in sorted(found.shared.items()):
        # The file is not opened here, because that would break a lease.
        if path not in found.needed and _is_at(sandbox, path, device, inode):
            needed.append(NeededFile(path, -1, "", 0, inode))
    shm = os.statvfs(sandbox.root / "dev/shm")
    return Survey(
        pids=tuple(sorted(seen.values())),
        resident=resident,
        shared_memory=(shm.f_blocks - shm.f_bfree) * shm.f_frsize,
        needed=tuple(needed),
        directories=tuple(sorted(found.directories)),
        single_files=tuple(sorted(found.single)),
        mapped_writable=tuple(sorted(found.mapped_writable)),
        problems=tuple(found.problems),
        gpu_tasks=tuple(sorted(on_gpus, key=lambda task: task.pid)),
        ids=pids.in_use(sandbox),
        nameless=sum(found.nameless.values()),
        linked=tuple(sorted(found.linked)),
    )


def changing(sandbox: Sandbox, placement: Placement) -> Changing:
    """Take the part of a survey that must be repeated once the tree is frozen.

    It takes a tenth of a survey's time. Raises ProcessLookupError if the capsule has ended.
    """
    found = _look_again(sandbox, placement, maps=True)
    return Changing(
        tuple(sorted(found.single)),
        tuple(sorted(found.mapped_writable)),
        tuple(found.passing),
        found.identities,
        found.written,
    )


def mapped_writable(sandbox: Sandbox) -> set[str]:
    """The files that a task maps shared and writable now; paths as the capsule sees them."""
    found = _Findings()
    for task in tasks(sandbox):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            _look_at_maps(task.pid, found)
    return found.mapped_writable


def passing(sandbox: Sandbox, placement: Placement) -> list[tuple[str, str]]:
    """(what prevents a move, what to do) for things that a program may have for moments only.

    These are locks, databases in a transaction, data that the program has not read (unread.py),
    connections that it has not accepted, ended children for which it has not waited, a tracer, and
    closed connections with data under way. Raises ProcessLookupError as :func:`changing`.
    """
    found = _look_again(sandbox, placement, maps=False)
    also = (each for look in _ALSO_PASSING for each in look(sandbox))
    return [*found.passing, *also, *undelivered.find(sandbox.init)]


def _look_again(sandbox: Sandbox, placement: Placement, *, maps: bool) -> _Findings:
    found = _Findings()
    seen = 0
    try:
        own_pipes = {f"pipe:[{inode}]" for inode in sandbox.pipes()}
        mounts: dict[int, Mounts] = {}  # by mount namespace, mostly one
        for task in tasks(sandbox):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                space = os.stat(f"/proc/{task.pid}/ns/mnt").st_ino
                if space not in mounts:
                    mounts[space] = mount_table(task.pid)
                if maps:
                    before = {*found.mapped_writable}
                    _look_at_maps(task.pid, found)
                    _look_at_mapped(placement, mounts[space], found, before)
                _look_at_descriptors(task.pid, "", own_pipes, placement, mounts[space], found)
                seen += 1
    except FileNotFoundError as gone:
        raise ProcessLookupError(f"{sandbox.plan.hostname} has just ended") from gone
    if not seen:
        raise ProcessLookupError(f"no task runs in {sandbox.plan.hostname}")
    return found


def _only_main_ended(task: psutil.Process) -> bool:
    """True if a process goes on without its first thread (pthread_exit(3) in main)."""
    return task.status() == psutil.STATUS_ZOMBIE and len(os.listdir(f"/proc/{task.pid}/task")) > 1


def fingerprint(path: str, root: Path = Path("/")) -> NeededFile | None:
    """Size, build id and mode of a file; None if it does not exist or is no regular file."""
    try:
        with open_plain(root / path.lstrip("/")) as file:
            status = os.fstat(file.fileno())
            return NeededFile(path, status.st_size, build_id(file), status.st_mode)
    except (OSError, ValueError):
        return None


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file for reading; raises OSError, or ValueError if the path is invalid.

    Another host or a job has chosen the path, and other kinds of files are dangerous: opening a
    pipe may block us, opening a device may trigger an action.
    """
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        return open(f"/proc/self/fd/{fd}", "rb")
    finally:
        os.close(fd)


def build_id(file: BinaryIO) -> str:
    """The GNU build id of an ELF file (64 bit, little endian), '' without one.

    The id is in a note segment, which may lie anywhere: patched libraries, such as those of wheels,
    have it near the end. CRIU compares the id too, but only after the tree was frozen.
    """
    head = file.read(64)
    if len(head) < 64 or not head.startswith(b"\x7fELF\x02\x01"):
        return ""
    (table,) = struct.unpack_from("<Q", head, 32)
    entry, count = struct.unpack_from("<HH", head, 54)
    for number in range(min(count, _SEGMENTS)):
        if (at := table + number * entry) >= _FAR:
            return ""
        file.seek(at)
        segment = file.read(56).ljust(56, b"\0")
        kind, offset, size = struct.unpack_from("<I4xQ16xQ", segment)
        if kind != _PT_NOTE or offset >= _FAR:
            continue
        file.seek(offset)
        notes = file.read(min(size, 65536))
        at = notes.find(b"\x03\x00\x00\x00GNU\x00")
        if at >= 4:
            length = int.from_bytes(notes[at - 4 : at], "little")
            return notes[at + 8 : at + 8 + length].hex()
    return ""


def _look_at_user_namespace(pid: int, who: str, init: int, found: _Findings) -> None:
    """CRIU dumps nested namespaces of all other kinds (seen with CRIU 4.2)."""
    if os.stat(f"/proc/{pid}/ns/user").st_ino != os.stat(f"/proc/{init}/ns/user").st_ino:
        found.problems[
            f"{who} has a user namespace of its own, which CRIU cannot dump",
            "turn off the sandbox that the program makes (bubblewrap, a browser's)",
        ] = None


def _look_at_maps(pid: int, found: _Findings) -> None:
    for line in proc_text.lines(f"/proc/{pid}/maps"):
        parts = line.split(maxsplit=5)
        if len(parts) < 6 or not parts[5].startswith("/") or parts[5].endswith(" (deleted)"):
            continue
        path = parts[5].replace("\\012", "\n")  # proc(5) writes nothing else in octal there
        if path.startswith(("/SYSV", "/memfd:", "/dev/")):
            continue
        found.needed.add(path)
        if parts[1][1] == "w" and parts[1][3] == "s":
            found.mapped_writable.add(path)


def _look_at_mapped(
    placement: Placement, mounts: Mounts, found: _Findings, but: Set[str] = frozenset()
) -> None:
    """A file that a task writes through a mapping, mostly with no descriptor left, counts as open
    for writing."""
    for path in found.mapped_writable - but:
        place = placement.of_path(path, mounts)
        if place is PathKind.LOCAL:
            found.single.add(path)
        elif place is PathKind.FOREIGN and path not in found.foreign:
            mount = mount_of(path, mounts)
            found.problems[_foreign("a process", path, mount.kind, mount.point)] = None


def _foreign(who: str, path: str, kind: str, point: str) -> tuple[str, str]:
    return (
        f"{who} has {path} open for writing, on the {kind} file system {point}, which is listed"
        " neither under files.shared nor under files.carried",
        f'list "{point}" under files.shared if every host sees the same content there, under'
        " files.carried if it is this host's own",
    )


def _look_at_descriptors(
    pid: int,
    who: str,
    own_pipes: set[str],
    placement: Placement,
    mounts: Mounts,
    found: _Findings,
) -> None:
    for fd, target in descriptors(pid):
        if target in own_pipes or target.startswith(("socket:", "pipe:")):
            continue
        if target.startswith("anon_inode:"):
            if target in UNMOVABLE:
                what, remedy = UNMOVABLE[target]
                found.problems[f"{who} holds {what}", remedy] = None
            elif target == "anon_inode:[eventfd]" and _is_semaphore(pid, fd):
                what, remedy = SEMAPHORE
                found.problems[f"{who} holds {what}", remedy] = None
            _look_at_unread(pid, fd, who, target, found)
            continue
        if target.startswith("/dev/") and not target.startswith("/dev/shm/"):
            _look_at_device(who, target, found)
            _look_at_unread(pid, fd, who, target, found)
            continue
        if not target.startswith("/") or target.endswith(" (deleted)"):
            continue
        try:
            flags, mount_id, locks = _fdinfo(pid, fd)
            opened = os.stat(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue  # the task has closed it meanwhile
        if (mount := mounts.get(mount_id)) is None:
            found.problems[
                f"{who} has {target} open on a mount that is not in its capsule"
                " (a POSIX message queue is such a file)",
                "close it",
            ] = None
            continue
        place = placement.of_open_file(target, mount)
        if locks and place in (PathKind.SHARED, PathKind.FOREIGN):
            holder = who or _who(pid)
            for lock in locks:
                if lock.keeps_others_out:
                    found.passing[file_locks.words(holder, lock, target), file_locks.REMEDY] = None
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        goes_along = place in (PathKind.PRIVATE, PathKind.CARRIED, PathKind.LOCAL)
        if writable and goes_along and databases.refuses_after_a_move(pid, fd):
            found.passing[databases.words(who or _who(pid), target), databases.REMEDY] = None
        if place is PathKind.FOREIGN and writable:
            found.problems[_foreign(who, target, mount.kind, mount.point)] = None
            found.foreign.add(target)
        elif place is PathKind.CARRIED and writable:
            if stat.S_ISREG(opened.st_mode) and opened.st_nlink > 1:
                found.linked.add(target)
        elif place is PathKind.LOCAL and writable:
            found.single.add(target)
        elif place in (PathKind.LOCAL, PathKind.FOREIGN):
            found.needed.add(target)
        elif place is PathKind.SHARED:
            found.directories.add(os.path.dirname(target))
            if stat.S_ISREG(opened.st_mode):
                found.shared[target] = opened.st_dev, opened.st_ino
                if writable:
                    found.written[target] = opened.st_size
                if not mount.kind.startswith(OWN_NUMBERS):
                    with contextlib.suppress(OSError):  # the task has closed it meanwhile
                        found.identities[target] = statx.identity(f"/proc/{pid}/fd/{fd}")


def _is_at(sandbox: Sandbox, path: str, device: int, inode: int) -> bool:
    """True if an open file still has its name; programs often delete or replace their files."""
    with contextlib.suppress(OSError):
        there = os.stat(sandbox.root / path.lstrip("/"))
        return (there.st_dev, there.st_ino) == (device, inode)
    return False


def _look_at_device(who: str, target: str, found: _Findings) -> None:
    name = target.removeprefix("/dev/")
    if not target.startswith(gpu_tasks.DEVICES) and not name.startswith(PLAIN_DEVICES):
        found.problems[
            f"{who} holds the device {target}, which is tied to this host",
            "close it (for InfiniBand: train over TCP sockets)",
        ] = None


def _look_at_unread(pid: int, fd: int, who: str, target: str, found: _Findings) -> None:
    if what := unread.look(pid, fd, target):
        found.passing[unread.words(who or _who(pid), what), unread.REMEDY] = None


def _is_semaphore(pid: int, fd: int) -> bool:
    """Return whether an eventfd is a semaphore. The kernel tells since Linux 6.5."""
    with contextlib.suppress(FileNotFoundError):
        lines = proc_text.lines(f"/proc/{pid}/fdinfo/{fd}")
        return any(line.split() == ["eventfd-semaphore:", "1"] for line in lines)
    return False


def _fdinfo(pid: int, fd: int) -> tuple[int, int, list[FileLock]]:
    """(open flags, mount id, locks) of a descriptor."""
    text = proc_text.read(f"/proc/{pid}/fdinfo/{fd}")
    values = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    locks = list(file_locks.parse(text)) if "lock" in values else []
    return int(values["flags"], 8), int(values["mnt_id"]), locks


def _who(pid: int) -> str:
    return f"process {inner_pid(pid)} ({psutil.Process(pid).name()})"
