# SPDX-License-Identifier: Apache-2.0
"""Files with a name, but not the one they were opened by: POSIX named semaphores are such.

sem_open(3) of glibc makes a file under a name of its own, gives it the semaphore's by link(2) and
takes its own away. What a process has mapped then bears a name that is gone, of a file that is
there. CRIU gives it one more while it dumps, which has to be there when it restores.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from captured import ROOT_PID, Sink, sink
from one_sandbox import said
from sandbox_trees import SandboxMaker, count, criu, dumped, goes_on, new_sandboxes, place

from liveshift.criu_glue.capsule.sandboxes import Sandbox
from liveshift.criu_glue.capsule.tree import tasks
from liveshift.criu_glue.criu.dump import FrozenTree
from liveshift.criu_glue.criu.restore import RestoringTree
from liveshift.criu_glue.criu.tool import Criu
from liveshift.criu_glue.files.rights import User
from liveshift.criu_glue.images import image_check

__all__ = ["criu", "new_sandboxes", "place", "sink"]

ALICE = User(64001, 64001)

PING_PONG = """
import ctypes, mmap
libc = ctypes.CDLL(None, use_errno=True)
libc.sem_open.restype = ctypes.c_void_p
libc.sem_wait.argtypes = libc.sem_post.argtypes = [ctypes.c_void_p]
def opened(name):
    found = libc.sem_open(name, os.O_CREAT, 0o600, 0)
    assert found, os.strerror(ctypes.get_errno())
    return found
ours = [opened(b"/ping"), opened(b"/pong")]
gone = opened(b"/gone"); libc.sem_post(gone); libc.sem_unlink(b"/gone")
if not os.fork():
    ping, pong = opened(b"/ping"), opened(b"/pong")
    while True:
        libc.sem_wait(ping); libc.sem_post(pong)
ping, pong = ours
n = 0
while True:
    libc.sem_post(ping); libc.sem_wait(pong)
    libc.sem_wait(gone); libc.sem_post(gone)
    os.write(1, b"%d\\n" % n)
    n += 1
    time.sleep(0.002)
"""
"""Two processes, each with the semaphores under the names that it has opened them by; and one that
has no name any more."""


def in_shared_memory(stands: Sandbox) -> set[str]:
    return set(os.listdir(stands.root / "dev/shm"))


def ping_pong(new_sandboxes: SandboxMaker) -> Sandbox:
    here = new_sandboxes.counting(PING_PONG, ALICE.uid)
    maps = Path(f"/proc/{min(task.pid for task in tasks(here))}/maps").read_text()
    assert "/dev/shm/sem." in maps
    assert "(deleted)" in maps
    assert in_shared_memory(here) == {".liveshift", "sem.ping", "sem.pong"}
    return here


@pytest.mark.root
def test_named_semaphores_are_shared_after_the_move_as_before(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    here, there = ping_pong(new_sandboxes), new_sandboxes.empty(ALICE.uid)
    left = dumped(criu, here, there, place, sink)
    left.end()
    image_check.prepare(left.images, ALICE, there.root)
    failing = RestoringTree(there, left.images)
    failing.bring_up(criu, left.pipes, 60)
    failing.drop()  # and may be tried again
    image_check.prepare(left.images, ALICE, there.root)
    tree = RestoringTree(there, left.images)
    tree.bring_up(criu, left.pipes, 60)
    tree.let_run(60)
    assert goes_on(there), "the two do not hear each other"
    assert len(tasks(there)) == 2
    assert in_shared_memory(there) == {".liveshift", "sem.ping", "sem.pong"}
    lines = [int(n) for n in said(there).split()]
    assert lines == list(range(len(lines)))


@pytest.mark.parametrize("killed", [False, True], ids=["let go", "killed"])
@pytest.mark.root
def test_nothing_is_left_of_criu_in_a_capsule_that_stays(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink, killed: bool
) -> None:
    """Else the next dump would find the names taken."""
    here = ping_pong(new_sandboxes)
    for attempt in range(2):
        sink.images.clear()
        sink.ended.clear()
        frozen = FrozenTree(here, ROOT_PID, place / f"images-{attempt}")
        frozen.dump(criu, sink, 60)
        frozen.pin()
        if killed:
            held = int((place / f"images-{attempt}" / "criu").read_text().split()[0])
            os.kill(held, signal.SIGKILL)
        frozen.thaw()
        assert in_shared_memory(here) == {".liveshift", "sem.ping", "sem.pong"}
        assert goes_on(here)
    assert count(here) > 8
