# SPDX-License-Identifier: Apache-2.0
"""Limits what an image restores to what the capsule's user could have on this host.

CRIU runs as root and restores what the images say: a task's ids and capabilities, and every file,
which it opens before it becomes the user. Another host's root could make up an image. So we compare
the image with the user of the announced capsule, and ask the kernel which files of the sandbox that
user may open. Field numbers are those of CRIU's protobuf schemas (criu: images/*.proto).

In root's own capsules only the capabilities are checked: a host that may send one acts as root here
anyway.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from ...errors import StepFailed
from ..files import below, rights
from ..files.rights import User
from . import link_remaps
from .image_kinds import ImageFile
from .protobuf import Damaged, ProtobufMessage

Files = Mapping[str, ImageFile]

REG, PIPE, FIFO, INETSK, UNIXSK, EVENTFD, EVENTPOLL, INOTIFY, SIGNALFD = range(1, 10)
PACKETSK, TTY, FANOTIFY, NETLINKSK, NS, TUN, EXT, TIMERFD, MEMFD, BPFMAP, PIDFD = range(10, 21)
NAMES = {
    PACKETSK: "a packet socket",
    FANOTIFY: "a fanotify group",
    NS: "a handle of a namespace",
    TUN: "a tun device",
    EXT: "a file of a plugin",
    BPFMAP: "a BPF map",
}

STREAM, DATAGRAM = 1, 2
LINKED, GHOST, PROCFS = range(3)
FILE_PRIVATE, FILE_SHARED, OF_MEMFD = 1 << 6, 1 << 7, 1 << 14  # criu: include/image.h
NAMESPACES = {5: "pid", 6: "network", 8: "uts", 9: "mount", 10: "user", 11: "cgroup"}
"""Field numbers of ids.img, by namespace. A capsule's tasks have the sandbox's namespaces, except
ipc and time."""

IDS = {1: "uid", 3: "euid", 5: "suid", 7: "fsuid"}
GROUP_IDS = {2: "gid", 4: "egid", 6: "sgid", 8: "fsgid"}
BOUNDING = 12
CAPABILITIES = {9: "inheritable", 10: "permitted", 11: "effective", 19: "ambient"}

KEPT = (0, 1, 3, 4, 5, 6, 7, 8, 10, 11, 13, 14, 15, 18, 23, 24, 28, 29, 31)
"""The capabilities (linux/capability.h) that capsule-init leaves to a root task in a sandbox."""

MAKING = os.O_CREAT | os.O_EXCL | os.O_TRUNC | (os.O_TMPFILE & ~os.O_DIRECTORY)


def check(files: Files, user: User, root: os.PathLike[str]) -> None:
    """Raise StepFailed if the image brings too much, and say what; or raise protobuf.Damaged."""
    for file in files.values():
        if file.kind == "core":
            _check_task(file, user)
    if user.is_root:
        return
    for file in files.values():
        if file.kind == "ghost-file":
            _check_inode(file, user, file.entries[0] if file.entries else b"", 3, (1, 2))
        elif file.kind == "memfd":
            for entry in file.entries:
                _check_inode(file, user, entry, 9, (2, 3))
        elif file.kind == "cgroup" and any(b".." in bytes(entry) for entry in file.entries):
            raise file.refusal("with a control group that leads elsewhere")
    _check_namespaces(files)
    wanted = _Wanted(files)
    top = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        rights.acting_as(user, lambda: _check_paths(wanted, top, user))
    finally:
        os.close(top)


def _check_task(file: ImageFile, user: User) -> None:
    core = ProtobufMessage(file.entries[0])
    thread, about = core.message(5), core.message(3)
    if 4 in core:
        raise file.refusal("with namespaces of a kind that no capsule has of its own")
    if thread is None and about is not None and about.uint(1) in (2, 6) and 2 not in core:
        return  # the task has ended, so it never runs
    creds = None if thread is None else thread.message(10)
    if creds is None:
        raise file.refusal("of a task that belongs to no user")
    for number in (BOUNDING, *CAPABILITIES):
        _check_kept(file, creds.uints(number))
    if user.is_root:
        return
    found = [f"{name} {creds.uint(n)}" for n, name in IDS.items() if creds.uint(n) != user.uid]
    found += [
        f"{name} {creds.uint(n)}" for n, name in GROUP_IDS.items() if not user.is_in(creds.uint(n))
    ]
    found += [f"group {gid}" for gid in creds.uints(14) if not user.is_in(gid)]
    found += [f"{name} capabilities" for n, name in CAPABILITIES.items() if any(creds.uints(n))]
    if found:
        raise file.refusal(
            f"of a task with {', '.join(found[:5])}, but its capsule is user {user.uid}'s"
        )


def _check_kept(file: ImageFile, words: list[int]) -> None:
    found = sum(word << 32 * at for at, word in enumerate(words))
    beyond = [n for n in range(32 * len(words)) if found >> n & 1 and n not in KEPT]
    if beyond:
        raise file.refusal(f"of a task with capability {beyond[0]}, which no capsule has")


def _check_inode(
    file: ImageFile, user: User, entry: memoryview | bytes, mode: int, owner: tuple[int, int]
) -> None:
    """Refuse a device and another user's or group's set-id program: CRIU would make it again."""
    inode = ProtobufMessage(entry)
    bits, uid, gid = inode.uint(mode, 0), inode.uint(owner[0]), inode.uint(owner[1])
    if stat.S_ISCHR(bits) or stat.S_ISBLK(bits):
        raise file.refusal("of a device")
    if (bits & stat.S_ISUID and uid != user.uid) or (bits & stat.S_ISGID and not user.is_in(gid)):
        raise file.refusal(f"of a program that runs as user {uid}, group {gid}")


def _check_namespaces(files: Files) -> None:
    own = ProtobufMessage(files["inventory"].entries[0]).message(3)
    if own is None:
        raise files["inventory"].refusal("without the namespaces it was made in")
    for file in files.values():
        if file.kind == "ids":
            ids = ProtobufMessage(file.entries[0])
            for number, name in NAMESPACES.items():
                if ids.uint(number, 0) != own.uint(number, 0):
                    raise file.refusal(f"with a {name} namespace that is not the sandbox's")


class _Wanted:
    """The paths that a restore opens, and those where it makes a file."""

    def __init__(self, files: Files) -> None:
        self.opened: dict[int, tuple[str, int]] = {}  # id → path, flags
        self.made: list[str] = []
        file = files["files"]
        for raw in file.entries:
            self._take(file, ProtobufMessage(raw))
        for kept in files.values():
            if kept.kind == "mm":
                self._take_mappings(kept)
            elif kept.kind == "fs":
                self._take_root(kept)
            elif kept.kind == "remap-fpath":
                self._take_deleted(kept)

    def _take(self, file: ImageFile, entry: ProtobufMessage) -> None:
        kind = entry.uint(1)
        if kind in NAMES or not REG <= kind <= PIDFD:
            raise file.refusal(f"with {NAMES.get(kind, f'a file of kind {kind}')}")
        if kind == REG:
            self._take_path(file, _part(entry, 3))
        elif kind == INETSK and _part(entry, 4).uint(4) not in (STREAM, DATAGRAM):
            raise file.refusal("with a raw socket")
        elif kind == UNIXSK:
            self._take_socket(_part(entry, 16))

    def _take_path(self, file: ImageFile, reg: ProtobufMessage) -> None:
        number, flags, path = reg.uint(1), reg.uint(2), _text(reg, 6)
        if number in self.opened:
            raise file.refusal(f"with two files of number {number}")
        if not path.startswith("/") or "\0" in path:
            raise file.refusal(f"with a file at {path[:100]!a}, which is no absolute path")
        if flags & MAKING:
            raise file.refusal(f"that would make {path[:100]!a}")
        self.opened[number] = path, flags

    def _take_socket(self, socket: ProtobufMessage) -> None:
        name = _text(socket, 11)
        if name and not name.startswith("\0"):
            path = name.rstrip("\0")
            self.made.append(path if path.startswith("/") else f"{_text(socket, 14)}/{path}")

    def _take_mappings(self, file: ImageFile) -> None:
        """A mapping opens its file again, with its own flags."""
        for raw in ProtobufMessage(file.entries[0]).raws(14):
            vma = ProtobufMessage(raw)
            status = vma.uint(7)
            if not status & (FILE_PRIVATE | FILE_SHARED) or status & OF_MEMFD:
                continue
            flags = vma.uint(10, os.O_RDWR if status & FILE_SHARED else os.O_RDONLY)
            if flags & (os.O_ACCMODE | MAKING):
                number = vma.uint(4)
                path, before = self.opened.get(number, ("", 0))
                if flags & MAKING or not path:
                    raise file.refusal(f"with a mapping of file {number}, which it may not make")
                self.opened[number] = path, before & ~os.O_ACCMODE | os.O_RDWR

    def _take_root(self, file: ImageFile) -> None:
        path, _ = self.opened.get(ProtobufMessage(file.entries[0]).uint(2), ("", 0))
        if path != "/":
            raise file.refusal(f"of a task whose root is {path[:100]!a}")

    def _take_deleted(self, file: ImageFile) -> None:
        for raw in file.entries:
            entry = ProtobufMessage(raw)
            kind = entry.uint(3, LINKED)
            if kind not in (LINKED, GHOST, PROCFS):
                raise file.refusal(f"with a remap of kind {kind}")
            if kind == PROCFS:
                continue
            path, flags = self.opened.pop(entry.uint(1), ("", 0))
            self.made.append(path)
            if kind == LINKED:  # CRIU opens the file by its second name, then removes that name
                number = entry.uint(2)
                link, _ = self.opened.get(number, ("", 0))
                if not link_remaps.NAME.fullmatch(os.path.basename(link)):
                    raise file.refusal(f"that would remove {link[:100]!a}")
                self.opened[number] = link, flags
                self.made.append(link)


def _check_paths(wanted: _Wanted, top: int, user: User) -> None:
    """Check all paths. The calling thread has the user's rights, so a file that the user may not
    see counts as missing."""
    for path, flags in wanted.opened.values():
        if not flags & os.O_PATH:
            _check_open(path, flags, top, user)
    for path in wanted.made:
        folder = os.path.dirname(path) or "."
        try:
            fd = below.open_in_root(top, folder, os.O_PATH | os.O_DIRECTORY)
        except OSError as error:
            raise _forbidden(user, f"make {path[:200]!a}", error.strerror) from None
        try:
            if not rights.may(fd, os.W_OK | os.X_OK):
                raise _forbidden(user, f"make {path[:200]!a}", "not their directory")
        finally:
            os.close(fd)


def _check_open(path: str, flags: int, top: int, user: User) -> None:
    try:
        fd = below.open_in_root(top, path, os.O_PATH)
    except FileNotFoundError:
        return  # CRIU will report it
    except OSError as error:
        raise _forbidden(user, f"open {path[:200]!a}", error.strerror) from None
    try:
        write = flags & os.O_ACCMODE != os.O_RDONLY
        if not any(rights.may(fd, mode) for mode in ((os.W_OK,) if write else (os.R_OK, os.X_OK))):
            how = "for writing" if write else "for reading"
            raise _forbidden(user, f"open {path[:200]!a} {how}", "no permission")
    finally:
        os.close(fd)


def _forbidden(user: User, what: str, why: object) -> StepFailed:
    return StepFailed(
        "verify",
        f"the image is not handed to CRIU: a task of it would {what}, which its user {user.uid}"
        f" may not do on this host ({why})",
        hint="owners and modes of the files a job uses must be alike on all hosts",
    )


def _part(entry: ProtobufMessage, number: int) -> ProtobufMessage:
    part = entry.message(number)
    if part is None or part.uint(1) != entry.uint(2):
        raise Damaged("a file's description belongs to another file")
    return part


def _text(message: ProtobufMessage, number: int) -> str:
    return os.fsdecode(bytes(message.raw(number) or b""))
