# SPDX-License-Identifier: Apache-2.0
"""Epoll sets that hold what their process has closed: it is out while CRIU works, and in again."""

from __future__ import annotations

import os
import re
import select
import signal
from pathlib import Path
from typing import Any

import pytest
from captured import ROOT_PID, Sink, sink
from descriptors import no_descriptor_left
from one_sandbox import said
from sandbox_trees import SandboxMaker, criu, goes_on, moved, new_sandboxes, place
from waits import until

from liveshift.criu_glue.capsule.mounts import Placement
from liveshift.criu_glue.capsule.output import STDERR
from liveshift.criu_glue.capsule.sandboxes import Sandbox
from liveshift.criu_glue.capsule.tree import in_order
from liveshift.criu_glue.criu.dump import FrozenTree
from liveshift.criu_glue.criu.tool import Criu
from liveshift.criu_glue.survey import epoll_sets
from liveshift.criu_glue.survey.survey import survey
from liveshift.errors import StepFailed

__all__ = ["criu", "new_sandboxes", "place", "sink"]

LEFT_OPEN = """
import ctypes, select, socket
libc = ctypes.CDLL(None, use_errno=True)
class Event(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("events", ctypes.c_uint32), ("data", ctypes.c_uint64)]
def register(epoll, fd, data):
    assert libc.epoll_ctl(epoll.fileno(), 1, fd, ctypes.byref(Event(1, data))) == 0
epoll = select.epoll()
kept, (stale, theirs), (again, our_end) = os.pipe(), os.pipe(), os.pipe()
register(epoll, kept[0], 11)
register(epoll, stale, 1 << 63 | 22)
number = stale
ours = os.dup(theirs)
os.set_inheritable(ours, True)
if not os.fork():
    os.close(ours)
    while True:
        time.sleep(0.01)
        if os.path.exists("/tmp/write"): os.unlink("/tmp/write"); os.write(theirs, b"x")
        if os.path.exists("/tmp/read"): os.unlink("/tmp/read"); os.read(stale, 1)
os.close(stale); os.close(theirs)
{then}
def ready():
    events = (Event * 9)()
    return sorted(events[n].data for n in range(libc.epoll_wait(epoll.fileno(), events, 9, 0)))
for n in range(10**9):
    os.write(1, b"%d %s\\n" % (n, repr(ready()).encode()))
    time.sleep(0.002)
"""
"""A set with two pipes; one was closed after a fork, and the child has it still."""

STALE = str([1 << 63 | 22])
SAME_NUMBER = "assert os.dup2(again, number) == number; register(epoll, number, 33)"
NUMBER_OF_SET = "assert os.dup2(epoll.fileno(), number) == number"


def seen(stands: Sandbox) -> str:
    return said(stands).split("\n")[-2].partition(" ")[2]


def entries(stands: Sandbox) -> list[epoll_sets.EpollEntry]:
    found, problems = epoll_sets.find(in_order(stands, ROOT_PID))
    assert not problems
    return found


@pytest.mark.parametrize(
    ("pair", "then"),
    [
        ("os.pipe()", ""),
        ("os.pipe()", SAME_NUMBER),
        ("os.pipe()", NUMBER_OF_SET),
        ("[end.detach() for end in socket.socketpair()]", ""),
    ],
    ids=["", "same number", "own", "socket"],
)
@pytest.mark.root
def test_a_set_with_a_closed_file_moves_and_holds_it_as_before(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink, pair: str, then: str
) -> None:
    three = "os.pipe(), os.pipe(), os.pipe()"
    program = LEFT_OPEN.replace("{then}", then).replace(three, f"os.pipe(), {pair}, os.pipe()")
    here, there = new_sandboxes.counting(program), new_sandboxes.empty()
    assert survey(here, ROOT_PID, Placement((), ())).problems == ()
    (entry,) = entries(here)
    assert (entry.owner, entry.holder, entry.data) == (ROOT_PID, ROOT_PID + 1, 1 << 63 | 22)
    assert seen(here) == "[]"
    moved(criu, here, there, place, sink)
    assert goes_on(there), said(there, STDERR)
    assert seen(there) == "[]"
    assert [e.data for e in entries(there)] == [1 << 63 | 22]
    (there.root / "tmp/write").touch()
    until(lambda: seen(there) == STALE)
    (there.root / "tmp/read").touch()
    until(lambda: seen(there) == "[]")


@pytest.mark.parametrize("how", ["thawed", "taken up", "fails"])
@pytest.mark.root
def test_a_set_of_a_capsule_that_stays_is_as_it_was(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink, how: str
) -> None:
    """What becomes ready while the entry is out is found to be so afterwards."""
    here = new_sandboxes.counting(LEFT_OPEN.replace("{then}", ""))
    found = entries(here)
    frozen = FrozenTree(here, ROOT_PID, place / "images")
    if how == "fails":
        sink.fails = StepFailed("ship", "no room")
        with pytest.raises(StepFailed, match="no room"):
            frozen.dump(criu, sink, 60, epoll=found)
    else:
        frozen.dump(criu, sink, 60, epoll=found)
        assert frozen.taken_out() == found
        assert entries(here) == []
        (here.root / "tmp/write").touch()
        if how == "taken up":
            later = FrozenTree(here, ROOT_PID, place / "images")
            later.take_up()
            later.thaw()
            frozen.release()
        frozen.thaw()
        until(lambda: seen(here) == STALE)
    assert goes_on(here)
    assert entries(here) == found


@pytest.mark.root
def test_a_file_that_was_closed_meanwhile_has_left_the_set(new_sandboxes: SandboxMaker) -> None:
    here = new_sandboxes.counting(LEFT_OPEN.replace("{then}", ""))
    pids = {inner: pid for pid, inner in in_order(here, ROOT_PID).items()}
    found = epoll_sets.take_out(entries(here), pids)
    assert len(found) == 1
    assert epoll_sets.take_out(found, pids) == [], "it is out"
    epoll_sets.put_in(found, pids)
    epoll_sets.put_in(found, pids)  # may be said again
    assert entries(here) == epoll_sets.unchanged(found, pids) == found
    os.kill(pids[ROOT_PID + 1], signal.SIGKILL)
    until(lambda: not entries(here))
    assert epoll_sets.unchanged(found, pids) == []


NOWHERE = """
import array, select, socket
epoll = select.epoll()
r, w = os.pipe()
a, b = socket.socketpair()
epoll.register(r, select.EPOLLIN)
socket.send_fds(a, [b"x"], [r])
os.close(r)
for n in range(10**9): os.write(1, b"%d\\n" % n); time.sleep(0.01)
"""
"""The file is on its way in a socket, and nowhere else."""


@pytest.mark.root
def test_a_file_that_is_nowhere_is_named_before_criu_fails_on_it(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    here = new_sandboxes.counting(NOWHERE)
    ((text, remedy),) = survey(here, ROOT_PID, Placement((), ())).problems
    assert text.startswith(f"process {ROOT_PID} (python3"), text
    assert "has an epoll set, descriptor 3, that still holds descriptor 4, of a file that" in text
    assert re.search(r"has open any more: pipe:\[\d+\]$", text)
    assert remedy
    with pytest.raises(StepFailed, match="dump"):
        moved(criu, here, new_sandboxes.empty(), place, sink)
    assert goes_on(here)


COMES_AND_GOES = """
import select
def churn():
    epoll = select.epoll()
    pipes = [os.pipe() for _ in range(20)]
    while True:
        for n, (r, w) in enumerate(pipes):
            epoll.register(r, 1)
            os.close(r); os.close(w)
            pipes[n] = os.pipe()
threading.Thread(target=churn, daemon=True).start()
for n in range(10**9): os.write(1, b"%d\\n" % n); time.sleep(0.01)
"""


@pytest.mark.root
def test_a_set_into_which_files_come_and_go_does_not_stand_in_the_way(
    new_sandboxes: SandboxMaker,
) -> None:
    here = new_sandboxes.counting(COMES_AND_GOES)
    for _ in range(50):
        assert survey(here, ROOT_PID, Placement((), ())).problems == ()
    assert goes_on(here)


@pytest.mark.root
def test_what_is_closed_while_it_is_looked_at_is_no_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, (end, other) = select.epoll(), os.pipe()
    closing = [end]
    ours.register(closing[0], select.EPOLLIN)
    really = epoll_sets._is

    def looked(*at: Any) -> bool:
        if closing:
            os.close(closing.pop())
        return really(*at)

    with ours:
        monkeypatch.setattr(epoll_sets, "_is", looked)
        assert epoll_sets.find({os.getpid(): ROOT_PID}) == ([], [])
        assert not closing, "it has looked"
    os.close(other)


SHARED_SET = """
import select
epoll = select.epoll()
pipes = [os.pipe() for _ in range(3)]
epoll.register(pipes[0][0], 1)
done = os.pipe()
if not os.fork():
    epoll.register(pipes[1][0], 1)
    late = os.pipe()
    epoll.register(late[0], 1)
    os.write(done[1], b"x")
    time.sleep(600)
os.read(done[0], 1)
alias = os.dup(pipes[2][0])
epoll.register(alias, 1)
copy = os.dup(alias)
os.close(alias)
for n in range(10**9): os.write(1, b"%d\\n" % n); time.sleep(0.01)
"""
"""A set of a parent and its child with files of each, and one that has another number by now."""


@pytest.mark.root
def test_a_set_that_processes_share(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    here, there = new_sandboxes.counting(SHARED_SET), new_sandboxes.empty()
    found = entries(here)
    assert sorted(entry.holder for entry in found) == [ROOT_PID, ROOT_PID + 1]
    moved(criu, here, there, place, sink)
    assert goes_on(there)
    kept = [(e.owner, e.epoll, e.number, e.holder) for e in entries(there)]
    assert sorted(kept) == sorted((e.owner, e.epoll, e.number, e.holder) for e in found)


@pytest.mark.parametrize(
    "entry",
    [
        epoll_sets.EpollEntry(1, 3, 1 << 40, 1, 3, 0, 1, 1),
        epoll_sets.EpollEntry(1, -1, -1, 1, -1, 0, -1, -1),
        epoll_sets.EpollEntry(2, 3, 7, 1, 3, 0, 1, 1),
        epoll_sets.EpollEntry(1, 0, 7, 1, 1 << 63, 0, 1, 1 << 80),
    ],
)
def test_entries_that_cannot_be_meant(entry: epoll_sets.EpollEntry) -> None:
    with no_descriptor_left(), pytest.raises(OSError, match=r"\[Errno \d+\]"):
        epoll_sets.put_in([entry], {1: os.getpid()})
