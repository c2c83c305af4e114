# SPDX-License-Identifier: Apache-2.0
"""Real trees, dumped by a real CRIU, held, thawed, and restored into another sandbox."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from itertools import product
from pathlib import Path

import pytest
from captured import ROOT_PID, Sink, sink
from descriptors import no_descriptor_left
from image_edits import change_first
from one_sandbox import said
from sandbox_trees import (
    COUNTER,
    SandboxMaker,
    count,
    criu,
    criu_in,
    dumped,
    goes_on,
    new_sandboxes,
    place,
    rights_of,
    states,
)
from waits import until

from liveshift.criu_glue.capsule import output, sandboxes
from liveshift.criu_glue.capsule.tree import tasks
from liveshift.criu_glue.criu.capture import Capture
from liveshift.criu_glue.criu.dump import FrozenTree
from liveshift.criu_glue.criu.restore import RestoringTree
from liveshift.criu_glue.criu.tool import Criu
from liveshift.criu_glue.files.rights import User
from liveshift.criu_glue.images import image_check
from liveshift.criu_glue.network import network_lock
from liveshift.errors import StepFailed

__all__ = ["criu", "new_sandboxes", "place", "sink"]


@pytest.mark.root
def test_a_dumped_tree_stands_still_until_it_is_thawed_and_goes_on_as_before(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    here = new_sandboxes.counting(COUNTER)
    for attempt in range(2):  # a migration that failed may be tried again
        sink.images.clear()
        sink.ended.clear()
        frozen = FrozenTree(here, ROOT_PID, place / f"images-{attempt}")
        frozen.dump(criu, sink, 60)
        output.settle(here)
        still = count(here)
        time.sleep(0.1)
        assert count(here) == still
        assert {"inventory.img", f"core-{ROOT_PID}.img", "pages-1.img"} <= sink.ended
        assert set(sink.images) - sink.ended == set()
        assert frozen.image_bytes == sum(map(len, sink.images.values())) > 1 << 20
        frozen.thaw()
        assert goes_on(here)
        frozen.thaw()  # may be said again
    lines = [int(n) for n in said(here).split()]
    assert lines == list(range(len(lines)))
    assert said(here, output.STDERR) == ""


@pytest.mark.root
def test_a_restored_tree_goes_on_where_it_was_dumped(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    here, there = new_sandboxes.counting(COUNTER), new_sandboxes.empty()
    left = dumped(criu, here, there, place, sink)
    before = rights_of(here)
    left.end()
    tree = RestoringTree(there, left.images)
    tree.bring_up(criu, left.pipes, 60)
    waiting = count(there)
    time.sleep(0.1)
    assert count(there) == waiting, "it must not run before it may"
    assert not (left.images / "unlocked").exists()
    assert not tree.resumed()
    tree.let_run(60)
    assert tree.resumed()
    assert (left.images / "unlocked").exists()
    assert goes_on(there)
    assert not network_lock.locked(there.init)
    (task,) = tasks(there)
    assert rights_of(there) == before
    held = {os.readlink(fd.path) for fd in os.scandir(f"/proc/{task.pid}/fd")}
    assert not [path for path in held if path.startswith(str(place))], "CRIU's directory leaked"
    assert (there.root / "tmp" / "kept").read_text()
    os.kill(task.pid, signal.SIGTERM)
    until(lambda: not there.alive())
    assert there.plan.status.read_text() == "signal 15\n"
    lines = [int(n) for n in said(there).split()]
    assert lines == list(range(len(lines)))  # none lost, none doubled
    assert len(lines) > count(here) + 3
    assert said(there, output.STDERR) == ""


USERFAULTFD = "import ctypes; u = ctypes.CDLL(None).syscall(323, 1)"
CONNECTED = "import socket; s = socket.socket(socket.AF_UNIX); s.connect('{socket}')"


@pytest.mark.parametrize(
    ("program", "words"),
    [(USERFAULTFD, "userfaultfd"), (CONNECTED, "UNIX socket outside its capsule")],
    ids=["userfaultfd", "external socket"],
)
@pytest.mark.root
def test_what_criu_cannot_dump_is_said_in_words_and_the_tree_goes_on(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink, program: str, words: str
) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place.parent / "server.sock"))
        server.listen()
        here = new_sandboxes.start(program.format(socket=place.parent / "server.sock") + COUNTER)
        until(lambda: count(here) > 3 or not here.alive())
        frozen = FrozenTree(here, ROOT_PID, place / "images")
        with pytest.raises(StepFailed, match=rf"dump: CRIU could not dump gpt-1: .*{words}"):
            frozen.dump(criu, sink, 60)
        assert goes_on(here)


@pytest.mark.root
def test_a_destination_that_refuses_is_what_is_told_and_the_tree_goes_on(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    here = new_sandboxes.counting(COUNTER)
    sink.fails = StepFailed("ship", "h2 refused the image: No space left on device")
    frozen = FrozenTree(here, ROOT_PID, place / "images")
    with pytest.raises(StepFailed, match="ship: h2 refused the image: No space left"):
        frozen.dump(criu, sink, 60)
    assert goes_on(here)


@pytest.mark.root
def test_a_dump_that_takes_too_long_is_given_up_and_the_tree_goes_on(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    here = new_sandboxes.counting(COUNTER)
    sink.pause_s = 0.6
    frozen = FrozenTree(here, ROOT_PID, place / "images")
    with pytest.raises(StepFailed, match="did not finish within its deadline"):
        frozen.dump(criu, sink, 0.5)
    assert goes_on(here)


@pytest.mark.root
def test_a_link_that_takes_the_image_too_late_ends_the_dump_at_its_deadline(
    criu: Criu,
    new_sandboxes: SandboxMaker,
    place: Path,
    sink: Sink,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CRIU has finished by then, and the sink has not; what is left of the deadline counts."""
    here = new_sandboxes.counting(COUNTER)
    left: list[float] = []

    def wait_idle(_: Capture, timeout: float) -> None:
        left.append(timeout)
        raise TimeoutError("CRIU did not end the images pages-1.img")

    monkeypatch.setattr(Capture, "wait_idle", wait_idle)
    frozen = FrozenTree(here, ROOT_PID, place / "images")
    with pytest.raises(StepFailed, match=r"pages-1.img within its deadline \(timeouts.freeze\)"):
        frozen.dump(criu, sink, 60)
    assert left[0] < 60, "the dump has taken its part of it"
    assert goes_on(here)


@pytest.mark.root
def test_a_restore_that_fails_says_why_and_the_source_can_still_go_on(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    data = place.parent / "data.bin"
    data.write_bytes(b"0123456789")
    here = new_sandboxes.counting(f"data = open('{data}')\n{COUNTER}")
    frozen = FrozenTree(here, ROOT_PID, place / "images")
    frozen.dump(criu, sink, 60)
    name = re.escape(str(data))
    for content, words in (
        (None, f"the destination lacks {name}"),
        (b"shorter", f"file {name} has 7 bytes on the destination"),
    ):
        data.unlink()
        if content:
            data.write_bytes(content)
        there, arrived = new_sandboxes.empty(), place / ("shorter" if content else "lacking")
        sink.write_to(arrived)
        refusal = rf"restore: CRIU could not restore gpt-1: {words}"
        with pytest.raises(StepFailed, match=refusal):
            RestoringTree(there, arrived).bring_up(criu, here.pipes(), 60)
        assert tasks(there) == []
        assert there.alive()
        assert not (arrived / "unlocked").exists()
        data.touch()
    frozen.thaw()
    assert goes_on(here)


@pytest.mark.root
def test_a_restored_tree_that_may_not_run_leaves_a_sandbox_for_the_next_attempt(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    """The sandbox stays as it was, with what lies in its /dev/shm; the same image runs at last."""
    here, there = new_sandboxes.counting(COUNTER), new_sandboxes.empty()
    left = dumped(criu, here, there, place, sink)
    before = count(there)
    for _ in range(2):
        attempt = RestoringTree(there, left.images)
        attempt.bring_up(criu, left.pipes, 60)
        attempt.drop()
        assert there.alive()
        assert tasks(there) == []
        assert count(there) == before
    left_over = RestoringTree(there, left.images)
    left_over.bring_up(criu, left.pipes, 60)
    later = RestoringTree(there, left.images)  # as an agent that was started anew finds it
    later.take_up()
    later.let_run(60)
    assert goes_on(there)
    left_over.drop()
    assert tasks(there) == []
    left.frozen.thaw()
    assert goes_on(here)


@pytest.mark.root
def test_a_criu_that_is_killed_leaves_the_pinned_tree_stopped_and_its_connections_whole(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    talk = """
import os, socket, threading
a = socket.create_server(("127.0.0.1", 0)); b = socket.create_connection(a.getsockname())
c, _ = a.accept()
"""
    echo = COUNTER.replace(
        "    os.write(1,", "    b.sendall(b'x'); assert c.recv(1) == b'x'\n    os.write(1,"
    )
    here = new_sandboxes.counting(talk + echo)
    frozen = FrozenTree(here, ROOT_PID, place / "images")
    frozen.dump(criu, sink, 60)
    frozen.pin()
    output.settle(here)
    still = count(here)
    for pid in criu_in(here):
        os.kill(pid, signal.SIGKILL)
    until(lambda: states(here) == {"T"})
    time.sleep(0.1)
    assert count(here) == still
    frozen.thaw()
    assert goes_on(here)
    assert said(here, output.STDERR) == ""


@pytest.mark.root
def test_a_criu_that_is_killed_no_longer_holds_a_tree_that_was_not_pinned(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    """What is read of the tree after that need not be of one moment."""
    here = new_sandboxes.counting(COUNTER)
    frozen = FrozenTree(here, ROOT_PID, place / "images")
    frozen.dump(criu, sink, 60)
    frozen.check_held()
    assert criu_in(here)
    for pid in criu_in(here):
        os.kill(pid, signal.SIGKILL)

    def lost() -> bool:
        try:
            frozen.check_held()
        except StepFailed as error:
            return "CRIU was killed while it held the tree" in str(error)
        return False

    until(lost)
    frozen.thaw()
    assert goes_on(here)


@pytest.mark.root
def test_no_descriptor_is_left_open_by_a_dump_and_its_end(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    here = new_sandboxes.counting(COUNTER)
    threads = set(threading.enumerate())
    for attempt in range(2):
        sink.ended.clear()
        with no_descriptor_left():
            frozen = FrozenTree(here, ROOT_PID, place / f"images-{attempt}")
            frozen.dump(criu, sink, 60)
            if attempt:
                sandboxes.end(here)
                frozen.release()
            else:
                frozen.thaw()
        assert set(threading.enumerate()) <= threads


ALICE = User(64001, 64001)


@pytest.mark.root
def test_an_image_that_makes_root_of_a_users_task_is_refused_and_would_do_so(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    here, there = new_sandboxes.counting(COUNTER, ALICE.uid), new_sandboxes.empty(ALICE.uid)
    assert {task.uids().real for task in tasks(here)} == {ALICE.uid}
    left = dumped(criu, here, there, place, sink)
    image_check.prepare(left.images, ALICE, there.root)
    for core in left.images.glob("core-*.img"):
        for number in range(1, 9):  # uid, gid, euid …
            change_first(core, (5, 10, number), 0)
    with pytest.raises(StepFailed, match=r"of a task with uid 0, euid 0, .* is user 64001's"):
        image_check.prepare(left.images, ALICE, there.root)
    left.end()
    restoring = RestoringTree(there, left.images)
    restoring.bring_up(criu, left.pipes, 60)
    restoring.let_run(60)
    assert {task.uids().real for task in tasks(there)} == {0}, "what the check is there for"


@pytest.mark.root
def test_a_process_that_was_stopped_before_the_dump_stays_stopped_after_it(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    """Also if the tree was pinned, and if another agent lets it go."""
    program = """
import signal
child = os.fork()
if not child:
    while True: time.sleep(0.01)
os.kill(child, signal.SIGSTOP)
"""
    here = new_sandboxes.counting(program + COUNTER)
    (stopped,) = [task.pid for task in tasks(here) if threads_stopped(task.pid)]
    for number, (pinned, another) in enumerate(product((False, True), repeat=2)):
        sink.images.clear()
        sink.ended.clear()
        images = place / f"images-{number}"
        frozen = FrozenTree(here, ROOT_PID, images)
        frozen.dump(criu, sink, 60)
        if pinned:
            frozen.pin()
        if another:
            later = FrozenTree(here, ROOT_PID, images)
            later.take_up()
            later.thaw()
        frozen.thaw()
        assert goes_on(here)
        assert threads_stopped(stopped)
        os.kill(stopped, signal.SIGCONT)
        until(lambda: not threads_stopped(stopped))
        os.kill(stopped, signal.SIGSTOP)
        until(lambda: threads_stopped(stopped))


def threads_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
