# SPDX-License-Identifier: Apache-2.0
"""A file system in user space with one file, whose reads pass by the page cache and take their
time: the kernel holds the reader's pages until the answer comes (linux/fuse.h, FOPEN_DIRECT_IO)."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)

_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _INIT, _FORGETS = 1, 2, 3, 14, 15, 26, 42
_REGULAR, _DIRECTORY = 0o100644, 0o040755
_ROOT, _FILE = 1, 2
_DETACH = 2
_DIRECT_IO = 1


class SlowFile:
    """``asked`` is set once somebody reads; what they read comes when ``answer`` is."""

    def __init__(self, directory: Path, content: bytes) -> None:
        self.path = directory / "file"
        self.asked, self.answer = threading.Event(), threading.Event()
        self._content = content
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        told = f"fd={self._device},rootmode=40000,user_id=0,group_id=0"
        if _libc.mount(b"ls-test", bytes(directory), b"fuse", 0, told.encode()) != 0:
            raise OSError(ctypes.get_errno(), "mount")
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.answer.set()
        _libc.umount2(bytes(self.path.parent), _DETACH)
        self._thread.join(10)
        os.close(self._device)

    def _serve(self) -> None:
        while True:
            try:
                raw = os.read(self._device, 1 << 18)
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                continue
            _, what, number, node = struct.unpack_from("<IIQQ", raw)
            if what not in (_FORGET, _FORGETS):
                answer = self._answer(what, node, raw[40:])
                code = -errno.ENOSYS if answer is None else 0
                body = answer or b""
                with suppress(OSError):  # who asked has gone
                    os.write(self._device, struct.pack("<IiQ", 16 + len(body), code, number) + body)

    def _answer(self, what: int, node: int, rest: bytes) -> bytes | None:
        if what == _INIT:
            return struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 17, 0, 8, 8, 1 << 17, 1, 0, 0, 0)
        if what == _LOOKUP:
            return struct.pack("<QQQQII", _FILE, 1, 60, 60, 0, 0) + self._about(_FILE)
        if what == _GETATTR:
            return struct.pack("<QII", 60, 0, 0) + self._about(node)
        if what == _OPEN:
            return struct.pack("<QIi", 1, _DIRECT_IO, 0)
        if what == _READ:
            self.asked.set()
            self.answer.wait()
            offset, size = struct.unpack_from("<QI", rest, 8)
            return self._content[offset : offset + size]
        return None

    def _about(self, node: int) -> bytes:
        size = len(self._content) if node == _FILE else 0
        mode = _REGULAR if node == _FILE else _DIRECTORY
        return struct.pack("<6Q10I", node, size, 0, *[0] * 3, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


@contextmanager
def slow_file(directory: Path, content: bytes) -> Iterator[SlowFile]:
    made = SlowFile(directory, content)
    try:
        yield made
    finally:
        made.close()
