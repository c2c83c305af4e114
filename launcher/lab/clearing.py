# SPDX-License-Identifier: Apache-2.0
"""Removes a lab, found by lab.json and by what exists of it, in any state.

Only what belongs to the lab is touched: processes in its namespaces, its named network namespaces,
mounts below its directory, the directory. Every step may be repeated, at any point.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from psutil import pids

from ...criu_glue.capsule.mounts import below, mount_table
from ...errors import LiveshiftError, NotFound, NotPermitted, Refused
from . import plan, wiring
from .commands import run
from .record import claim, refuse_inside, root
from .tasks import Task, belonging, kill, network

_END_S = 20.0
"""Processes may take this many seconds to end after SIGKILL. A large one frees its memory first."""


def down(name: str) -> None:
    """Remove a lab and everything in it. Without such a lab nothing happens.

    Raises Refused if another command works on the lab or if it lives under another root directory,
    NotPermitted without root, LiveshiftError if something does not go away.
    """
    directory = root() / plan.checked_name(name)
    if not directory.exists() and not wiring.namespaces(name):
        return
    if os.geteuid() != 0:
        raise NotPermitted("removing a lab needs root", hint=f"sudo liveshift lab down {name}")
    refuse_inside()
    try:
        with claim(directory):
            clear(name, directory)
    except NotFound:  # only the namespaces are left, or they are a namesake's
        clear(name, directory)


def refuse_namesake(name: str, directory: Path) -> None:
    """Raise Refused if a lab of this name lives under another root directory."""
    of = wiring.owner(name)
    if of is not None and of != directory and of.exists():
        raise Refused(
            f'lab "{name}" belongs to {of}', hint=f"LIVESHIFT_LAB_ROOT={of.parent} leads there"
        )


def clear(name: str, directory: Path) -> None:
    """Remove the lab. The caller holds its lock, if it has one. Raises like :func:`down`."""
    refuse_namesake(name, directory)
    kill(_under_way(name))
    named = wiring.namespaces(name)
    networks = {found for n in named if (found := wiring.identity(n)) is not None}
    if network("self") in networks:
        raise Refused(f'this process is in the network of lab "{name}"', hint="leave it first")
    _end_tasks(networks, directory)
    switch = plan.netns(name, plan.SWITCH)
    for netns in sorted(named, key=lambda n: n == switch):  # last: its alias names the owner
        wiring.remove(netns)
    # Again: a process may have entered a namespace while its name was removed.
    _end_tasks(networks, directory)
    for point in reversed(_mounts(directory)):
        run(["umount", "--lazy", point])
    if directory.exists():
        try:
            shutil.rmtree(directory)
        except OSError as error:
            raise LiveshiftError(f"cannot remove {directory}: {error}") from error


def leftovers(name: str) -> list[str]:
    """Return all of a lab that exists, one line each; [] if nothing does."""
    directory = root() / plan.checked_name(name)
    named = wiring.namespaces(name)
    networks = {found for n in named if (found := wiring.identity(n)) is not None}
    left = [f"network namespace {n}" for n in named]
    links = sorted(os.listdir("/sys/class/net"))
    left += [f"link {link}" for link in links if link.startswith(f"ls-{name}-")]
    tasks = {task.pid for task in (*belonging(networks, directory), *_under_way(name))}
    left += [
        f"process {pid}: {_command_line(pid)}" for pid in sorted(tasks | _started_for(directory))
    ]
    left += [f"mount {point}" for point in _mounts(directory)]
    left += [f"directory {directory}"] if directory.exists() else []
    return left


def _end_tasks(networks: set[int], directory: Path) -> None:
    until = time.monotonic() + _END_S
    while tasks := belonging(networks, directory):
        if time.monotonic() > until:
            raise LiveshiftError(f"new processes keep starting in {directory.name}: {tasks[:5]}")
        kill(tasks, until - time.monotonic())


def _under_way(name: str) -> list[Task]:
    """Return the commands that a killed `lab up` was just running. They could still make something
    after we have looked.

    These are `ip` and `capsule-init` with one of the lab's network namespaces in their arguments.
    """
    found = []
    for pid in pids():
        program, *arguments = map(os.path.basename, _argv(pid))
        if program in ("ip", "capsule-init") and any(
            plan.lab_of_netns(argument) == name for argument in arguments
        ):
            found += [task] if (task := Task.of(pid)) else []
    return found


def _mounts(directory: Path) -> list[str]:
    """Return the mount points at or below the directory, outermost first, of this mount
    namespace."""
    return [m.point for m in mount_table("self").values() if below(m.point, str(directory))]


def _started_for(directory: Path) -> set[int]:
    """Return the pids of the lab's daemons, found by their command line in any namespace."""
    return {pid for pid in pids() if f"--config {directory}/" in _command_line(pid)}


def _command_line(pid: int) -> str:
    return " ".join(_argv(pid))


def _argv(pid: int) -> list[str]:
    """Return the command line of a process; [""] if it has none."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended, or we may not see it
        raw = b""
    return raw.decode(errors="replace").rstrip("\0").split("\0")
