# SPDX-License-Identifier: Apache-2.0
"""Pseudo-terminals of a capsule, as mpirun, script(1) and pexpect make them, move along with it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from captured import ROOT_PID, Sink, sink
from one_sandbox import ended, said
from sandbox_trees import COUNTER, SandboxMaker, criu, goes_on, moved, new_sandboxes, place
from waits import until

from liveshift.criu_glue.capsule.mounts import Placement
from liveshift.criu_glue.capsule.output import STDERR
from liveshift.criu_glue.capsule.sandboxes import Sandbox
from liveshift.criu_glue.criu.tool import Criu
from liveshift.criu_glue.files.rights import User
from liveshift.criu_glue.survey.survey import survey
from liveshift.errors import StepFailed

__all__ = ["criu", "new_sandboxes", "place", "sink"]

ALICE = User(64001, 64001)

MOST_ATTEMPTS = 5
"""Of a move of the session, which has /dev/tty open for about a hundredth of its time."""

TALK = """
import fcntl, pty, signal, struct, termios
spare = os.openpty()
leader, master = pty.fork()
if not leader:
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    worker = os.fork()
    if not worker:
        os.setpgid(0, 0)
        def interrupted(*_): os.write(1, b"interrupted\\n")
        signal.signal(signal.SIGINT, interrupted)
        while os.tcgetpgrp(0) != os.getpgrp(): time.sleep(0.01)
        while True:
            line = os.read(0, 100)
            size = struct.unpack("HHHH", fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))[:2]
            os.write(1, b"%d %d %s %s\\n" % (*size, os.ttyname(0).encode(), line.strip()))
    while os.getpgid(worker) != worker: time.sleep(0.01)
    os.tcsetpgrp(0, worker)
    while os.waitpid(worker, os.WNOHANG) == (0, 0):
        with open("/dev/tty", "wb") as same:
            assert os.tcgetpgrp(same.fileno()) == worker
        time.sleep(0.002)
    os._exit(1)
mode = termios.tcgetattr(master); mode[3] &= ~termios.ECHO
termios.tcsetattr(master, termios.TCSANOW, mode)
fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 44, 123, 0, 0))
with os.fdopen(master, "r+b", buffering=0) as terminal:
    def heard():
        line = b""
        while not line.endswith(b"\\n"): line += terminal.read(1)
        return line.strip()
    time.sleep(0.2)
    for n in range(10**9):
        if os.path.exists("/tmp/interrupt"):
            os.unlink("/tmp/interrupt")
            terminal.write(b"\\x03")
            os.write(2, heard() + b"\\n")
        terminal.write(b"%d\\n" % n)
        answer = heard()
        if answer != b"44 123 /dev/pts/1 %d" % n:
            sys.exit((answer, n, terminal.read(4000)))
        os.write(1, b"%d\\n" % n)
        time.sleep(0.002)
"""
"""A session on a terminal: its leader, who finds it as /dev/tty and looks which process group is in
the foreground, and that group, which answers, is interrupted by ^C and sees the size."""


@pytest.mark.root
def test_terminals_are_a_capsules_own(new_sandboxes: SandboxMaker) -> None:
    """Numbers begin at 0, and none of the host's is there to be written to."""
    first = new_sandboxes.run(
        ["sh", "-c", "stat -fc %T /dev/pts; ls /dev/pts; stat -c %a /dev/pts/ptmx"]
    )
    assert ended(first) == "exit 0", said(first, STDERR)
    assert said(first).split() == ["devpts", "ptmx", "666"]
    program = "a, b = os.openpty(); print(os.ttyname(b), os.stat(os.ttyname(b)).st_gid)"
    for uid in (0, ALICE.uid):
        named = new_sandboxes.start(program, uid)
        assert ended(named) == "exit 0", said(named, STDERR)
        assert said(named) == "/dev/pts/0 5\n"


@pytest.mark.parametrize("uid", [0, ALICE.uid], ids=["root", "alice"])
@pytest.mark.root
def test_a_session_on_a_terminal_goes_on_after_two_moves(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink, uid: int
) -> None:
    def interrupt(stands: Sandbox) -> None:
        before = said(stands, STDERR).count("interrupted\n")
        order = stands.root / "tmp/order"
        order.touch()
        os.chown(order, uid, uid)  # who removes it
        order.rename(stands.root / "tmp/interrupt")
        until(lambda: said(stands, STDERR).count("interrupted\n") > before)

    here = new_sandboxes.counting(TALK, uid)
    interrupt(here)
    assert survey(here, ROOT_PID, Placement((), ())).problems == ()
    for _ in range(2):
        there = new_sandboxes.empty(uid)
        moved_in_the_end(criu, here, there, place, sink)
        assert goes_on(there), said(there, STDERR)
        interrupt(there)
        here = there
    lines = [int(n) for n in said(here).split()]
    assert lines == list(range(len(lines)))
    assert said(here, STDERR) == "interrupted\n" * 3


def moved_in_the_end(criu: Criu, here: Sandbox, there: Sandbox, place: Path, sink: Sink) -> None:
    """The leader has /dev/tty open for moments, and CRIU gives up if it meets one: the session goes
    on, and a further attempt moves it, as an evacuation makes one."""
    for attempt in range(MOST_ATTEMPTS):
        try:
            moved(criu, here, there, place / f"{here.init}-{attempt}", sink)
            return
        except StepFailed as failed:
            if not str(failed).endswith("a task holds /dev/tty, which CRIU cannot dump"):
                raise
        assert goes_on(here), said(here, STDERR)
    pytest.fail(f"CRIU met an open /dev/tty in {MOST_ATTEMPTS} attempts")


@pytest.mark.root
def test_script_moves(criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink) -> None:
    loop = "n=0; while :; do echo $n; n=$((n+1)); sleep 0.01; done"
    here = new_sandboxes.run(["script", "-qec", loop, "/tmp/typescript"])
    there = new_sandboxes.empty()
    assert goes_on(here)
    moved(criu, here, there, place, sink)
    assert goes_on(there), said(there)
    lines = [int(n) for n in said(there).split()]
    assert lines == list(range(len(lines)))
    assert subprocess.run(["ls", there.root / "dev/pts"], capture_output=True).stdout.split()


HOLDS_TTY = """
import pty
pid, master = pty.fork()
if not pid:
    tty = open("/dev/tty", "wb")
    os.write(1, b"x")
    time.sleep(600)
os.read(master, 1)
for n in range(10**9): os.write(1, b"%d\\n" % n); time.sleep(0.01)
"""


@pytest.mark.root
def test_an_open_dev_tty_is_named_before_criu_fails_on_it(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    here = new_sandboxes.counting(HOLDS_TTY)
    ((text, _),) = survey(here, ROOT_PID, Placement((), ())).problems
    assert text.endswith(" holds /dev/tty, which CRIU cannot dump")
    with pytest.raises(StepFailed, match="dump"):
        moved(criu, here, new_sandboxes.empty(), place, sink)
    assert goes_on(here)


@pytest.mark.parametrize("number", [31, 32])
@pytest.mark.root
def test_a_terminal_of_a_number_that_criu_does_not_come_to(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink, number: int
) -> None:
    program = f"for _ in range({number} + 1): pair = os.openpty()\nos.closerange(3, pair[0])\n"
    here = new_sandboxes.counting(program + COUNTER)
    there = new_sandboxes.empty()
    assert set(os.listdir(here.root / "dev/pts")) == {"ptmx", str(number)}
    problems = survey(here, ROOT_PID, Placement((), ())).problems
    if number < 32:
        assert not problems
        moved(criu, here, there, place, sink)
        assert goes_on(there)
        return
    assert f"holds the terminal /dev/pts/{number} and only 0 below it" in problems[0][0]
    with pytest.raises(StepFailed, match="restore"):
        moved(criu, here, there, place, sink)
