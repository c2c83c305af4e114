# SPDX-License-Identifier: Apache-2.0
"""Sandboxes of one capsule with a tree in them, which tests have CRIU move from one to another."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from captured import ENV, PYTHON, ROOT_PID, Sink, numbers
from one_sandbox import said
from waits import until

from liveshift.criu_glue.capsule import output, sandboxes
from liveshift.criu_glue.capsule.sandboxes import Sandbox, SandboxPlan
from liveshift.criu_glue.capsule.tree import in_order, tasks
from liveshift.criu_glue.criu import tool
from liveshift.criu_glue.criu.dump import FrozenTree
from liveshift.criu_glue.criu.restore import RestoringTree
from liveshift.criu_glue.criu.tool import Criu
from liveshift.criu_glue.files import trees, unpacking
from liveshift.criu_glue.files.rights import User
from liveshift.criu_glue.images import image_check, pids
from liveshift.criu_glue.network import network_lock
from liveshift.criu_glue.survey import epoll_sets


@pytest.fixture(scope="module")
def criu() -> Criu:
    return tool.find()


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every sandbox hides, with all that is CRIU's in it; its parent is seen."""
    path = Path(f"/var/tmp/ls-test-criu-{os.getpid()}-{next(numbers)}")
    (path / "hidden").mkdir(parents=True)
    yield path / "hidden"
    shutil.rmtree(path)


class SandboxMaker:
    """Sandboxes of one capsule on several hosts, each with a network namespace of its own."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._made: list[Sandbox] = []
        self._netns: list[str] = []

    def plan(self, uid: int = 0) -> SandboxPlan:
        name = f"ls-test-{os.getpid()}-{next(numbers)}"
        subprocess.run(["ip", "netns", "add", name], check=True)
        subprocess.run(["ip", "-netns", name, "link", "set", "lo", "up"], check=True)
        self._netns.append(name)
        directory = self._place / name
        directory.mkdir()
        # CRIU's private prefix may lie below /tmp, where a sandbox has its own.
        return SandboxPlan(
            directory,
            Path("/run/netns") / name,
            "gpt-1",
            "",
            uid,
            uid,
            (),
            (sys.prefix,),
            (str(self._place),),
        )

    def start(self, program: str, uid: int = 0) -> Sandbox:
        return self.run([PYTHON, "-Sc", f"import os, sys, time, threading\n{program}"], uid)

    def counting(self, program: str, uid: int = 0) -> Sandbox:
        """``start``, and the program has begun to count."""
        started = self.start(program, uid)
        until(lambda: count(started) > 3)
        return started

    def run(self, argv: Sequence[str], uid: int = 0) -> Sandbox:
        self._made.append(sandboxes.start(self.plan(uid), argv, ENV, "/"))
        return self._made[-1]

    def empty(self, uid: int = 0) -> Sandbox:
        stands = sandboxes.build_empty(self.plan(uid), ROOT_PID, pids.RESERVED)
        self._made.append(stands)
        network_lock.lock(stands.init)
        return stands

    def close(self) -> None:
        for stands in self._made:
            sandboxes.end(stands)
        for name in self._netns:
            subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.fixture
def new_sandboxes(place: Path) -> Iterator[SandboxMaker]:
    made = SandboxMaker(place)
    yield made
    made.close()


COUNTER = """
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
kept = open("/tmp/kept", "w+")
deleted = open("/tmp/deleted", "w+"); deleted.write("still here"); deleted.flush()
os.unlink("/tmp/deleted")
shared = open("/dev/shm/shared", "w")
last = time.monotonic()
for n in range(10**9):
    kept.seek(0); kept.write(str(n)); kept.flush()
    now = time.monotonic(); assert now >= last, "time ran backwards"; last = now
    deleted.seek(0); assert deleted.read() == "still here"
    os.write(1, b"%d\\n" % n)
    time.sleep(0.002)
"""


def count(stands: Sandbox) -> int:
    return said(stands).count("\n")


def goes_on(stands: Sandbox) -> bool:
    before = count(stands)
    until(lambda: count(stands) > before + 3 or not stands.alive())
    return stands.alive()


def rights_of(stands: Sandbox) -> list[str]:
    """The capabilities of its only task, in five sets."""
    (task,) = tasks(stands)
    lines = Path(f"/proc/{task.pid}/status").read_text().splitlines()
    return [line for line in lines if line.startswith("Cap")]


def bring_files(here: Sandbox, there: Sandbox) -> None:
    """What goes along besides images: /tmp, /dev/shm, the output."""
    user = User(here.plan.uid, here.plan.gid)
    for name in ("tmp", "dev/shm"):
        tree = trees.Tree(name, here.root / name)
        unpacker = unpacking.Unpacker(there.root / name, user=user)
        trees.pack(tree, trees.listing(tree), unpacker.write)
        unpacker.finish()
    shutil.copytree(here.plan.log, there.plan.log, dirs_exist_ok=True)


def states(stands: Sandbox) -> set[str]:
    found = set()
    for task in tasks(stands):
        text = Path(f"/proc/{task.pid}/status").read_text()
        found.add(next(line for line in text.splitlines() if line.startswith("State:")).split()[1])
    return found


@dataclass(frozen=True)
class Dumped:
    """A tree that is frozen in its sandbox; all that the other sandbox needs of it has
    come there."""

    here: Sandbox
    frozen: FrozenTree
    images: Path
    pipes: dict[int, int]
    epoll: list[epoll_sets.EpollEntry]

    def end(self) -> None:
        """The tree is no longer where it was."""
        sandboxes.end(self.here)
        self.frozen.release()


def dumped(criu: Criu, here: Sandbox, there: Sandbox, place: Path, sink: Sink) -> Dumped:
    sink.images.clear()
    sink.ended.clear()
    frozen = FrozenTree(here, ROOT_PID, place / f"images-{here.init}")
    frozen.dump(criu, sink, 60, epoll=epoll_sets.find(in_order(here, ROOT_PID))[0])
    output.settle(here)
    arrived = place / f"arrived-{there.init}"
    sink.write_to(arrived)
    bring_files(here, there)
    return Dumped(here, frozen, arrived, here.pipes(), frozen.taken_out())


def moved(criu: Criu, here: Sandbox, there: Sandbox, place: Path, sink: Sink) -> None:
    """The tree goes from one sandbox to the other and runs there, as a move has it."""
    left = dumped(criu, here, there, place, sink)
    left.end()
    image_check.prepare(left.images, User(here.plan.uid, here.plan.gid), there.root)
    tree_ = RestoringTree(there, left.images)
    tree_.bring_up(criu, left.pipes, 60, epoll=left.epoll)
    tree_.let_run(60)


def criu_in(stands: Sandbox) -> list[int]:
    """CRIU's own processes in a sandbox: in its pid namespace, and no task of it."""
    space = os.stat(f"/proc/{stands.init}/ns/pid").st_ino
    own = {task.pid for task in tasks(stands)} | {stands.init}
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}/ns/pid").st_ino == space and int(name) not in own:
                found.append(int(name))
    assert found
    return found
