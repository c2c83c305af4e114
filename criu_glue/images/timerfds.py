# SPDX-License-Identifier: Apache-2.0
"""Lets timers of timerfd_create(2) that were set to an absolute time run out when they should.

An image holds the time that was left. For a timer with TFD_TIMER_ABSTIME, CRIU adds the whole
seconds of the present time to that, and sets the sum (criu: restorer.c, timerfd_arm). So such a
timer ran out up to a second too early, and one that had run out before the dump did so again.
Without the flag CRIU sets the time that was left.

A flag that has the program notice changes of the clock (TFD_TIMER_CANCEL_ON_SET) works only beside
TFD_TIMER_ABSTIME. Such a timer keeps both while it runs.
"""

from __future__ import annotations

from pathlib import Path

from ...errors import StepFailed
from .image_kinds import ImageFile
from .protobuf import Damaged, ProtobufMessage, with_messages, with_uint

_TIMER = 12  # of a file_entry (criu: images/fdinfo.proto)
_FLAGS, _SECONDS, _NANOSECONDS = 6, 7, 8  # criu: images/timerfd.proto: settime_flags, vsec, vnsec
_ABSOLUTE, _CANCEL_ON_SET = 1, 2  # linux/timerfd.h


def make_relative(images: Path) -> None:
    """Change the timers of all processes. May be called again.

    Raises StepFailed if the image is damaged or not there."""
    try:
        ImageFile(images / "files.img").change(
            lambda entry: with_messages(entry, _TIMER, _relative)
        )
    except Damaged as error:
        raise StepFailed("verify", f"files.img is damaged: {error}") from error
    except FileNotFoundError:
        raise StepFailed("verify", "the image lacks files.img") from None


def _relative(raw: memoryview) -> bytes:
    timer = ProtobufMessage(raw)
    flags = timer.uint(_FLAGS)
    runs = bool(timer.long(_SECONDS) or timer.long(_NANOSECONDS))
    if not flags & _ABSOLUTE or (runs and flags & _CANCEL_ON_SET):
        return bytes(raw)
    return with_uint(raw, _FLAGS, flags & ~_ABSOLUTE)
