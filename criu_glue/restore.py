# SPDX-License-Identifier: Apache-2.0
"""Restore a capsule's tree with CRIU into a room that stands empty, in two steps.

``bring_up`` ends in CRIU's ``post-restore`` hook: tasks and sockets exist, no task runs, sockets
are in repair mode, the network is locked. There it waits until the agent knows that the tree may
run. ``let_run`` opens the network in that hook: earlier the kernel answers the peers with RST;
later every first retransmission is lost and costs seconds. Then CRIU lets the tasks go.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from ..errors import LiveshiftError, StepFailed
from . import network
from .dump import COMMON
from .explain import explain
from .held import HeldCriu
from .room import STDERR_FD, STDOUT_FD, Room, adopt, enter, evict
from .tool import Criu

STOP_S = 5.0
"""For a CRIU that was told to stop to take back what it did; then it is killed."""

RESUMED = """post-resume)
    : > resumed
    ;;"""


class RestoringTree:
    """A tree on its way back to life in ``room``, from the image files in ``images``."""

    def __init__(self, room: Room, images: Path) -> None:
        self._room = room
        self._images = images
        self._criu = HeldCriu(images)

    def bring_up(self, criu: Criu, pipes: dict[int, int], deadline_s: float) -> None:
        """Restore up to where the tasks would run.

        ``pipes`` maps the dumped tree's pipe inodes (stdout, stderr) to STDOUT_FD or STDERR_FD.
        Raises StepFailed: then no task is left here, and the room is empty and locked as before.
        """
        (self._images / "resumed").unlink(missing_ok=True)
        options = ["restore", "--log-file", "restore.log", "-v2", "--restore-detached", *COMMON]
        ends: dict[int, int] = {}
        try:
            for fd in (STDOUT_FD, STDERR_FD):
                ends[fd] = os.open(f"/proc/{self._room.init}/fd/{fd}", os.O_WRONLY)
            for inode, fd in pipes.items():
                options += ["--inherit-fd", f"fd[{ends[fd]}]:pipe:[{inode}]"]
            self._criu.start(
                enter(self._room),
                criu.command(*options),
                "post-restore",
                go=f"date +%s.%N > unlocked; exec {' '.join(network.UNLOCK)}",
                after=RESUMED,
                pass_fds=tuple(ends.values()),
            )
        except FileNotFoundError as gone:
            raise self._failed("its room has ended") from gone
        finally:
            for write_end in ends.values():
                os.close(write_end)
        try:
            held = self._criu.wait_held(time.monotonic() + deadline_s)
        except TimeoutError:
            self.drop()
            raise self._failed(f"CRIU did not finish within {deadline_s:g} s") from None
        if not held:
            self.drop()
            raise self._failed(explain(self._images / "restore.log"))

    def let_run(self, deadline_s: float) -> None:
        """Open the network and let the tasks run; raises StepFailed when none of them did."""
        ended = self._criu.tell("go", deadline_s)
        if not self.resumed():
            self.drop()
            why = explain(self._images / "restore.log") if ended else "CRIU did not finish"
            raise self._failed(why)
        self._criu.close()
        adopt(self._room)

    def take_up(self) -> None:
        """Go on where an earlier agent left."""
        self._criu.take_up()

    def resumed(self) -> bool:
        """Whether the tasks were let go."""
        return (self._images / "resumed").exists()

    def drop(self) -> None:
        """End whatever there is of the tree; the room stays, as far as it still stands.

        CRIU is told first: it takes away what it has put into the room, such as ghost files.
        """
        self._criu.tell("stop", STOP_S)
        evict(self._room)
        if (self._images / "unlocked").exists():
            self._lock_again()
        self._criu.close()

    def _lock_again(self) -> None:
        """Without its tree the kernel would turn the capsule's peers away."""
        try:
            network.lock(self._room.init)
        except LiveshiftError:
            if not self._ends():
                raise
        (self._images / "unlocked").unlink()

    def _ends(self) -> bool:
        """Whether its room is ending, as an adopted one does after its tree."""
        until = time.monotonic() + STOP_S
        while self._room.alive() and time.monotonic() < until:
            time.sleep(0.01)
        return not self._room.alive()

    def _failed(self, why: str) -> StepFailed:
        return StepFailed("restore", f"CRIU could not restore {self._room.plan.hostname}: {why}")
