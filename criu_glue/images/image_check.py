# SPDX-License-Identifier: Apache-2.0
"""Checks a capsule's images before CRIU, which runs as root, reads them.

Every file must be of a kind that a capsule's image has, and its frame must be whole. The files that
CRIU needs must be there. image_rights.py checks what a user's capsule may be restored with.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ...errors import StepFailed
from ..files.rights import User
from . import file_locks, ghosts, image_rights
from .image_kinds import ALWAYS, ImageFile
from .protobuf import Damaged, ProtobufMessage

_TASK_ENDED = (2, 6)  # compel: task-state.h (dead, zombie)
_OF_A_TASK = ("ids", "fs", "mm", "pagemap")


def prepare(images: Path, user: User, root: Path) -> None:
    """Check the images, and change what CRIU could not restore, or would restore differently.

    ``user`` is the capsule's user, ``root`` the file system of the sandbox into which CRIU
    restores. Raises StepFailed, which names the file, if CRIU must not see the image, also because
    of a file lock for which CRIU would wait; or OSError.
    """
    files = _read(images)
    try:
        _check_complete(files)
        ghosts.bring_home(files, root)
        image_rights.check(files, user, root)  # after bring_home has changed them
        file_locks.refuse_held(images, root)
    except Damaged as error:
        raise StepFailed("verify", f"the image is damaged: {error}") from error


def _read(images: Path) -> dict[str, ImageFile]:
    return {
        name.removesuffix(".img"): ImageFile(images / name)
        for name in sorted(os.listdir(images))
        if name.endswith(".img")  # the others are ours; no stream has such a name
    }


def _check_complete(files: Mapping[str, ImageFile]) -> None:
    missing = [name for name in ALWAYS if name not in files]
    if not missing:
        tasks = [ProtobufMessage(entry) for entry in files["pstree"].entries]
        if not tasks:
            raise files["pstree"].refusal("without any task")
        for task in tasks:
            missing += _missing_of(files, task)
    if missing:
        names = ", ".join(f"{name}.img" for name in missing[:5])
        raise StepFailed("verify", f"the image is not complete: {names} is missing")


def _missing_of(files: Mapping[str, ImageFile], task: ProtobufMessage) -> list[str]:
    pid = task.uint(1)
    core = files.get(f"core-{pid}")
    if core is None:
        return [f"core-{pid}"]
    if has_ended(ProtobufMessage(core.entries[0])):
        return []
    needed = [f"{kind}-{pid}" for kind in _OF_A_TASK]
    needed += [f"core-{thread}" for thread in task.uints(5)]
    return [name for name in needed if name not in files]


def has_ended(core: ProtobufMessage) -> bool:
    """True if a core image is of an ended task whose parent has not read its status yet."""
    about = core.message(3)
    return about is not None and about.uint(1) in _TASK_ENDED
