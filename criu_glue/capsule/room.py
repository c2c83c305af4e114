# SPDX-License-Identifier: Apache-2.0
"""The room of a capsule: its namespaces and mounts, and process 1 that stays in it.

The agent builds the room the same way for a fresh start and for a restore; CRIU dumps and
restores only the tree below process 1. What is private to a capsule and moves with it:

``/tmp``        a directory of the capsule on this host (shared paths below /tmp stay visible)
``/dev/shm``    a tmpfs, which also holds the interposer's pages (``PAGES``)
``/dev/pts``    a devpts: its pseudo-terminals, whose numbers are free wherever it comes
``/etc/hosts``  the job's names and mobile addresses

Hidden from it are the host's own directories of liveshift (sockets, images, keys, other capsules):
empty ones that cannot be written into lie over them. CRIU, which works in the room's mount
namespace, is handed its directory as an open one (held.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ...errors import LiveshiftError
from ...waiting import readable

PAGES = "/dev/shm/.liveshift"
"""Where the interposer leaves a page per process, as the capsule sees it."""

PRIVATE = ("/tmp/", "/dev/shm/")
"""What every capsule has of its own; all of it goes along."""

CGROUP = "/sys/fs/cgroup"

PID_FLOOR = 1000
"""Pids below this are left to CRIU and its helpers (``ns_last_pid`` before the first task); see
pids.py."""

STDOUT_FD, STDERR_FD = 20, 21
"""Where capsule-init keeps the write ends of the command's stdout and stderr pipes."""

OUTPUT_PAGE_FD = 22
"""Where it keeps what it says of the log (output.py)."""

LOG_MAX, LOG_KEEP = 64_000_000, 8
"""Bytes of one segment of the log, and how many segments are kept, where nothing else is said."""


@dataclass(frozen=True)
class RoomPlan:
    """What a room is made of.

    ``directory`` is the capsule's own directory on this host, ``netns`` the file of the network
    namespace to join; ``uid``, ``gid`` and ``groups`` are those of the person who asked. Of
    ``shared`` those that lie below /tmp or /dev/shm are mounted into the capsule's own.
    ``hidden`` directories look empty inside. What the command prints is kept in ``log_keep`` files
    of ``log_max`` bytes.
    """

    directory: Path
    netns: Path
    hostname: str
    hosts_file: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    shared: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    log_max: int = LOG_MAX
    log_keep: int = LOG_KEEP

    @property
    def log(self) -> Path:
        """The directory of what the command prints (output.py)."""
        return self.directory / "output"

    @property
    def status(self) -> Path:
        return self.directory / "status"

    @property
    def tmp(self) -> Path:
        return self.directory / "tmp"


@dataclass(frozen=True)
class Room:
    """A room that stands: ``init`` is process 1's pid as the host sees it.

    ``started`` (clock ticks since boot) tells it from a later process of the same pid; 0 when it
    had ended before anyone looked.
    """

    plan: RoomPlan
    init: int
    started: int

    @property
    def root(self) -> Path:
        """The capsule's file system as the host can reach it."""
        return Path(f"/proc/{self.init}/root")

    def pipe_inode(self, fd: int) -> int:
        return os.stat(f"/proc/{self.init}/fd/{fd}").st_ino

    def alive(self) -> bool:
        return bool(self.started) and started(self.init) == self.started


def start(plan: RoomPlan, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> Room:
    """Build the room and start ``argv`` in it as the plan's user.

    Raises LiveshiftError when the room cannot be built; nothing is left then. A command that
    cannot be run ends the room with status 126 or 127, as a shell would, and says why on its
    own stderr.
    """
    user = ["--uid", str(plan.uid), "--gid", str(plan.gid)]
    user += ["--groups", ",".join(map(str, plan.groups))] if plan.groups else []
    ask = [*user, "--chdir", cwd, "--pid-floor", str(PID_FLOOR), "--run", *argv]
    return _build(plan, ask, env)


def build_empty(plan: RoomPlan, root_pid: int, last_pid: int) -> Room:
    """Build the room for a tree that CRIU will restore, its root task having pid ``root_pid``.

    ``last_pid``: after it come the ids of CRIU and its helpers (:func:`pids.place`). Raises
    LiveshiftError; nothing is left then.
    """
    ask = ["--pid-floor", str(last_pid), "--adopt", str(root_pid)]
    return _build(plan, ask, {"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")})


def adopt(room: Room) -> None:
    """The restored tree runs: from now on the end of its root task is the room's. Repeatable."""
    if room.alive():
        os.kill(room.init, signal.SIGUSR2)


def end(room: Room) -> None:
    """Kill process 1, and with it every task of the room, frozen ones too; wait until it is so."""
    try:
        pidfd = os.pidfd_open(room.init)
    except ProcessLookupError:
        return
    try:
        if not room.alive():  # the pid is another's by now
            return
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        readable(10, pidfd)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


def evict(room: Room, seconds: float = 10.0) -> bool:
    """Kill everything in the room but process 1, which keeps what is mounted there and the
    network; returns whether the room then stands empty. False too when process 1 has ended."""
    if not room.alive():
        return False
    until = time.monotonic() + seconds
    kill = [*enter(room, "--pid"), "sh", "-c", "kill -KILL -1"]
    while room.alive() and _others(room):
        subprocess.run(kill, capture_output=True, check=False)  # it spares process 1 and itself
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return room.alive()


def _others(room: Room) -> bool:
    """Whether any process but its first is in the room's pid namespace, zombies included."""
    space = os.stat(f"/proc/{room.init}/ns/pid").st_ino
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != room.init:
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}/ns/pid").st_ino == space:
                    return True
    return False


def enter(room: Room, *spaces: str) -> list[str]:
    """The command prefix that enters the room: mount, uts, pid and network namespace.

    Not its ipc and time namespaces: CRIU, run from outside those, dumps and recreates them
    (System V objects; CLOCK_MONOTONIC without a jump).
    """
    flags = spaces or ("--mount", "--uts", "--pid", "--net")
    return ["nsenter", "--target", str(room.init), *flags, "--"]


def _build(plan: RoomPlan, ask: list[str], env: Mapping[str, str]) -> Room:
    plan.tmp.mkdir(parents=True, exist_ok=True)
    plan.tmp.chmod(0o1777)
    plan.log.mkdir(mode=0o700, exist_ok=True)
    hosts = plan.directory / "hosts"
    hosts.write_text(plan.hosts_file)
    command = [str(files(__package__) / "capsule-init")]
    command += ["--netns", str(plan.netns), "--hostname", plan.hostname]
    command += ["--log", str(plan.log), "--log-max", str(plan.log_max)]
    command += ["--log-keep", str(plan.log_keep), "--status", str(plan.status)]
    command += ["--bind", str(plan.tmp), "/tmp", "--tmpfs", "/dev/shm"]
    command += ["--open-directory", PAGES]
    for path in plan.shared:
        if path.startswith(PRIVATE):
            command += ["--bind", path, path]
    command += ["--bind", str(hosts), "/etc/hosts", "--proc", "--sysfs", "--devpts"]
    if os.path.ismount(CGROUP):
        command += ["--bind", CGROUP, CGROUP]  # the fresh /sys covers it
    for path in sorted(plan.hidden):  # after all that could bring one of them back
        command += ["--hide", path]
    command += ask
    done = subprocess.run(command, env=dict(env), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LiveshiftError(
            f"cannot build the room of {plan.hostname}: {done.stderr.strip()}",
            hint="`liveshift doctor` checks the namespaces and privileges this needs",
        )
    init = int(done.stdout)
    return Room(plan, init, started(init))


def started(pid: int) -> int:
    """When a process was started (proc(5), stat field 22); 0 when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
