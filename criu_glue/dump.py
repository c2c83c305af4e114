# SPDX-License-Identifier: Apache-2.0
"""Freeze and dump a capsule's tree with CRIU, and hold it frozen until someone decides.

CRIU runs with ``--leave-running`` and calls our hook at ``post-dump``, when every image is
written and the tasks are still stopped. The hook says so on one FIFO and blocks on another:

- thaw:   the hook exits 1, CRIU lets every task go on, sockets and all (nothing was lost);
- commit: nobody answers; the room's process 1 is killed, which ends tasks, CRIU and hook at once.

Without ``--leave-running`` an error inside CRIU kills or damages the source (facts: sockets
stay in repair mode), so the kill is always ours.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from pathlib import Path

from ..errors import StepFailed
from .capture import Capture, Sink
from .explain import explain
from .room import STDERR_FD, STDOUT_FD, Room, enter
from .tool import Criu

HOOK = """#!/bin/sh
# Run by CRIU in the capsule's namespaces; blocks at post-dump until the agent has decided.
[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0
echo held > {directory}/held || exit 1
read verdict < {directory}/verdict
exit 1
"""

COMMON = ("--tcp-established", "--network-lock", "skip", "--ghost-limit", "4G", "--file-locks")
"""Options that dump and restore share: the lock is ours (network.py), deleted files are carried."""


class FrozenTree:
    """A tree that CRIU dumps and then holds frozen.

    After :meth:`dump` returned the tasks are stopped and every image byte went to the sink.
    After an error in it, or after :meth:`thaw`, they run on as before. The network lock is the
    caller's.
    """

    def __init__(self, criu: Criu, room: Room, root_pid: int, directory: Path) -> None:
        self._criu = criu
        self._room = room
        self._root_pid = root_pid
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._held: int | None = None
        self._capture: Capture | None = None
        self.image_bytes = 0

    def dump(self, sink: Sink, deadline_s: float) -> None:
        """Freeze and dump; raises StepFailed (tasks running again) or what the sink raised."""
        self._prepare_directory()
        self._capture = Capture(self._directory, sink)
        self._held = os.open(self._directory / "held", os.O_RDONLY | os.O_NONBLOCK)
        command = [*enter(self._room), *self._criu.command(*self._options())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            self._wait_held(self._process, time.monotonic() + deadline_s)
            self._capture.wait_idle(deadline_s)
        except BaseException as failed:
            self.thaw()
            if self._capture.error:  # why CRIU could not write on
                raise self._capture.error from failed
            raise
        self.image_bytes = self._capture.bytes

    def thaw(self) -> None:
        """Let the tasks go on at the source. Safe to call at any time, more than once."""
        if self._process is None:
            return
        if self._capture is not None:
            self._capture.close()  # a CRIU that still writes images gives up and lets go
        if self._process.poll() is None:
            # Opened for both directions, so that this never blocks, hook there or not.
            verdict = os.open(self._directory / "verdict", os.O_RDWR | os.O_NONBLOCK)
            os.write(verdict, b"thaw\n")
            self._process.wait(30)
            os.close(verdict)
        self._close()

    def release(self) -> None:
        """Clean up after the room was ended: CRIU and its hook are gone with it."""
        if self._capture is not None:
            self._capture.close()
        if self._process is not None:
            self._process.wait(30)
        self._close()

    def _close(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _prepare_directory(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        for name in ("held", "verdict"):
            (self._directory / name).unlink(missing_ok=True)
            os.mkfifo(self._directory / name, 0o600)
        hook = self._directory / "dump-hook"
        hook.write_text(HOOK.format(directory=self._directory))
        hook.chmod(0o700)

    def _options(self) -> list[str]:
        external = [
            arg
            for fd in (STDOUT_FD, STDERR_FD)
            for arg in ("--external", f"pipe:[{self._room.pipe_inode(fd)}]")
        ]
        return [
            "dump",
            "--tree",
            str(self._root_pid),
            "--images-dir",
            str(self._directory),
            "--log-file",
            "dump.log",
            "-v2",
            "--stream",
            "--leave-running",
            *COMMON,
            *external,
            "--action-script",
            str(self._directory / "dump-hook"),
        ]

    def _wait_held(self, process: subprocess.Popen[bytes], until: float) -> None:
        assert self._held is not None
        pidfd = os.pidfd_open(process.pid)
        try:
            while True:
                left = until - time.monotonic()
                ready, _, _ = select.select([self._held, pidfd], [], [], max(0.0, left))
                if self._held in ready and os.read(self._held, 16):
                    return
                if pidfd in ready:
                    raise StepFailed(
                        "dump",
                        f"CRIU could not dump {self._room.plan.hostname}: "
                        + explain(self._directory / "dump.log"),
                        hint="the job runs on at its host; `liveshift events` keeps the log's end",
                    )
                if left <= 0:
                    raise StepFailed("dump", "CRIU did not finish within its deadline")
                if self._held in ready:  # end of file before the hook has opened its end
                    time.sleep(0.001)
        finally:
            os.close(pidfd)
