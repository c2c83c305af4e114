# SPDX-License-Identifier: Apache-2.0
"""Finds tasks that another process traces, such as strace(1) or gdb(1).

A task has one tracer at most (ptrace(2)), and CRIU needs to be that (criu: compel, infect.c,
compel_wait_task: "Unseizable non-zombie").
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from ... import proc_text
from ..capsule.sandboxes import Sandbox
from ..capsule.tree import inner_pid, tasks

REMEDY = "detach or end what traces it (strace, gdb, a debugger of an IDE)"


def find(sandbox: Sandbox) -> list[tuple[str, str]]:
    """(what prevents a move, what to do) for each process of the capsule whose first thread is
    traced; [] if the capsule has ended. It reads one file for each process."""
    return _find(sandbox, threads=False)


def find_in_threads(sandbox: Sandbox) -> list[tuple[str, str]]:
    """As :func:`find`, but this looks at every thread of each process. gdb traces all threads of a
    process, and strace may trace only some."""
    return _find(sandbox, threads=True)


def _find(sandbox: Sandbox, *, threads: bool) -> list[tuple[str, str]]:
    found = []
    here = {task.pid: task for task in tasks(sandbox)}
    for pid, task in here.items():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            tracer = next(filter(None, _tracers(pid, threads=threads)), 0)
            if tracer:
                who = f"process {inner_pid(pid)} ({task.name()})"
                text = f"{who} is traced by {_name(tracer, here)}, and CRIU cannot dump it then"
                found.append((text, REMEDY))
    return found


def _tracers(pid: int, *, threads: bool) -> Iterator[int]:
    """The host's pids of the tracers of a process and of its threads; 0 for each without one."""
    places = [Path(f"/proc/{pid}")]
    if threads:
        places = [*Path(f"/proc/{pid}/task").iterdir()]
    for place in places:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread has ended
            for line in proc_text.lines(place / "status"):
                if line.startswith("TracerPid:"):
                    yield int(line.split()[1])


def _name(tracer: int, here: Mapping[int, psutil.Process]) -> str:
    name = psutil.Process(tracer).name()
    if tracer in here:
        return f"process {inner_pid(tracer)} ({name})"
    return f"process {tracer} ({name}) of its host"
