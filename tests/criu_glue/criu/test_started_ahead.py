# SPDX-License-Identifier: Apache-2.0
"""A CRIU that was started ahead waits before it has touched the tree, and ends with its agent."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from captured import ROOT_PID, Sink, sink
from descriptors import no_descriptor_left
from one_sandbox import said
from sandbox_trees import COUNTER, SandboxMaker, count, criu, goes_on, new_sandboxes, place
from waits import until

from liveshift.criu_glue.capsule.sandboxes import Sandbox
from liveshift.criu_glue.capsule.tree import tasks
from liveshift.criu_glue.criu.dump import FrozenTree
from liveshift.criu_glue.criu.held import LOST_S
from liveshift.criu_glue.criu.tool import Criu

__all__ = ["criu", "new_sandboxes", "place", "sink"]


def ahead(criu: Criu, here: Sandbox, images: Path) -> FrozenTree:
    """A tree whose CRIU waits to begin."""
    frozen = FrozenTree(here, ROOT_PID, images)
    frozen.start_ahead(criu, None)
    until(lambda: bool(waiting(images)))  # on a busy machine that takes longer than READY_S
    return frozen


def waiting(images: Path) -> list[int]:
    """The hooks, by the host's pid, that have the FIFO ``begin`` of the directory open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        if process.name != str(os.getpid()):
            try:
                held = {os.stat(fd).st_ino for fd in (process / "fd").iterdir()}
            except OSError:
                continue
            if (images / "begin").stat().st_ino in held:
                found.append(int(process.name))
    return found


@pytest.mark.root
def test_a_tree_runs_until_the_dump_although_its_criu_was_started(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    here = new_sandboxes.counting(COUNTER)
    frozen = ahead(criu, here, place / "images")
    first = frozen._criu._who
    assert goes_on(here)
    frozen.dump(criu, sink, 60)
    assert frozen._criu._who == first, "no second one was started"
    assert {"inventory.img", f"core-{ROOT_PID}.img", "pages-1.img"} <= sink.ended
    frozen.thaw()
    assert goes_on(here)
    lines = [int(n) for n in said(here).split()]
    assert lines == list(range(len(lines)))


@pytest.mark.root
def test_what_is_given_up_before_the_dump_leaves_nothing(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path
) -> None:
    here = new_sandboxes.counting(COUNTER)
    with no_descriptor_left():
        frozen = ahead(criu, here, place / "images")
        hooks = waiting(place / "images")
        frozen.thaw()
        assert not frozen._criu.alive()
        assert frozen._criu._process is not None
        assert frozen._criu._process.returncode > 0, (
            "CRIU was not killed, so process 1 did not adopt its hook"
        )
        until(lambda: not any(map(running, hooks)))
    assert goes_on(here)
    frozen.thaw()  # may be said again
    assert goes_on(here)


@pytest.mark.root
def test_a_dump_that_fails_before_it_begins_ends_it_at_once(
    criu: Criu,
    new_sandboxes: SandboxMaker,
    place: Path,
    sink: Sink,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = new_sandboxes.counting(COUNTER)
    frozen = ahead(criu, here, place / "images")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(frozen, "_take_out", full)
    began = time.monotonic()
    with pytest.raises(OSError, match="No space left"):
        frozen.dump(criu, sink, 60)
    assert time.monotonic() - began < LOST_S / 2, "the thaw must not wait until it kills CRIU"
    assert not frozen._criu.alive()
    assert goes_on(here)


@pytest.mark.root
def test_a_dump_starts_another_one_if_somebody_has_killed_it(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    """A job that runs as root kills it with `kill -9 -1` in its capsule."""
    here = new_sandboxes.counting(COUNTER)
    frozen = ahead(criu, here, place / "images")
    assert frozen._criu._who is not None
    for pid in frozen._criu._below():
        os.kill(pid, signal.SIGKILL)
    until(lambda: not frozen._criu.alive())
    frozen.dump(criu, sink, 60)
    assert {"inventory.img", f"core-{ROOT_PID}.img", "pages-1.img"} <= sink.ended
    frozen.thaw()
    assert goes_on(here)


@pytest.mark.root
def test_it_ends_with_the_agent_that_started_it(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path
) -> None:
    """A restarted agent does not look for it, because no note says that a freeze has begun."""
    here, images = new_sandboxes.counting(COUNTER), place / "images"
    agent = os.fork()
    if agent == 0:
        FrozenTree(here, ROOT_PID, images).start_ahead(criu, None)
        signal.pause()
    until(lambda: (images / "begin").exists() and len(waiting(images)) > 1)
    hooks = [pid for pid in waiting(images) if pid != agent]
    before = count(here)
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    until(lambda: not any(map(running, hooks)))
    (task,) = tasks(here)
    assert task.status() != "stopped"
    assert goes_on(here)
    assert count(here) > before


@pytest.mark.root
def test_it_ends_with_its_agent_also_if_that_ends_before_the_hook_waits(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path
) -> None:
    here, images = new_sandboxes.counting(COUNTER), place / "images"
    agent = os.fork()
    if agent == 0:
        frozen = FrozenTree(here, ROOT_PID, images)
        frozen.start_ahead(criu, None)
        os._exit(0)
    os.waitpid(agent, 0)
    pid = int((images / "criu").read_text().split()[0])
    until(lambda: not running(pid))
    assert goes_on(here)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
