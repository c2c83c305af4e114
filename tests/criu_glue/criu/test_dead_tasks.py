# SPDX-License-Identifier: Apache-2.0
"""A process that is killed while CRIU dumps it: nobody waits for CRIU any more."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from captured import PYTHON, ROOT_PID, Sink, sink
from sandbox_trees import SandboxMaker, criu, goes_on, new_sandboxes, place
from waits import until

from liveshift.criu_glue.capsule.sandboxes import Sandbox
from liveshift.criu_glue.capsule.tree import tasks
from liveshift.criu_glue.criu.dump import FrozenTree
from liveshift.criu_glue.criu.tool import Criu
from liveshift.errors import StepFailed

__all__ = ["criu", "new_sandboxes", "place", "sink"]

WITH_THREADS = """
for _ in range(12): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
for n in range(10**9):
    os.write(1, b"%d\\n" % n)
    time.sleep(0.01)
"""
SOON_S = 30.0
"""Half of the time that a dump may take. If the agent did not notice a death, the dump would take
all of that time."""

WAITS = f"""#!{PYTHON} -S
import ctypes, os, sys
pid = int(sys.argv[sys.argv.index("--tree") + 1])
ptrace = ctypes.CDLL(None).ptrace
ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
SEIZE, INTERRUPT, WALL = 0x4206, 0x4207, 0x40000000
for task in map(int, os.listdir("/proc/%d/task" % pid)):
    assert ptrace(SEIZE, task, None, None) == ptrace(INTERRUPT, task, None, None) == 0
    os.waitpid(task, WALL)
os.waitpid(pid, WALL)
"""
"""What CRIU does in one dump of some hundred, when the process is killed at a bad moment."""


def tracers(pid: int) -> set[str]:
    """Who traces the threads of a process, by ids."""
    found = set()
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        lines = status.read_text().splitlines()
        found |= {line.split()[1] for line in lines if line.startswith("TracerPid:")}
    return found


def gone(stands: Sandbox) -> bool:
    return not stands.alive()


@pytest.fixture
def waiting(criu: Criu, place: Path) -> Criu:
    """In place of CRIU: it takes hold of a process, and waits for it."""
    program = place.parent / "waits"
    program.write_text(WAITS)
    program.chmod(0o755)
    return Criu(program, criu.version, (str(program),))


@pytest.mark.root
def test_a_tracer_that_waits_for_a_process_that_was_killed_is_killed_too(
    waiting: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    here = new_sandboxes.counting(WITH_THREADS)
    (task,) = tasks(here)

    def kill() -> None:
        until(lambda: len(tracers(task.pid)) == 1 and "0" not in tracers(task.pid))
        os.kill(task.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    frozen, began = FrozenTree(here, ROOT_PID, place / "images"), time.monotonic()
    with pytest.raises(StepFailed, match="a process of gpt-1 was killed while CRIU dumped it"):
        frozen.dump(waiting, sink, 60)
    killer.join()
    assert time.monotonic() - began < SOON_S
    until(lambda: here.plan.status.read_text() == "signal 9\n")
    until(lambda: not here.alive())


@pytest.mark.root
def test_a_tracer_that_waits_is_killed_by_the_agent_that_takes_it_up(
    waiting: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    """And one that waits for a process that lives goes on until the dump's deadline."""
    here = new_sandboxes.counting(WITH_THREADS)
    (task,) = tasks(here)
    frozen, seen = FrozenTree(here, ROOT_PID, place / "images"), list[float]()

    def dump() -> None:
        with pytest.raises(StepFailed):
            frozen.dump(waiting, sink, 60)
        seen.append(time.monotonic())

    dumps, began = threading.Thread(target=dump), time.monotonic()
    dumps.start()
    until(lambda: "0" not in tracers(task.pid))
    time.sleep(1.5)
    assert not seen, "nothing is dead yet"
    os.kill(task.pid, signal.SIGKILL)
    later = FrozenTree(here, ROOT_PID, place / "images")  # as an agent that was started anew
    later.take_up()
    later.thaw()
    assert time.monotonic() - began < SOON_S + 1.5
    dumps.join()
    until(lambda: not here.alive())


@pytest.mark.root
def test_a_tracer_that_hangs_is_killed_in_the_end(
    waiting: Criu,
    new_sandboxes: SandboxMaker,
    place: Path,
    sink: Sink,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever it waits for: the tree goes on."""
    monkeypatch.setattr("liveshift.criu_glue.criu.dump.LOST_S", 0.5)
    here = new_sandboxes.counting(WITH_THREADS)
    frozen = FrozenTree(here, ROOT_PID, place / "images")
    with pytest.raises(StepFailed, match="CRIU did not finish within its deadline"):
        frozen.dump(waiting, sink, 0.5)
    assert goes_on(here)


@pytest.mark.root
def test_a_capsule_that_has_just_ended_is_named(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    here = new_sandboxes.counting(WITH_THREADS)
    frozen = FrozenTree(here, ROOT_PID, place / "images")
    (task,) = tasks(here)
    os.kill(task.pid, signal.SIGKILL)
    until(partial(gone, here))
    with pytest.raises(StepFailed, match="has ended before CRIU dumped it"):
        frozen.dump(criu, sink, 60)
    frozen.thaw()


@pytest.mark.root
@pytest.mark.long
@pytest.mark.timeout(300)
def test_kills_at_random_moments_of_a_dump(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    random_, failed = random.Random(1), 0
    here, began = new_sandboxes.counting(WITH_THREADS), time.monotonic()
    undisturbed = FrozenTree(here, ROOT_PID, place / "undisturbed")
    undisturbed.dump(criu, sink, 60)
    latest = 1.5 * (time.monotonic() - began)
    undisturbed.thaw()
    for number in range(150):
        here = new_sandboxes.counting(WITH_THREADS)
        (task,) = tasks(here)
        sink.images.clear()
        sink.ended.clear()

        def kill(pid: int) -> None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

        killer = threading.Timer(random_.uniform(0.01, latest), kill, (task.pid,))
        frozen, began = FrozenTree(here, ROOT_PID, place / f"images-{number}"), time.monotonic()
        killer.start()
        try:
            frozen.dump(criu, sink, 60)
        except StepFailed:
            failed += 1
        frozen.thaw()
        assert time.monotonic() - began < SOON_S
        killer.join()
        until(partial(gone, here))
    assert 20 < failed < 150
