# SPDX-License-Identifier: Apache-2.0
"""The sandbox of a capsule: its namespaces and mounts, and process 1 that stays in it.

The agent builds the sandbox in the same way for a fresh start and for a restore. CRIU dumps and
restores only the tree below process 1. These are private to a capsule and move with it:

``/tmp``        a directory of the capsule on this host (shared paths below /tmp stay visible)
``/dev/shm``    a tmpfs, which also holds the interposer's pages (``PAGES``)
``/dev/pts``    a devpts for its pseudo-terminals, whose numbers are free on every host
``/etc/hosts``  the job's names and mobile addresses

liveshift's own directories of the host (sockets, images, keys, other capsules) are hidden in the
sandbox: empty, read-only directories lie over them. CRIU works in the sandbox's mount namespace, so
it gets its directory as an open descriptor (held.py).
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

from ... import proc_text
from ...errors import LiveshiftError
from ...waiting import readable

PAGES = "/dev/shm/.liveshift"
"""The directory of the interposer pages, one file for each process, as the capsule sees it."""

PRIVATE = ("/tmp/", "/dev/shm/")
"""The directories that every capsule has for itself; all their content moves with it."""

CGROUP = "/sys/fs/cgroup"

PID_FLOOR = 1000
"""The value of ``ns_last_pid`` before the first task. Ids up to this one are left to CRIU and its
helpers (pids.py)."""

STDOUT_FD, STDERR_FD = 20, 21
"""The descriptors at which capsule-init holds the write ends of the command's output pipes."""

OUTPUT_PAGE_FD = 22
"""The descriptor at which capsule-init holds the page that reports the log's state (output.py)."""

LOG_MAX, LOG_KEEP = 64_000_000, 8
"""One log segment has at most LOG_MAX bytes by default, and LOG_KEEP segments are kept."""

KILL_S = 10.0
"""The processes of a sandbox must have ended this many seconds after they were killed."""


@dataclass(frozen=True)
class SandboxPlan:
    """What a sandbox is made of.

    ``directory`` is the capsule's own directory on this host, ``netns`` the file of the network
    namespace to join. ``uid``, ``gid`` and ``groups`` are those of the job's user. The ``shared``
    paths below /tmp or /dev/shm are mounted into the capsule's own directories. ``hidden``
    directories look empty in the sandbox. The log keeps ``log_keep`` files of ``log_max`` bytes.
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
        """The directory of the log, which holds what the command prints (output.py)."""
        return self.directory / "output"

    @property
    def status(self) -> Path:
        return self.directory / "status"

    @property
    def tmp(self) -> Path:
        return self.directory / "tmp"


@dataclass(frozen=True)
class Sandbox:
    """A sandbox that was built; ``init`` is the host's pid of its process 1.

    ``started`` is the start time of process 1 (clock ticks since boot). It differs from that of a
    later process with the same pid. It is 0 if process 1 ended before we read it.
    """

    plan: SandboxPlan
    init: int
    started: int

    @property
    def root(self) -> Path:
        """The capsule's file system as the host can reach it."""
        return Path(f"/proc/{self.init}/root")

    def pipes(self) -> dict[int, int]:
        """The inode of each output pipe → STDOUT_FD or STDERR_FD. Raises FileNotFoundError if
        process 1 or the command has ended."""
        fds = (STDOUT_FD, STDERR_FD)
        return {os.stat(f"/proc/{self.init}/fd/{fd}").st_ino: fd for fd in fds}

    def alive(self) -> bool:
        return bool(self.started) and started(self.init) == self.started


def start(
    plan: SandboxPlan, argv: Sequence[str], env: Mapping[str, str], cwd: str, umask: int = -1
) -> Sandbox:
    """Build the sandbox and start ``argv`` in it as the plan's user. ``umask``: the command's file
    mode creation mask; -1: that of our process.

    Raises LiveshiftError if the sandbox cannot be built; nothing is left then. If the command
    cannot be run, the sandbox ends with status 126 or 127, as in a shell, and the reason is written
    to the command's stderr. The sandbox outlives the command by up to two seconds, while a process
    that the command has left behind can still write to its output (LINGER_MS in capsule_init.c).
    """
    user = _user(plan)
    user += ["--groups", ",".join(map(str, plan.groups))] if plan.groups else []
    user += ["--umask", f"{umask:o}"] if umask >= 0 else []
    ask = [*user, "--chdir", cwd, "--pid-floor", str(PID_FLOOR), "--run", *argv]
    return _build(plan, ask, env)


def build_empty(plan: SandboxPlan, root_pid: int, last_pid: int) -> Sandbox:
    """Build the sandbox for a tree that CRIU will restore, and whose root task has pid
    ``root_pid``.

    The ids of CRIU and its helpers come after ``last_pid`` (:func:`pids.place`). Raises
    LiveshiftError; nothing is left then.
    """
    ask = [*_user(plan), "--pid-floor", str(last_pid), "--restore", str(root_pid)]
    return _build(plan, ask, {"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")})


def _user(plan: SandboxPlan) -> list[str]:
    return ["--uid", str(plan.uid), "--gid", str(plan.gid)]


def hand_over(sandbox: Sandbox) -> None:
    """Let the sandbox end with the root task of the restored tree, which runs now. Repeatable."""
    if sandbox.alive():
        os.kill(sandbox.init, signal.SIGUSR2)


def end(sandbox: Sandbox) -> None:
    """Kill process 1, which ends every task of the sandbox, also frozen ones; wait up to 10 s."""
    try:
        pidfd = os.pidfd_open(sandbox.init)
    except ProcessLookupError:
        return
    try:
        if not sandbox.alive():  # another process may have this pid now
            return
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        readable(KILL_S, pidfd)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


def kill_tree(sandbox: Sandbox) -> None:
    """Kill everything in the sandbox but process 1, which keeps the sandbox's mounts and network.

    Returns once the sandbox is empty, or after KILL_S. Raises ValueError if process 1 is in our own
    pid namespace: then `kill -1` would end everything that runs beside us."""
    if not sandbox.alive():
        return
    try:
        space = _pid_namespace(sandbox.init)
    except OSError:
        return  # it has just ended
    if space == _pid_namespace(os.getpid()):
        name = sandbox.plan.hostname
        raise ValueError(f"process {sandbox.init} is not process 1 of {name}'s own pid namespace")
    until = time.monotonic() + KILL_S
    kill = [*enter(sandbox, "--pid"), "sh", "-c", "kill -KILL -1"]
    while sandbox.alive() and _has_others(space, sandbox.init):
        subprocess.run(kill, capture_output=True, check=False)  # -1 spares process 1 and itself
        if time.monotonic() > until:
            return
        time.sleep(0.002)


def _has_others(space: int, init: int) -> bool:
    """True if a pid namespace has a process besides its process 1, zombies included."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != init:
            with contextlib.suppress(OSError):
                if _pid_namespace(int(name)) == space:
                    return True
    return False


def _pid_namespace(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/pid").st_ino


def enter(sandbox: Sandbox, *spaces: str) -> list[str]:
    """The command prefix that enters the sandbox's mount, uts, pid and network namespaces.

    It does not enter the ipc and time namespaces. CRIU runs outside of them, so it dumps and
    recreates them (System V objects; CLOCK_MONOTONIC without a jump).
    """
    flags = spaces or ("--mount", "--uts", "--pid", "--net")
    return ["nsenter", "--target", str(sandbox.init), *flags, "--"]


def _build(plan: SandboxPlan, ask: list[str], env: Mapping[str, str]) -> Sandbox:
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
        command += ["--bind", CGROUP, CGROUP]  # since the fresh /sys covers it
    for path in sorted(plan.hidden):  # last, since an earlier mount could make one visible again
        command += ["--hide", path]
    command += ask
    done = subprocess.run(command, env=dict(env), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LiveshiftError(
            f"cannot build the sandbox of {plan.hostname}: {done.stderr.strip()}",
            hint="`liveshift doctor` checks the namespaces and privileges this needs",
        )
    init = int(done.stdout)
    return Sandbox(plan, init, started(init))


def started(pid: int) -> int:
    """When a process was started (proc(5), stat field 22); 0 if it is gone or a zombie."""
    try:
        fields = proc_text.read(f"/proc/{pid}/stat").rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
