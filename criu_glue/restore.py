# SPDX-License-Identifier: Apache-2.0
"""Restore a capsule's tree with CRIU into a room that stands empty.

The network of the room is locked and stays so until CRIU's ``post-restore`` hook: after the
sockets exist and before they leave repair mode and re-send their queues. Earlier the kernel
answers the peers with RST; later every first retransmission is lost and costs seconds.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from ..errors import StepFailed
from . import network
from .dump import COMMON
from .explain import explain
from .room import STDERR_FD, STDOUT_FD, Room, end, enter
from .tool import Criu

HOOK = """#!/bin/sh
# Run by CRIU in the capsule's namespaces: opens the network right before sockets leave repair.
[ "$CRTOOLS_SCRIPT_ACTION" = post-restore ] || exit 0
date +%s.%N > {directory}/unlocked
exec {unlock}
"""


def restore(criu: Criu, room: Room, images: Path, pipes: dict[int, int], deadline_s: float) -> None:
    """Restore the tree from ``images``; the tasks run when this returns.

    ``pipes`` maps the dumped tree's pipe inodes (stdout, stderr) to STDOUT_FD or STDERR_FD.
    Raises StepFailed: then no task runs here, and the room is still locked and to be ended by
    the caller.
    """
    hook = images / "restore-hook"
    hook.write_text(HOOK.format(directory=images, unlock=" ".join(network.UNLOCK)))
    hook.chmod(0o700)
    ends = {fd: os.open(f"/proc/{room.init}/fd/{fd}", os.O_WRONLY) for fd in (STDOUT_FD, STDERR_FD)}
    inherit = [
        arg
        for inode, fd in pipes.items()
        for arg in ("--inherit-fd", f"fd[{ends[fd]}]:pipe:[{inode}]")
    ]
    options = ["restore", "--images-dir", str(images), "--log-file", "restore.log", "-v2"]
    options += ["--restore-detached", *COMMON, *inherit, "--action-script", str(hook)]
    try:
        done = subprocess.run(
            [*enter(room), *criu.command(*options)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=tuple(ends.values()),
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        end(room)  # nsenter is gone, CRIU below it is not: it must not come up after all
        raise StepFailed("restore", f"CRIU did not finish within {deadline_s:g} s") from late
    finally:
        for write_end in ends.values():
            os.close(write_end)
    if done.returncode != 0:
        raise StepFailed(
            "restore",
            f"CRIU could not restore {room.plan.hostname}: {explain(images / 'restore.log')}",
        )


def unlocked_at(images: Path) -> float | None:
    """When the hook opened the network, in seconds since the epoch; None if it has not."""
    try:
        return float((images / "unlocked").read_text())
    except (FileNotFoundError, ValueError):
        return None
