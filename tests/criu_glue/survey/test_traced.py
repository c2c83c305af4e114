# SPDX-License-Identifier: Apache-2.0
"""A process that another one traces keeps its capsule where it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from captured import PYTHON, ROOT_PID, Sink, sink
from one_sandbox import Start, netns, plan, said, start
from sandbox_trees import COUNTER, SandboxMaker, criu, dumped, goes_on, new_sandboxes, place
from waits import until

from liveshift import ptrace
from liveshift.criu_glue.capsule.mounts import Placement
from liveshift.criu_glue.capsule.tree import tasks
from liveshift.criu_glue.criu.tool import Criu
from liveshift.criu_glue.survey.survey import passing, survey
from liveshift.criu_glue.survey.traced import REMEDY, find, find_in_threads
from liveshift.errors import SourceFailed, StepFailed

__all__ = ["criu", "netns", "new_sandboxes", "place", "plan", "sink", "start"]

PROGRAM = """
import os, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
os.write(1, b"ready\\n")
time.sleep(60)
"""


@pytest.mark.root
@pytest.mark.parametrize("first", [True, False], ids=["its first thread", "another thread"])
def test_it_is_named_until_the_tracer_has_left(start: Start, first: bool) -> None:
    here, nothing = start(PYTHON, "-Sc", PROGRAM), Placement((), ())
    until(lambda: "ready" in said(here))
    (task,) = tasks(here)
    assert find(here) == find_in_threads(here) == []
    threads = sorted(int(name) for name in os.listdir(f"/proc/{task.pid}/task"))
    traced = threads[0] if first else threads[-1]
    ptrace.seize(traced)
    us = f"process {os.getpid()} ({Path('/proc/self/comm').read_text().strip()}) of its host"
    ((text, remedy),) = find_in_threads(here)
    assert text.startswith(f"process {ROOT_PID} (python3")
    assert text.endswith(f") is traced by {us}, and CRIU cannot dump it then")
    assert remedy == REMEDY
    assert passing(here, nothing) == find(here) == ([(text, remedy)] if first else [])
    assert survey(here, ROOT_PID, nothing).problems == ((text, remedy),)
    ptrace.interrupt(traced)
    until(lambda: ptrace.next_event() is not None)
    ptrace.detach(traced)
    assert find_in_threads(here) == []
    assert survey(here, ROOT_PID, nothing).problems == ()


@pytest.mark.root
def test_a_tracer_in_the_capsule_has_its_pid_there(start: Start) -> None:
    program = (
        "import ctypes, os, time\nours, (r, w) = os.getpid(), os.pipe()\n"
        "if not os.fork():\n"
        " assert not ctypes.CDLL(None).ptrace(0x4206, ours, 0, 0)\n"
        " os.write(1, b'ready'); time.sleep(60)\n"
        "time.sleep(60)"
    )
    here = start(PYTHON, "-Sc", program)
    until(lambda: "ready" in said(here))
    ((text, _),) = find(here)
    assert f"is traced by process {ROOT_PID + 1} (python3" in text


@pytest.mark.root
@pytest.mark.parametrize("first", [True, False], ids=["the first process", "its child"])
def test_criu_cannot_dump_it_and_says_so(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink, first: bool
) -> None:
    here = new_sandboxes.counting(f"if not os.fork(): time.sleep(600)\n{COUNTER}")
    task = tasks(here)[0 if first else -1]
    ptrace.seize(task.pid)
    with pytest.raises(StepFailed, match=r"dump: .* is traced by another process") as failed:
        dumped(criu, here, new_sandboxes.empty(), place, sink)
    assert not isinstance(failed.value, SourceFailed), "the survey decides about the next one"
    ptrace.interrupt(task.pid)
    until(lambda: ptrace.next_event() is not None)
    ptrace.detach(task.pid)
    assert goes_on(here)
