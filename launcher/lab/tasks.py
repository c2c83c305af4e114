# SPDX-License-Identifier: Apache-2.0
"""Processes of a lab: told apart by pid and start time, found by the namespaces they are in.

A process belongs to a lab if it is in one of the lab's network namespaces, or in the mount
namespace of one of its hosts, which is known by what is mounted there on /run/liveshift. The
second way also finds capsules, whose network namespaces have names of their own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from ...errors import LiveshiftError
from ...waiting import readable

ROOM_MARK = "/run/liveshift"


class Task(msgspec.Struct, frozen=True):
    """A process for good: a pid may be used again, together with the start time it is not.

    ``started`` is in clock ticks since boot (/proc/pid/stat, field 22).
    """

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Task | None:
        """The process that has this pid now; None when there is none, or only a zombie."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] in "ZX" else cls(pid, int(fields[19]))

    @property
    def alive(self) -> bool:
        return Task.of(self.pid) == self

    def send(self, signum: int) -> None:
        """Send a signal, never to another process that has got the pid since."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if self.alive:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signum)
        finally:
            os.close(pidfd)

    def wait(self, seconds: float) -> bool:
        """Wait until it has ended; False when it has not within this time.

        Process 1 of a pid namespace ends after everything in it, nested namespaces included.
        """
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if not self.alive:
                return True
            return bool(readable(seconds, pidfd))
        finally:
            os.close(pidfd)


def kill(tasks: Iterable[Task], seconds: float = 10.0) -> None:
    """SIGKILL all of them and wait; raises LiveshiftError naming those that do not end."""
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


def pids() -> Iterator[int]:
    """Every process of this machine."""
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def network(pid: int | str) -> int | None:
    """The identity of a process's network namespace; None when it has ended."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except (FileNotFoundError, ProcessLookupError):
        return None


def host_pid(init: int, inner: int) -> int | None:
    """What we call the process that a lab host, whose process 1 is ``init``, calls ``inner``."""
    space = os.stat(f"/proc/{init}/ns/pid").st_ino
    for pid in pids():
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if os.stat(f"/proc/{pid}/ns/pid").st_ino != space:
                continue
            status = Path(f"/proc/{pid}/status").read_text()
            numbers = next(line for line in status.splitlines() if line.startswith("NSpid:"))
            if int(numbers.split()[-1]) == inner:
                return pid
    return None


def belonging(networks: Iterable[int], directory: Path) -> list[Task]:
    """The processes in one of these network namespaces or in a room of the lab in ``directory``."""
    networks = set(networks)
    ours = _on_filesystem(directory)
    rooms: dict[int, bool] = {}  # by mount namespace
    found = []
    for pid in pids():
        # Not permitted: it has more capabilities than we, so it was not started by a lab of ours.
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            space = os.stat(f"/proc/{pid}/ns/mnt").st_ino
            if space not in rooms:
                rooms[space] = _is_room(Path(f"/proc/{pid}/mountinfo").read_text(), ours)
            if rooms[space] or network(pid) in networks:
                task = Task.of(pid)
                found += [task] if task else []
    return found


def _is_room(mountinfo: str, lab: tuple[str, str]) -> bool:
    """Is /run/liveshift, in this mount namespace, the ``run`` of a host of the lab?"""
    for line in mountinfo.splitlines():
        _, _, device, root, point, *_ = line.split()
        if point == ROOM_MARK:
            host, last = os.path.split(root.removesuffix("//deleted"))
            if last == "run" and lab == (device, os.path.dirname(host)):
                return True
    return False


def _on_filesystem(directory: Path) -> tuple[str, str]:
    """Where a directory lies, as mountinfo says it: (device, path inside the file system)."""
    device, root, point = "", "/", "/"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        above = fields[4].rstrip("/") + "/"
        if f"{directory}/".startswith(above) and len(above) >= len(point):  # later mounts cover
            device, root, point = fields[2], fields[3], above
    return device, os.path.normpath(os.path.join(root, os.path.relpath(directory, point)))
