# SPDX-License-Identifier: Apache-2.0
"""Processes of a lab: identified by pid and start time, found by the namespaces they are in.

A process belongs to a lab if it is in one of the lab's network namespaces, or in the mount
namespace of one of its hosts. What is mounted on /run/liveshift shows whose mount namespace it is.
The second way also finds capsules, whose network namespaces have names of their own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from psutil import pids

from ... import proc_text
from ...errors import LiveshiftError
from ...waiting import readable

SANDBOX_MARK = "/run/liveshift"


class Task(msgspec.Struct, frozen=True):
    """One process: a later one may have its pid, but not together with its start time.

    ``started`` is in clock ticks since boot (/proc/pid/stat, field 22).
    """

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Task | None:
        """Return the process that has this pid now; None if there is none, or only a zombie."""
        try:
            fields = proc_text.read(f"/proc/{pid}/stat").rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] in "ZX" else cls(pid, int(fields[19]))

    @property
    def alive(self) -> bool:
        return Task.of(self.pid) == self

    def send(self, signum: int) -> None:
        """Send a signal, but never to another process that has got the pid since."""
        with self._pidfd() as pidfd, suppress(ProcessLookupError):
            if pidfd is not None:
                signal.pidfd_send_signal(pidfd, signum)

    def wait(self, seconds: float) -> bool:
        """Wait until it has ended; False if it has not after this many seconds.

        Process 1 of a pid namespace ends after everything in it, nested namespaces included.
        """
        with self._pidfd() as pidfd:
            return pidfd is None or bool(readable(seconds, pidfd))

    @contextmanager
    def _pidfd(self) -> Iterator[int | None]:
        """Yield a descriptor of this very process; None if it has ended."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            yield None
            return
        try:
            yield pidfd if self.alive else None
        finally:
            os.close(pidfd)


def kill(tasks: Iterable[Task], seconds: float = 10.0) -> None:
    """Send SIGKILL to all of them and wait. Raises LiveshiftError that names those that do not
    end."""
    until = time.monotonic() + seconds
    tasks = list(tasks)
    for task in tasks:
        task.send(signal.SIGKILL)
    stuck = [task.pid for task in tasks if not task.wait(until - time.monotonic())]
    if stuck:
        raise LiveshiftError(
            f"processes {', '.join(map(str, stuck))} do not end within {seconds:g} s of SIGKILL",
            hint="`ps -o pid,stat,wchan,args -p PID`: state D waits for a device or file server",
        )


def network(pid: int | str) -> int | None:
    """Return the inode of a process's network namespace; None if the process has ended."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except (FileNotFoundError, ProcessLookupError):
        return None


def host_pid(init: int, inner: int) -> int | None:
    """Return our pid of the process that has pid ``inner`` in a lab host, whose process 1 is
    ``init``."""
    space = os.stat(f"/proc/{init}/ns/pid").st_ino
    pid: int
    for pid in pids():
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if os.stat(f"/proc/{pid}/ns/pid").st_ino != space:
                continue
            status = proc_text.lines(f"/proc/{pid}/status")
            numbers = next(line for line in status if line.startswith("NSpid:"))
            if int(numbers.split()[-1]) == inner:
                return pid
    return None


def belonging(networks: Iterable[int], directory: Path) -> list[Task]:
    """Return the processes in one of these network namespaces or in a sandbox of the lab in
    ``directory``."""
    networks = set(networks)
    ours = _on_filesystem(directory)
    sandboxes: dict[int, bool] = {}  # by mount namespace
    found = []
    for pid in pids():
        # Not permitted: it has more capabilities than we have, so no lab of ours started it.
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            space = os.stat(f"/proc/{pid}/ns/mnt").st_ino
            if space not in sandboxes:
                sandboxes[space] = _is_sandbox(proc_text.lines(f"/proc/{pid}/mountinfo"), ours)
            if sandboxes[space] or network(pid) in networks:
                task = Task.of(pid)
                found += [task] if task else []
    return found


def _is_sandbox(mounts: list[str], lab: tuple[str, str]) -> bool:
    """Whether /run/liveshift, in this mount namespace, is the ``run`` of a host of the lab."""
    for line in mounts:
        _, _, device, root, point, *_ = line.split()
        if point == SANDBOX_MARK:
            host, last = os.path.split(root.removesuffix("//deleted"))
            if last == "run" and lab == (device, os.path.dirname(host)):
                return True
    return False


def _on_filesystem(directory: Path) -> tuple[str, str]:
    """Return where a directory lies, as mountinfo says it: (device, path in the file system)."""
    device, root, point = "", "/", "/"
    for line in proc_text.lines("/proc/self/mountinfo"):
        fields = line.split()
        above = fields[4].rstrip("/") + "/"
        # A later mount covers an earlier one at the same point.
        if f"{directory}/".startswith(above) and len(above) >= len(point):
            device, root, point = fields[2], fields[3], above
    return device, os.path.normpath(os.path.join(root, os.path.relpath(directory, point)))
