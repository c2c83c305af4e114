# SPDX-License-Identifier: Apache-2.0
"""A process whose memory a fill engine fills, and which plays CRIU's part itself.

Run as a script it evaluates what it reads, line by line; :class:`LazyProcess` is the test's end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

from told_process import ToldProcess

PAGE = 4096
UFFDIO_API, UFFDIO_REGISTER = 0xC018AA3F, 0xC020AA00
FORK, REMAP, REMOVE, UNMAP = 1 << 1, 1 << 2, 1 << 3, 1 << 6
FINISHED = 0x52535446
PROT, MAP_FIXED, MREMAP_FIXED, MADV_DONTNEED = 3, 0x10, 3, 4
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p


class Lazy:
    """In the process: memory of its own at ``base``, not yet registered."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.base = self.map(pages)
        self.uffd = self.open()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def open(self) -> int:
        fd = _libc.syscall(323, os.O_CLOEXEC | os.O_NONBLOCK)
        assert fd >= 0, os.strerror(ctypes.get_errno())
        self._ioctl(fd, UFFDIO_API, struct.pack("<QQQ", 0xAA, FORK | REMAP | REMOVE | UNMAP, 0))
        return int(fd)

    def map(self, pages: int, at: int = 0) -> int:
        flags = 0x22 | 0x4000 | (MAP_FIXED if at else 0)
        place = _libc.mmap(ctypes.c_void_p(at), ctypes.c_size_t(pages * PAGE), PROT, flags, -1, 0)
        assert place != ctypes.c_void_p(-1).value
        return int(place)

    def register(self, first: int = 0, pages: int = 0) -> None:
        pages = pages or self.pages - first
        where = self.base + first * PAGE, pages * PAGE
        self._ioctl(self.uffd, UFFDIO_REGISTER, struct.pack("<QQQQ", *where, 1, 0))

    def connect(self, path: str) -> None:
        self.socket.connect(path)

    def hand_over(self, pid: int, uffd: int = -1) -> None:
        self.say(pid)
        socket.send_fds(self.socket, [b"\0"], [self.uffd if uffd < 0 else uffd])

    def taken(self, pid: int, fd: int) -> int:
        """Another's descriptor (pidfd_getfd)."""
        pidfd = os.pidfd_open(pid)
        taken = _libc.syscall(438, pidfd, fd, 0)
        os.close(pidfd)
        assert taken >= 0, os.strerror(ctypes.get_errno())
        return int(taken)

    def say(self, number: int) -> None:
        self.socket.sendall(struct.pack("<I", number & 0xFFFFFFFF))

    def finish(self) -> None:
        self.say(FINISHED)
        os.close(self.uffd)

    def word(self, page: int) -> int:
        """The first eight bytes of a page."""
        return ctypes.c_uint64.from_address(self.base + page * PAGE).value

    def words(self, first: int = 0, pages: int = 0) -> list[int]:
        return [self.word(first + n) for n in range(pages or self.pages)]

    def set(self, page: int, value: int) -> None:
        ctypes.c_uint64.from_address(self.base + page * PAGE).value = value

    def forget(self, first: int, pages: int) -> None:
        self._call("madvise", self.base + first * PAGE, pages, MADV_DONTNEED)

    def unmap(self, first: int, pages: int) -> None:
        self._call("munmap", self.base + first * PAGE, pages)

    def move(self, first: int, pages: int, to: int) -> None:
        """The pages go to page ``to``, whose memory was unmapped."""
        place = _libc.mremap(
            ctypes.c_void_p(self.base + first * PAGE),
            ctypes.c_size_t(pages * PAGE),
            ctypes.c_size_t(pages * PAGE),
            MREMAP_FIXED,
            ctypes.c_void_p(self.base + to * PAGE),
        )
        assert place == self.base + to * PAGE, os.strerror(ctypes.get_errno())

    def forked(self) -> int:
        """A child that does nothing, and ends with us."""
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            _libc.prctl(1, 9)  # PR_SET_PDEATHSIG
            while os.getppid() == parent:  # else it has ended before that, and no signal comes
                signal.pause()
            os._exit(0)
        return child

    def in_child(self, expression: str) -> Any:
        """What the expression is in a child that is forked now."""
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, repr(eval(expression, {"lazy": self})).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            said = pipe.read()
        assert os.waitpid(child, 0)[1] == 0
        return eval(said)

    def _call(self, name: str, address: int, pages: int, *more: int) -> None:
        rc = getattr(_libc, name)(ctypes.c_void_p(address), ctypes.c_size_t(pages * PAGE), *more)
        assert rc == 0, os.strerror(ctypes.get_errno())

    def _ioctl(self, fd: int, number: int, argument: bytes) -> None:
        buffer = ctypes.create_string_buffer(argument, len(argument))
        assert _libc.ioctl(fd, ctypes.c_ulong(number), buffer) == 0, os.strerror(ctypes.get_errno())


class LazyProcess(ToldProcess):
    """The test's end: what is called here is called there."""

    def __init__(self, pages: int) -> None:
        super().__init__(
            subprocess.Popen(
                [sys.executable, "-S", __file__, str(pages)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},  # told_process
            )
        )
        self.base: int = self("lazy.base")

    def __call__(self, expression: str) -> Any:
        self.begin(expression)
        return self.answer()

    def answer(self) -> Any:
        return eval(self.line())

    def connect(self, images: Path, pid: int) -> None:
        self(f"lazy.connect({str(images / 'lazy-pages.socket')!r})")
        self(f"lazy.hand_over({pid})")


def _serve() -> None:
    lazy = Lazy(int(sys.argv[1]))
    for line in sys.stdin:
        print(repr(eval(line, {"lazy": lazy, "os": os})), flush=True)


if __name__ == "__main__":
    _serve()
