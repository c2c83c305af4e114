# SPDX-License-Identifier: Apache-2.0
"""Makes a poll(2) without timeout go on after a move, as it does after a stop.

To stop a thread, the kernel interrupts its system call, and later restarts most calls so that the
program does not notice. CRIU restarts calls too, but not those for which the kernel keeps a record
(ERESTART_RESTARTBLOCK; compel: infect.c, compel_get_task_regs). These return EINTR after a restore.
A program without signals does not expect EINTR: script(1), for example, ends at once. So we set a
thread that was in a poll without timeout back to its call: ``ax`` is the call's number again, and
``ip`` points to the instruction. Only the kernel knew how much of a timeout was left, so a poll
with a timeout still returns EINTR.

The image is unambiguous: the kernel lets poll return EINTR only if a signal handler must run, and
then ``ax`` is the signal's number.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable

from .image_kinds import ImageFile
from .protobuf import ProtobufMessage, varint

_X86_64, _NATIVE = 1, 1  # criu: images/core.proto, core-x86.proto
_AX, _DX, _ORIG_AX, _IP, _MODE = 11, 13, 16, 17, 28
_POLL = 7
_SYSCALL = 2  # bytes of the syscall instruction
_EINTR = (1 << 64) - errno.EINTR
_MARK = bytes((_AX << 3,)) + b"\xfc" + b"\xff" * 8 + b"\x01"
"""The bytes of ``ax`` = -EINTR in an image."""

Registers = dict[int, tuple[slice, int]]


def begin_again(files: Iterable[ImageFile]) -> int:
    """Change the checked images of threads in an endless poll; returns how many were changed.

    Raises protobuf.Damaged or OSError.
    """
    return sum(file.kind == "core" and _begin_again(file) for file in files)


def _begin_again(file: ImageFile) -> bool:
    if _MARK not in bytes(file.entries[0]):
        return False
    image = bytearray(file.path.read_bytes())
    core = ProtobufMessage(memoryview(image)[-len(file.entries[0]) :])
    thread = core.message(2)
    raw = thread.raw(2) if thread is not None else None
    if core.uint(1) != _X86_64 or raw is None:
        return False
    found = _registers(raw)
    seen = {number: value for number, (_, value) in found.items()}
    if (seen.get(_AX), seen.get(_ORIG_AX), seen.get(_MODE, _NATIVE)) != (_EINTR, _POLL, _NATIVE):
        return False
    endless = seen.get(_DX, 0) & 1 << 31  # the third argument, an int, is negative
    if not endless or seen.get(_IP, 0) < _SYSCALL:
        return False
    _put(raw, found[_AX][0], _POLL)
    _put(raw, found[_IP][0], seen[_IP] - _SYSCALL)
    file.path.write_bytes(image)
    return True


def _registers(raw: memoryview) -> Registers:
    """Field number → the position of its value, and the value; every field is a number."""
    found: Registers = {}
    at = 0
    while at < len(raw):
        key, begin = varint(raw, at)
        value, at = varint(raw, begin)
        found[key >> 3] = slice(begin, at), value
    return found


def _put(raw: memoryview, where: slice, value: int) -> None:
    """Write a number over a larger one in the same number of bytes; a varint may be padded."""
    size = where.stop - where.start
    digits = [value >> 7 * n & 0x7F | 0x80 for n in range(size)]
    digits[-1] &= 0x7F
    raw[where] = bytes(digits)
