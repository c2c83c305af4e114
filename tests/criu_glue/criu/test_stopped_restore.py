# SPDX-License-Identifier: Apache-2.0
"""Real trees, restored by a real CRIU, held while only spared threads run, and then let go.

A tree of two processes is dumped once for each test, and its source ended: what the destination
makes of the image is all there is.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from captured import ROOT_PID, Sink, sink
from checkout import SUPPORT
from held_threads import Counters, build
from held_tree import hold_tree
from sandbox_trees import SandboxMaker, criu, new_sandboxes, place
from waits import until

from liveshift.criu_glue.capsule import sandboxes
from liveshift.criu_glue.capsule.sandboxes import Sandbox
from liveshift.criu_glue.capsule.tree import inner_pid, tasks
from liveshift.criu_glue.criu import restore
from liveshift.criu_glue.criu.dump import FrozenTree
from liveshift.criu_glue.criu.held import HeldCriu
from liveshift.criu_glue.criu.restore import RestoringTree
from liveshift.criu_glue.criu.tool import Criu
from liveshift.criu_glue.network import network_lock
from liveshift.cuda_snapshot import threads
from liveshift.cuda_snapshot.hold import spared_threads
from liveshift.errors import LiveshiftError, StepFailed, Unreachable

__all__ = ["criu", "new_sandboxes", "place", "sink"]

pytestmark = pytest.mark.root

KINDS = ["busy:busy", "sleep:sleep", "read:forever", "liveshift:busy"]
OTHERS = ("busy", "sleep")


@dataclass
class Image:
    """What has come of the tree, and where it may be restored."""

    sandbox: Sandbox
    directory: Path
    pipes: dict[int, int]
    counters: Counters

    def tree(self) -> RestoringTree:
        return RestoringTree(self.sandbox, self.directory)

    def stopped(self, criu: Criu) -> RestoringTree:
        tree = self.tree()
        tree.bring_up(criu, self.pipes, 60, stopped=True)
        tree.stop_at_door(60)
        return tree

    def marks(self) -> set[str]:
        names = ("resumed", "at-door", "unlocked")
        return {name for name in names if (self.directory / name).exists()}

    def states(self) -> set[str]:
        """Those of all threads."""
        return {threads.state(tid) for task in tasks(self.sandbox) for tid in threads.of(task.pid)}

    def locked(self) -> bool:
        return network_lock.locked(self.sandbox.init)

    def runs(self, process: int, *names: str) -> None:
        before = self.counters.done(process)
        until(lambda: all(self.counters.done(process)[n] > before[n] + 2 for n in names))

    def stands(self, process: int, *names: str) -> None:
        before = self.counters.done(process)
        time.sleep(0.12)
        now = self.counters.done(process)
        assert {n: now[n] for n in names} == {n: before[n] for n in names}

    def all_run(self) -> None:
        for process in (0, 1):
            self.runs(process, *OTHERS, "liveshift")

    def all_stand(self) -> None:
        for process in (0, 1):
            self.stands(process, *OTHERS, "liveshift")

    def nothing_is_left(self) -> None:
        assert tasks(self.sandbox) == []
        assert self.sandbox.alive()
        assert self.locked()


def arrive(
    criu: Criu,
    new_sandboxes: SandboxMaker,
    place: Path,
    sink: Sink,
    before: Callable[[Sandbox, Counters], None] = lambda *_: None,
) -> Image:
    path = place.parent / "counters"
    path.touch()
    counters = Counters(path, KINDS)
    here = new_sandboxes.run([str(build(place.parent)), str(path), "2", *KINDS])
    until(lambda: counters.all_began(2))
    before(here, counters)
    frozen = FrozenTree(here, ROOT_PID, place / "images")
    frozen.dump(criu, sink, 60)
    sink.write_to(place / "arrived")
    pipes = here.pipes()
    sandboxes.end(here)
    frozen.release()
    return Image(new_sandboxes.empty(), place / "arrived", pipes, counters)


@pytest.fixture
def image(criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink) -> Image:
    return arrive(criu, new_sandboxes, place, sink)


def spared(pid: int) -> set[int]:
    """As with one CUDA process in a tree: only there is a thread that has to run."""
    return spared_threads(pid, -1) if inner_pid(pid) == ROOT_PID else set()


def test_a_stopped_tree_is_held_and_only_the_spared_thread_runs_until_it_is_let_go(
    criu: Criu, image: Image
) -> None:
    tree = image.tree()
    tree.bring_up(criu, image.pipes, 60, stopped=True)
    image.all_stand()
    assert image.marks() == set()
    tree.stop_at_door(60)
    assert image.states() == {"T"}
    image.all_stand()
    assert image.marks() == {"at-door"}
    assert image.locked()
    held = hold_tree(image.sandbox, spared)
    image.runs(0, "liveshift")
    image.stands(0, *OTHERS)
    image.stands(1, *OTHERS, "liveshift")
    assert image.locked()
    assert not tree.resumed()
    tree.let_run_held(held)
    image.all_run()
    assert image.marks() == {"resumed", "unlocked"}
    assert not image.locked()
    assert held.held == frozenset()
    for process in (0, 1):  # a nanosleep that CRIU has dumped returns EINTR
        assert image.counters.wrong(process) in ({}, {"sleep": 1})
    (root,) = (task for task in tasks(image.sandbox) if inner_pid(task.pid) == ROOT_PID)
    root.kill()
    until(lambda: not image.sandbox.alive())
    assert image.sandbox.plan.status.read_text() == "signal 9\n"


def test_it_may_be_dropped_at_each_point_and_the_same_image_runs_at_last(
    criu: Criu, image: Image
) -> None:
    tree = image.tree()
    tree.bring_up(criu, image.pipes, 60, stopped=True)
    tree.drop()
    image.nothing_is_left()
    tree = image.stopped(criu)
    tree.drop()
    image.nothing_is_left()
    tree = image.stopped(criu)
    held = hold_tree(image.sandbox, spared)
    image.runs(0, "liveshift")
    tree.drop()
    image.nothing_is_left()
    until(lambda: not held.held)
    held.end()
    tree = image.stopped(criu)
    tree.let_run_held(hold_tree(image.sandbox, spared))
    image.all_run()


def test_what_the_job_itself_had_stopped_stays_stopped_when_all_is_let_go(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    def stop(here: Sandbox, counters: Counters) -> None:
        inner = counters.row("signals", 1).tid
        (task,) = (task for task in tasks(here) if inner_pid(task.pid) == inner)
        task.suspend()
        until(lambda: threads.state(task.pid) == "T")

    image = arrive(criu, new_sandboxes, place, sink, stop)
    tree = image.stopped(criu)
    tree.let_run_held(hold_tree(image.sandbox, spared))
    image.runs(0, *OTHERS, "liveshift")
    image.stands(1, *OTHERS, "liveshift")
    (other,) = (task for task in tasks(image.sandbox) if inner_pid(task.pid) != ROOT_PID)
    assert threads.state(other.pid) == "T"
    other.resume()
    image.all_run()


def test_a_tree_of_which_a_process_was_killed_meanwhile_is_not_let_go(
    criu: Criu, image: Image
) -> None:
    tree = image.stopped(criu)
    held = hold_tree(image.sandbox, spared)
    other = tasks(image.sandbox)[-1]
    other.kill()
    until(held.lost)
    with pytest.raises(StepFailed, match=f"process {other.pid} was killed while it was held"):
        tree.let_run_held(held)
    image.nothing_is_left()


def test_a_network_that_cannot_be_opened_leaves_nothing_and_the_next_attempt_runs(
    criu: Criu, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> None:
        raise LiveshiftError("nft has gone")

    tree = image.stopped(criu)
    held = hold_tree(image.sandbox, spared)
    with monkeypatch.context() as patched:
        patched.setattr(network_lock, "unlock", refuse)
        with pytest.raises(StepFailed, match="gpt-1: nft has gone"):
            tree.let_run_held(held)
    assert not tree.resumed()
    image.nothing_is_left()
    tree = image.stopped(criu)
    tree.let_run_held(hold_tree(image.sandbox, spared))
    image.all_run()


def test_a_helper_that_dies_at_the_last_moment_leaves_nothing_stopped(
    criu: Criu, image: Image
) -> None:
    tree = image.stopped(criu)
    held = hold_tree(image.sandbox, spared)

    class Dying:
        spare_from_exit = staticmethod(held.spare_from_exit)

        def end(self) -> None:
            held.end()
            raise Unreachable("the GPU helper does not answer")

    with pytest.raises(Unreachable):
        tree.let_run_held(Dying())
    assert tree.resumed()
    image.all_run()


def test_a_task_that_does_not_stay_stopped_is_named_and_nothing_is_left(
    criu: Criu, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = HeldCriu.tell

    def let_go_and_wake(held: HeldCriu, verdict: str, seconds: float) -> bool:
        ended = let_go(held, verdict, seconds)
        for task in tasks(image.sandbox):
            task.resume()
        return ended

    monkeypatch.setattr(HeldCriu, "tell", let_go_and_wake)
    monkeypatch.setattr(restore, "STOP_S", 0.3)
    with pytest.raises(
        StepFailed, match=r"gpt-1: thread \d+ of process \d+, in state [RS], was not left stopped"
    ):
        image.stopped(criu)
    image.nothing_is_left()


AGENT = """
import base64, os, pickle, signal, sys, time
from pathlib import Path
from liveshift.criu_glue.criu import tool
from liveshift.criu_glue.network import network_lock
from held_tree import hold_tree
from liveshift.criu_glue.criu.held import HeldCriu
from liveshift.cuda_snapshot.hold import spared_threads
from liveshift.criu_glue.criu.restore import RestoringTree

sandbox, directory, pipes = pickle.loads(base64.b64decode(sys.argv[1]))

def here(*ignored):
    print("here", flush=True)
    time.sleep(600)

tree = RestoringTree(sandbox, directory)
tree.bring_up(tool.find(), pipes, 60, stopped=True)
{at_hook}
tree.stop_at_door(60)
{at_door}
held = hold_tree(sandbox, lambda pid: spared_threads(pid, -1))
{held}
tree.let_run_held(held)
"""


@contextlib.contextmanager
def agent(image: Image, **points: str) -> Iterator[None]:
    """Another agent that gets as far as ``here()`` and is killed there."""
    steps = dict.fromkeys(("at_hook", "at_door", "held"), "") | points
    given = base64.b64encode(pickle.dumps((image.sandbox, image.directory, image.pipes))).decode()
    command = [sys.executable, "-c", textwrap.dedent(AGENT).format(**steps), given]
    env = {**os.environ, "PYTHONPATH": str(SUPPORT / "sandbox")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "here\n"
            yield
        finally:
            other.kill()


def taken_up(image: Image) -> RestoringTree:
    tree = image.tree()
    tree.take_up()
    return tree


def runs_at_the_next_attempt(criu: Criu, image: Image) -> None:
    tree = taken_up(image)
    assert not tree.resumed()
    tree.drop()
    image.nothing_is_left()
    tree = image.stopped(criu)
    tree.let_run_held(hold_tree(image.sandbox, spared))
    image.all_run()


def test_an_agent_that_dies_while_criu_waits_leaves_what_may_be_dropped(
    criu: Criu, image: Image
) -> None:
    with agent(image, at_hook="here()"):
        pass
    image.all_stand()
    runs_at_the_next_attempt(criu, image)


def test_an_agent_that_dies_at_the_door_leaves_the_tree_stopped(criu: Criu, image: Image) -> None:
    with agent(image, at_door="here()"):
        pass
    assert image.states() == {"T"}
    image.all_stand()
    runs_at_the_next_attempt(criu, image)


def test_an_agent_that_dies_while_it_holds_takes_the_tree_along(criu: Criu, image: Image) -> None:
    with agent(image, held="here()"):
        for process in (0, 1):
            image.runs(process, "liveshift")
            image.stands(process, *OTHERS)
    until(lambda: tasks(image.sandbox) == [])
    runs_at_the_next_attempt(criu, image)


def test_an_agent_that_dies_before_the_network_is_open_leaves_the_tree_stopped(
    criu: Criu, image: Image
) -> None:
    """The hold no longer kills by then, but the tree was stopped again before."""
    with agent(image, held="network_lock.unlock = here"):
        pass
    until(lambda: image.states() == {"T"})
    image.all_stand()
    assert image.locked()
    runs_at_the_next_attempt(criu, image)


def test_an_agent_that_dies_when_the_tree_was_to_run_is_followed_by_one_that_lets_it(
    criu: Criu, image: Image
) -> None:
    with agent(image, held="held.end = here"):
        assert "resumed" in image.marks()
        assert not image.locked()
    until(lambda: image.states() == {"T"})
    image.all_stand()
    assert taken_up(image).resumed()
    image.all_run()
    assert image.marks() == {"resumed", "unlocked"}
    sandboxes.hand_over(image.sandbox)


SENDER = """
import socket
peer = None
while peer is None:  # it has no network yet
    try:
        peer = socket.create_connection(("10.91.7.1", 7007))
    except OSError:
        time.sleep(0.01)
for n in range(10**9):
    peer.sendall(b"%d\\n" % n)
    time.sleep(0.0005)
"""

PEER = """
import socket
with socket.create_server(("10.91.7.1", 7007)) as server:
    print("listens", flush=True)
    job, _ = server.accept()
for line in job.makefile():
    print(line, end="", flush=True)
print("closed", flush=True)
"""


class Peer:
    """Who talks with a capsule: a network namespace, and a process there that hears numbers."""

    def __init__(self, directory: Path) -> None:
        self._name = f"ls-test-peer-{os.getpid()}"
        self._cables = 0
        self._log = directory / "peer.log"
        self._ip("netns", "add", self._name)
        self._inside("link", "add", "br0", "type", "bridge")
        self._inside("addr", "add", "10.91.7.1/24", "dev", "br0")
        self._inside("link", "set", "br0", "up")
        command = ["ip", "netns", "exec", self._name, sys.executable, "-c", PEER]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log)
        until(lambda: self._log.read_text() == "listens\n")

    def plug_in(self, netns: str) -> None:
        """Give a capsule's namespace the capsule's address, as network.plug_in does."""
        self._cables += 1
        cable = f"cable{self._cables}"
        device = ("eth0", "address", "02:00:00:00:07:02", "netns", netns)
        self._inside("link", "add", cable, "type", "veth", "peer", "name", *device)
        self._inside("link", "set", cable, "master", "br0", "up")
        self._ip("-netns", netns, "addr", "add", "10.91.7.2/24", "dev", "eth0")
        self._ip("-netns", netns, "link", "set", "eth0", "up")

    def unplug(self, netns: str) -> None:
        self._ip("-netns", netns, "link", "del", "eth0")

    def heard(self) -> list[str]:
        return self._log.read_text().splitlines()[1:]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._ip("netns", "del", self._name)

    def _inside(self, *words: str) -> None:
        self._ip("-netns", self._name, *words)

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)


@pytest.fixture
def peer(place: Path) -> Iterator[Peer]:
    made = Peer(place.parent)
    yield made
    made.close()


def test_a_connection_outlives_the_time_at_the_door_and_no_number_is_lost_or_doubled(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink, peer: Peer
) -> None:
    """What was sent while the network was locked is sent again as soon as it is open."""
    here = new_sandboxes.start(SENDER)
    peer.plug_in(here.plan.netns.name)
    until(lambda: len(peer.heard()) > 20)
    network_lock.lock(here.init)
    frozen = FrozenTree(here, ROOT_PID, place / "images")
    frozen.dump(criu, sink, 60)
    sink.write_to(place / "arrived")
    pipes = here.pipes()
    sandboxes.end(here)
    frozen.release()
    peer.unplug(here.plan.netns.name)
    there = new_sandboxes.empty()
    peer.plug_in(there.plan.netns.name)
    tree = RestoringTree(there, place / "arrived")
    tree.bring_up(criu, pipes, 60, stopped=True)
    tree.stop_at_door(60)
    held = hold_tree(there, lambda _: ())
    before, locked = len(peer.heard()), time.monotonic()
    time.sleep(1.5)  # many retransmissions, each after twice the time, had they been lost
    assert len(peer.heard()) == before, "the lock is to keep it silent"
    released = time.monotonic()
    tree.let_run_held(held)
    until(lambda: len(peer.heard()) > before, (released - locked) / 2)
    until(lambda: len(peer.heard()) > before + 100)
    heard = peer.heard()
    assert heard == [str(n) for n in range(len(heard))]
