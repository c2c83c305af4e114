# SPDX-License-Identifier: Apache-2.0
"""Lets processes that were stopped (SIGSTOP) only for their move go on after it.

CRIU notes whether a process was stopped, and stops it again after the restore. A process with
device state is stopped by its agent before the dump, so that it runs no instruction without its
device memory (runtime/agent/gpu/devices.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ...errors import StepFailed
from .image_kinds import ImageFile
from .protobuf import Damaged, ProtobufMessage, with_messages, with_uint

_ABOUT_TASK, _STATE = 3, 1  # criu: images/core.proto (tc, task_state)
_ALIVE, _STOPPED = 1, 3  # criu: compel/include/uapi/task-state.h


def was_stopped(core: Path) -> bool:
    """Whether the process of this core image was stopped when it was dumped."""
    about = ProtobufMessage(ImageFile(core).entries[0]).message(_ABOUT_TASK)
    return about is not None and about.uint(_STATE) == _STOPPED


def let_go_on(images: Path, pids: Iterable[int]) -> None:
    """Note that these processes (the capsule's pids) ran. May be called again.

    Raises StepFailed if an image is missing or damaged."""
    for pid in pids:
        path = images / f"core-{pid}.img"
        try:
            ImageFile(path).change(lambda entry: with_messages(entry, _ABOUT_TASK, _running))
        except Damaged as error:
            raise StepFailed("verify", f"{path.name} is damaged: {error}") from error
        except FileNotFoundError:
            raise StepFailed("verify", f"the image lacks process {pid}") from None


def _running(about: memoryview) -> bytes:
    stopped = ProtobufMessage(about).uint(_STATE) == _STOPPED
    return with_uint(about, _STATE, _ALIVE) if stopped else bytes(about)
