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
from .protobuf import ProtobufMessage, with_message, with_uint

_MACHINE, _THREAD, _REGISTERS = 1, 2, 2  # criu: images/core.proto, core-x86.proto
_X86_64, _NATIVE = 1, 1
_AX, _DX, _ORIG_AX, _IP, _MODE = 11, 13, 16, 17, 28
_POLL = 7
_SYSCALL = 2  # bytes of the syscall instruction
_EINTR = (1 << 64) - errno.EINTR
_MARK = bytes((_AX << 3,)) + b"\xfc" + b"\xff" * 8 + b"\x01"
"""The bytes of ``ax`` = -EINTR in an image."""


def begin_again(files: Iterable[ImageFile]) -> None:
    """Change the checked images of threads in an endless poll.

    Raises protobuf.Damaged or OSError.
    """
    for file in files:
        if file.kind == "core":
            file.change(_begun_again)


def _begun_again(raw: memoryview) -> bytes:
    as_it_is = bytes(raw)
    if _MARK not in as_it_is:
        return as_it_is
    core = ProtobufMessage(raw)
    thread = core.raw(_THREAD)
    registers = ProtobufMessage(thread).raw(_REGISTERS) if thread is not None else None
    if thread is None or registers is None or core.uint(_MACHINE) != _X86_64:
        return as_it_is
    seen = ProtobufMessage(registers)
    state = seen.long(_AX), seen.long(_ORIG_AX), seen.uint(_MODE, _NATIVE)
    if state != (_EINTR, _POLL, _NATIVE):
        return as_it_is
    endless = seen.long(_DX) & 1 << 31  # the third argument, an int, is negative
    if not endless or seen.long(_IP) < _SYSCALL:
        return as_it_is
    called = memoryview(with_uint(registers, _AX, _POLL))
    called_again = with_uint(called, _IP, seen.long(_IP) - _SYSCALL)
    return with_message(raw, _THREAD, with_message(thread, _REGISTERS, called_again))
