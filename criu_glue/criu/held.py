# SPDX-License-Identifier: Apache-2.0
"""A CRIU process that waits in its hook for a verdict, also for an agent that did not start it.

The hook (criu_hook.c) reports on one FIFO that it waits, and reads the verdict from another. A
file beside them holds CRIU's pid and start time. So a restarted agent finds the CRIU that its
predecessor started, and gives the verdict itself.

CRIU can be started ahead. Then the hook waits a first time, before CRIU touches the tree. If the
agent ends at that stage, CRIU ends too. So a restarted agent need not look for this CRIU.

The directory of these files is hidden in the sandbox, where CRIU works. CRIU gets the directory as
an open descriptor and reaches it as ``/proc/<its pid>/fd/<n>``. CRIU closes all descriptors for its
hook, so the hook enters the directory by the same path. No task of the sandbox can use that path,
because the kernel wants rights over CRIU for it.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from ...waiting import readable
from ..capsule.sandboxes import started
from ..capsule.tree import inner_pid

HOOK = Path(str(files(__package__) / "criu-hook"))

ORPHAN_S = 0.25
LOOK_S = 0.2
LOST_S = 30.0
"""Seconds that CRIU may take to end after its hook got the verdict; it has little to do then."""


class HeldCriu:
    """One CRIU run with a hook that waits. ``directory`` holds the FIFOs and CRIU's log."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._who: tuple[int, int] | None = None
        self._held: int | None = None
        self._said = b""  # what the hook has reported
        self._begin: int | None = None  # our end of the FIFO, if CRIU was started ahead
        self._hooked = False  # True if a hook may be waiting

    def start(
        self,
        prefix: Sequence[str],
        command: Sequence[str],
        action: str,
        mark: tuple[str, str] = ("none", "none"),
        pass_fds: Sequence[int] = (),
        environment: Callable[[int], Mapping[str, str]] | None = None,
        config: str = "",
        begin: str = "",
    ) -> None:
        """Run CRIU (``command``, entering the sandbox by ``prefix``) on the directory's images.

        The hook waits at ``action``. ``mark`` is an action and the name of a file that the hook
        makes in the directory at that action; if the name is a link, the hook makes the link's
        target. ``environment`` returns further variables for CRIU's environment. It gets the
        number of the descriptor under which CRIU has the directory open. ``config`` names a file
        in the directory with further options, which CRIU reads when it begins. ``begin`` is the
        action at which CRIU waits for :meth:`let_begin`.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        for name in ("held", "verdict"):
            (self.directory / name).unlink(missing_ok=True)
            os.mkfifo(self.directory / name, 0o600)
        self._listen()
        self._said = b""
        if begin:
            self._open_begin()
        directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        hook = os.open(HOOK, os.O_RDONLY)
        try:
            own = {"LIVESHIFT_HOOK": " ".join([str(directory), begin or "none", action, *mark])}
            more = environment(directory) if environment else {}
            hook_command = [f"/proc/self/fd/{hook}", "--exec", str(directory), str(hook)]
            options = ["--config", f"/proc/self/fd/{directory}/{config}"] if config else []
            self._process = subprocess.Popen(
                [*prefix, *hook_command, *command, *options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(*pass_fds, directory, hook),
                env={**os.environ, **own, **more},
            )
        finally:
            os.close(directory)
            os.close(hook)
        self._who = (self._process.pid, started(self._process.pid))
        (self.directory / "criu").write_text("{} {}".format(*self._who))

    def take_up(self) -> None:
        """Find the CRIU that an earlier agent started here, if there was one."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            pid, since = (self.directory / "criu").read_text().split()
            self._who = (int(pid), int(since))
            self._hooked = True
            self._listen()  # so that a hook that starts later finds a reader

    def wait_ready(self, seconds: float) -> None:
        """Return when a CRIU that was started ahead is ready to begin, or has ended, but after
        ``seconds`` at the latest."""
        assert self._held is not None
        until = time.monotonic() + seconds
        while not self._hears(b"ready") and self.alive() and time.monotonic() < until:
            self._wait_end(max(0.0, until - time.monotonic()), self._held)

    def let_begin(self) -> None:
        """Let a CRIU begin that was started ahead. It may be called before CRIU is ready."""
        assert self._begin is not None
        os.write(self._begin, b"go\n")

    def alive(self) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        return self._who is not None and self._who[1] != 0 and started(self._who[0]) == self._who[1]

    def wait_held(self, until: float, look: Callable[[], None] = lambda: None) -> bool:
        """Return True once the hook waits, False if CRIU has ended before that.

        Calls ``look`` while it waits. Raises TimeoutError at ``until`` (monotonic seconds), or
        what ``look`` raises."""
        assert self._held is not None
        while True:
            if self._hears(b"held"):
                self._hooked = True
                return True
            if not self.alive():
                return False
            if time.monotonic() > until:
                raise TimeoutError("CRIU did not finish")
            look()
            self._wait_end(min(LOOK_S, until - time.monotonic()), self._held)

    def tell(self, verdict: str, seconds: float, hangs: Callable[[], bool] = lambda: False) -> bool:
        """Send the hook ``go``, ``go N`` or ``stop`` (criu_hook.c) and wait until CRIU has ended.

        The hook need not wait yet. Returns False if CRIU has not ended within ``seconds``, or when
        ``hangs`` returns True. A CRIU that waits to begin gets the verdict too, and then ends."""
        if self._begin is not None:
            os.write(self._begin, f"{verdict}\n".encode())
        with contextlib.suppress(FileNotFoundError):  # CRIU was never started
            # We open the FIFO for both directions: then the open never blocks, and the FIFO keeps
            # the verdict. We also write it if CRIU was killed, because its hook still waits.
            pipe = os.open(self.directory / "verdict", os.O_RDWR | os.O_NONBLOCK)
            try:
                os.write(pipe, f"{verdict}\n".encode())
                if self.alive():
                    until = time.monotonic() + seconds
                    while self.alive() and time.monotonic() < until and not hangs():
                        self._wait_end(min(LOOK_S, max(0.0, until - time.monotonic())))
                elif self._hooked:
                    _wait_read(pipe)
            finally:
                os.close(pipe)
        return not self.alive()

    def tree(self) -> dict[int, int]:
        """The capsule's pid → the host's pid, of all processes below CRIU.

        While CRIU restores a tree, the tree's processes are CRIU's children."""
        found: dict[int, int] = {}
        for pid in self._below():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found[inner_pid(pid)] = pid
        return found

    def kill(self) -> bool:
        """Kill CRIU and the processes below it. What it traces goes on. Returns False if it has not
        ended within LOST_S seconds."""
        if self.alive():
            for pid in self._below():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._wait_end(LOST_S)
        return not self.alive()

    def _below(self) -> list[int]:
        """CRIU and the processes below it, as the host sees them; each comes after its parent."""
        found = [self._who[0]] if self._who is not None else []
        for pid in found:  # which grows meanwhile
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
                found += map(int, children.split())
        return found

    def end(self, seconds: float) -> None:
        """Wait until CRIU ends by itself; after ``seconds`` kill it and the processes below it."""
        if self._process is not None and self._who is not None:
            self._wait_end(seconds)
            self.kill()
        self.close()

    def close(self) -> None:
        """Reap CRIU after its sandbox was ended, and close the FIFO."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LOST_S)
        for end in (self._held, self._begin):
            if end is not None:
                os.close(end)
        self._held = self._begin = None

    def _listen(self) -> None:
        if self._held is None:
            # For both directions: else reads would see end of file while no hook has it open.
            self._held = os.open(self.directory / "held", os.O_RDWR | os.O_NONBLOCK)

    def _hears(self, what: bytes) -> bool:
        """Whether the hook has reported ``what`` by now."""
        assert self._held is not None
        if readable(0, self._held):
            self._said += os.read(self._held, 16)
        return what in self._said

    def _open_begin(self) -> None:
        (self.directory / "begin").unlink(missing_ok=True)
        os.mkfifo(self.directory / "begin", 0o600)
        if self._begin is not None:
            os.close(self._begin)
        # We open the FIFO for both directions. Then the open does not wait for a reader, and the
        # FIFO keeps what we write.
        self._begin = os.open(self.directory / "begin", os.O_RDWR | os.O_NONBLOCK)

    def _wait_end(self, seconds: float, *also: int) -> None:
        """Wait for CRIU's end, or until one of the descriptors ``also`` is readable."""
        assert self._who is not None
        try:
            pidfd = os.pidfd_open(self._who[0])
        except ProcessLookupError:
            return
        try:
            readable(seconds, *also, pidfd)
        finally:
            os.close(pidfd)
        self.alive()  # this reaps CRIU if it is our child


def _wait_read(pipe: int) -> None:
    """Wait until the hook of a killed CRIU has read its verdict, at most ORPHAN_S."""
    until = time.monotonic() + ORPHAN_S
    unread = array.array("i", [1])
    while unread[0] and time.monotonic() < until:
        time.sleep(0.002)
        fcntl.ioctl(pipe, termios.FIONREAD, unread)
