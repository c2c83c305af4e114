# SPDX-License-Identifier: Apache-2.0
"""Unpacks the tar streams of trees.py at the destination, so that they can do no harm there.

A stream comes from another host's root, for a capsule whose user this host knows. No stream can
put or remove a file outside its directory or through a link, or make a device in a capsule. If the
user is not root, a stream brings no set-user-id or set-group-id program of another user or group.
Single files in the host's own directories are written with that user's rights.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tarfile
import threading
from pathlib import Path
from typing import IO, cast

from ...errors import StepFailed
from . import below, sparse
from .below import GONE
from .dress import dress
from .rights import User, become
from .sparing import Sparing
from .trees import BLOCK

HEADER_LIMIT = 16 << 10
"""The extended header of one entry has at most this many bytes. It holds a name, a link's target
and some numbers."""

_TYPES = frozenset(
    (
        tarfile.REGTYPE,
        tarfile.AREGTYPE,
        tarfile.LNKTYPE,
        tarfile.SYMTYPE,
        tarfile.DIRTYPE,
        tarfile.FIFOTYPE,
        tarfile.CHRTYPE,
        tarfile.BLKTYPE,
        tarfile.XHDTYPE,
    )
)
_DEVICES = (tarfile.CHRTYPE, tarfile.BLKTYPE)
_NO_ID = (1 << 32) - 1  # with this id chown(2) would leave the owner as it is
_LATEST_S = 1 << 33
_ROOT = User(0, 0)


class NotAllowed(StepFailed):
    """A stream has an entry that a capsule of this user cannot bring to a host."""


class Unpacker:
    """Unpacks one tar stream below a directory, in a thread, as its bytes arrive.

    With ``sparing`` other programs use the directory too, and it says which files stay; a file gets
    its name when it is complete. ``user`` is the capsule's user; with ``as_user`` nothing is
    written that this user could not write. ``single``: the stream has single files of the host's
    own directories, which implies ``as_user``. ``running``: the job ran when its files were read.
    It may have put a link in the place of a directory then, and what is behind a link is left out:
    pass two brings it.
    """

    def __init__(
        self,
        destination: Path,
        sparing: Sparing | None = None,
        user: User = _ROOT,
        *,
        single: bool = False,
        as_user: bool = False,
        running: bool = False,
    ) -> None:
        read, self._write = os.pipe()
        self.error: BaseException | None = None
        self.names: list[str] = []
        self.written: list[str] = []
        self._sparing = sparing
        self._user = user
        self._single = single and not user.is_root
        self._as_user = (single or as_user) and not user.is_root
        self._running = running
        self._files: set[str] = set()
        self._thread = threading.Thread(
            target=self._run, args=(read, destination), name="unpack", daemon=True
        )
        self._thread.start()

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._write, view) :]
        except BrokenPipeError:
            self._thread.join()
            raise (self.error or OSError("unpacking ended early")) from None

    def finish(self) -> None:
        """Return when all entries are written.

        Raises StepFailed if the stream is damaged or not allowed, OSError if a file cannot be
        written.
        """
        os.close(self._write)
        self._thread.join()
        if self.error:
            raise self.error

    def _run(self, read: int, destination: Path) -> None:
        try:
            with os.fdopen(read, "rb", buffering=BLOCK) as stream, below.opened(destination) as top:
                if self._as_user:
                    become(self._user)
                try:
                    with tarfile.open(
                        mode="r|", fileobj=stream, bufsize=BLOCK, tarinfo=_Entry
                    ) as tar:
                        for member in tar:
                            self._take(tar, member, top)
                            tar.members.clear()  # type: ignore[attr-defined]  # bounds memory
                except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
                    raise StepFailed("files", f"the stream of files is damaged: {error}") from error
                while stream.read(BLOCK):  # the padding after tar's end mark
                    pass
        except BaseException as error:
            self.error = error

    def _take(self, tar: tarfile.TarFile, member: tarfile.TarInfo, top: int) -> None:
        below.plain(member.name)
        self._check(member)
        try:
            with below.parent_of(top, member.name, make=True, one_mount=not self._single) as (
                parent,
                last,
            ):
                if self._wants(member, parent, last) and self._put(tar, member, top, parent, last):
                    self.written.append(member.name)
                    if self._sparing is not None:
                        self._sparing.note(member, parent, last)
        except NotADirectoryError as error:
            # The job may put a link in a directory's place while its files are read.
            if not self._running:
                raise StepFailed(
                    "files",
                    f"{member.name} cannot be put on this host: a link, or a file, is in the place"
                    " of one of its directories",
                    hint="move it away, or make this directory the same on all hosts",
                ) from error
        except below.OtherMount as error:
            raise StepFailed(
                "files",
                f"{member.name} would lie on a mount below its directory on this host",
                hint="nothing may be mounted below a carried path; list what is under files.shared",
            ) from error
        except PermissionError as error:
            if not self._as_user:
                raise
            raise self._not_theirs(member.name, error) from error
        self.names.append(member.name)
        if member.isreg():
            self._files.add(member.name)

    def _wants(self, member: tarfile.TarInfo, parent: int, last: str) -> bool:
        """Whether the entry is put here. ``last`` is its name in the directory ``parent``."""
        return self._sparing is None or not self._sparing.keeps(member, parent, last)

    def _check(self, member: tarfile.TarInfo) -> None:
        """Raise StepFailed if this user's capsule may not bring the entry, ValueError if the entry
        is invalid."""
        if not (0 <= member.uid < _NO_ID and 0 <= member.gid < _NO_ID and member.size >= 0):
            raise ValueError(f"{member.name} has an invalid owner or size")
        if not -_LATEST_S < member.mtime < _LATEST_S:  # this also refuses NaN
            raise ValueError(f"{member.name} has an invalid time")
        if member.issparse():
            raise ValueError(f"{member.name} is a file with holes in one of tar's own formats")
        if member.name == "." and not member.isdir():
            raise ValueError("the entry of the directory itself is not a directory")
        user = self._user
        if member.type in _DEVICES:  # no task of a capsule can make one, not even root's
            raise self._refusal(member, "a device")
        if user.is_root:
            return
        if self._single and not member.isreg():
            raise StepFailed(
                "files", f"{member.name} was sent as a single file but is not a regular file"
            )
        if member.isreg():
            if member.mode & stat.S_ISUID and member.uid != user.uid:
                raise self._refusal(member, f"a program that runs as user {member.uid}")
            if member.mode & stat.S_ISGID and not user.is_in(member.gid):
                raise self._refusal(member, f"a program that runs as group {member.gid}")

    def _refusal(self, member: tarfile.TarInfo, what: str) -> NotAllowed:
        return NotAllowed(
            "files",
            f"{member.name} is {what}, which a capsule of user {self._user.uid} cannot bring",
            hint="list a path with such files under files.shared",
        )

    def _not_theirs(self, name: str, error: OSError) -> StepFailed:
        return StepFailed(
            "files",
            f"user {self._user.uid} may not write the open file {name} here: {error.strerror}",
            hint="its directory can be listed under files.shared or files.carried",
        )

    def _put(
        self, tar: tarfile.TarFile, member: tarfile.TarInfo, top: int, parent: int, last: str
    ) -> bool:
        """Put one entry where it belongs; return False if it was left out."""
        if member.isreg():
            self._put_file(tar, member, parent, last)
        elif member.isdir():
            _put_directory(member, parent, last, lenient=self._as_user)
        elif member.islnk():
            return self._link(member, top, parent, last)
        elif member.issym():
            self._clear(member.name, parent, last)
            at_ns = int(member.mtime * 1e9)
            os.symlink(member.linkname, last, dir_fd=parent)
            os.chown(last, member.uid, member.gid, dir_fd=parent, follow_symlinks=False)
            os.utime(last, ns=(at_ns, at_ns), dir_fd=parent, follow_symlinks=False)
        else:
            self._clear(member.name, parent, last)
            _make_pipe(member, parent, last)
        return True

    def _put_file(
        self, tar: tarfile.TarFile, member: tarfile.TarInfo, parent: int, last: str
    ) -> None:
        nameless = None if self._sparing is None else _nameless(parent)
        fd = self._open(member.name, parent, last) if nameless is None else nameless
        try:
            content = cast(IO[bytes], tar.extractfile(member))  # a regular file has one
            if sparse.HEADER in member.pax_headers:
                os.ftruncate(fd, 0)
                sparse.unpack(content, member.size, int(member.pax_headers[sparse.HEADER]), fd)
            else:
                self._write_plain(content, member, fd)
                os.ftruncate(fd, member.size)
            dress(fd, member, lenient=self._as_user)
            if nameless is not None:
                self._clear(member.name, parent, last)
                os.link(f"/proc/self/fd/{fd}", last, dst_dir_fd=parent, follow_symlinks=True)
        except BaseException:
            if self._sparing is not None and nameless is None:
                with contextlib.suppress(OSError):
                    os.unlink(last, dir_fd=parent)
            raise
        finally:
            os.close(fd)

    def _open(self, name: str, parent: int, last: str) -> int:
        """Open the file that gets an entry's content; what it has now is written over."""
        fresh = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._clear(name, parent, last)
            return os.open(last, fresh, 0o600, dir_fd=parent)
        except PermissionError as error:
            if not self._as_user:
                raise
            try:
                return open_there(parent, last)
            except OSError:
                raise error from None

    @staticmethod
    def _write_plain(content: IO[bytes], member: tarfile.TarInfo, fd: int) -> None:
        left = member.size
        while left:
            data = content.read(min(left, BLOCK))
            if not data:
                raise tarfile.ReadError(f"{member.name} ends early")
            left -= len(data)
            while data:
                data = data[os.write(fd, data) :]

    def _link(self, member: tarfile.TarInfo, top: int, parent: int, last: str) -> bool:
        """Make a second name of a file that came earlier in this stream; others are not linked.

        Returns False if that file is not there."""
        target = below.plain(member.linkname)
        if target not in self._files or target == member.name:
            return False  # the target vanished while it was read; pass two sends this entry again
        try:
            with below.parent_of(top, target) as (source, name):
                self._clear(member.name, parent, last)
                os.link(name, last, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
        except GONE:
            return False
        self._files.add(member.name)
        return True

    def _clear(self, name: str, parent: int, last: str) -> None:
        mode = _mode(parent, last)
        if mode is None:
            return
        if not stat.S_ISDIR(mode):
            os.unlink(last, dir_fd=parent)
        elif self._sparing is not None:
            self._sparing.remove_directory(name, parent, last)
        elif not self._single:  # else it may be a directory of the host, which we do not remove
            below.remove_all(parent, last)


class _Entry(tarfile.TarInfo):
    """An entry as trees.pack makes it; raises ReadError for other kinds and for large headers."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> _Entry:
        """tarfile calls this for each header. Only tar's end mark ends the stream here.

        tarfile itself ends quietly at a header that it cannot read, unless it is the first one.
        """
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # undocumented
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from error

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        """tarfile calls this after it has read a header; its source names it for overriding."""
        if self.type not in _TYPES:
            raise tarfile.ReadError(f"entry type {self.type!r} is unknown")
        if self.type == tarfile.XHDTYPE and not 0 <= self.size <= HEADER_LIMIT:
            raise tarfile.ReadError(f"an extended header cannot have {self.size} bytes")
        found: tarfile.TarInfo = super()._proc_member(tar)  # type: ignore[misc]
        return found


def _nameless(parent: int) -> int | None:
    """Make a file without a name in that directory; None if the file system has no such files. It
    vanishes unless it gets a name. So a stream that breaks off leaves no part of a file, which
    would count as newer than the file itself."""
    try:
        return os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=parent)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        return None


def open_there(parent: int, last: str) -> int:
    """Open a file that is there, and empty it. The thread's user may write it even if they may not
    change its directory. Raises OSError if they may not, or if it is no regular file."""
    plain = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(last, plain, dir_fd=parent)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", last)
    os.ftruncate(fd, 0)
    return fd


def _mode(parent: int, last: str) -> int | None:
    """The st_mode of the file ``last``, None if there is no such file."""
    try:
        return os.lstat(last, dir_fd=parent).st_mode
    except GONE:
        return None


def _put_directory(member: tarfile.TarInfo, parent: int, last: str, lenient: bool) -> None:
    mode = _mode(parent, last)
    if mode is not None and not stat.S_ISDIR(mode):
        os.unlink(last, dir_fd=parent)
        mode = None
    if mode is None:
        os.mkdir(last, 0o700, dir_fd=parent)
    fd = below.open_below(parent, last, os.O_RDONLY | os.O_DIRECTORY, one_mount=True)
    try:
        dress(fd, member, lenient=lenient)
    finally:
        os.close(fd)


def _make_pipe(member: tarfile.TarInfo, parent: int, last: str) -> None:
    """Make a named pipe. Its owner, mode and time can be set only by a descriptor."""
    os.mkfifo(last, 0o600, dir_fd=parent)
    fd = below.open_below(parent, last, os.O_PATH)
    try:
        dress(fd, member, f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
