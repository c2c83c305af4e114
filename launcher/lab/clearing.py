# SPDX-License-Identifier: Apache-2.0
"""Removing a lab, from lab.json and from what exists, whatever state it is in.

Only what is the lab's own is touched: processes in its namespaces, its named network namespaces,
mounts below its directory, the directory. All of it may be repeated, at any point.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from ...errors import LiveshiftError, NotFound, NotPermitted, Refused
from . import plan, wiring
from .commands import run
from .record import claim, refuse_inside, root
from .tasks import Task, belonging, kill, network, pids

_END_S = 20.0
"""How long processes may take to end after SIGKILL: a large one frees its memory meanwhile."""


def down(name: str) -> None:
    """Remove a lab and everything in it; nothing happens when there is none.

    Raises Refused when another command is at work on it or it is not this root's, NotPermitted
    without root, LiveshiftError when something does not go away.
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
    except NotFound:  # no directory: the namespaces alone are left, or a namesake's
        clear(name, directory)


def refuse_namesake(name: str, directory: Path) -> None:
    """Raise Refused when a lab of this name lives under another root."""
    of = wiring.owner(name)
    if of is not None and of != directory and of.exists():
        raise Refused(
            f'lab "{name}" belongs to {of}', hint=f"LIVESHIFT_LAB_ROOT={of.parent} leads there"
        )


def clear(name: str, directory: Path) -> None:
    """Remove the lab; its lock is held, if it has a directory. Raises like :func:`down`."""
    refuse_namesake(name, directory)
    kill(_under_way(name))
    named = wiring.namespaces(name)
    networks = {found for n in named if (found := wiring.identity(n)) is not None}
    if network("self") in networks:
        raise Refused(f'this process is in the network of lab "{name}"', hint="leave it first")
    _end_tasks(networks, directory)
    switch = plan.netns(name, plan.SWITCH)
    for netns in sorted(named, key=lambda n: n == switch):  # it says whose the lab is: last
        wiring.remove(netns)
    # Whoever was about to enter a namespace when its name went.
    _end_tasks(networks, directory)
    for point in reversed(_mounts(directory)):
        run(["umount", "--lazy", point])
    if directory.exists():
        try:
            shutil.rmtree(directory)
        except OSError as error:
            raise LiveshiftError(f"cannot remove {directory}: {error}") from error


def leftovers(name: str) -> list[str]:
    """Everything of a lab that exists, one line each; empty when nothing does."""
    directory = root() / plan.checked_name(name)
    named = wiring.namespaces(name)
    networks = {found for n in named if (found := wiring.identity(n)) is not None}
    left = [f"network namespace {n}" for n in named]
    links = sorted(os.listdir("/sys/class/net"))
    left += [f"link {link}" for link in links if link.startswith(f"ls-{name}-")]
    tasks = {task.pid for task in (*belonging(networks, directory), *_under_way(name))}
    left += [f"process {pid}: {_words(pid)}" for pid in sorted(tasks | _started_for(directory))]
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
    """What a killed `lab up` was just running: it could still make something after we have looked.

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
    """The mount points of this mount namespace at or below the directory, outermost first."""
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split()[4].encode().decode("unicode_escape")
        if point == str(directory) or point.startswith(f"{directory}/"):
            points.append(point)
    return points


def _started_for(directory: Path) -> set[int]:
    """Daemons of the lab by their command line, wherever they are."""
    return {pid for pid in pids() if f"--config {directory}/" in _words(pid)}


def _words(pid: int) -> str:
    return " ".join(_argv(pid))


def _argv(pid: int) -> list[str]:
    """The command line of a process; [""] when it has none."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # ended, or not ours to see
        raw = b""
    return raw.decode(errors="replace").rstrip("\0").split("\0")
