# SPDX-License-Identifier: Apache-2.0
"""Each cause in a capsule that stops CRIU: the survey finds it before, in the same words.

``KNOWN`` of explain.py says which check finds what; here real programs are surveyed, and then given
to CRIU all the same.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from captured import ROOT_PID, Sink, sink
from sandbox_trees import COUNTER, SandboxMaker, criu, goes_on, moved, new_sandboxes, place
from waits import until

from liveshift.criu_glue.capsule.mounts import Placement
from liveshift.criu_glue.criu import dump
from liveshift.criu_glue.criu.explain import KNOWN
from liveshift.criu_glue.criu.tool import Criu
from liveshift.criu_glue.survey import lost_names
from liveshift.criu_glue.survey.survey import survey
from liveshift.errors import SourceFailed, StepFailed

__all__ = ["criu", "new_sandboxes", "place", "sink"]


@dataclass(frozen=True)
class Scene:
    """``program`` brings the cause about; the survey and CRIU's log, explained, both say ``words``.
    ``step``: what of a move fails."""

    program: str
    words: str
    step: str = "dump"


SCENES = {
    r"anon_inode:\[userfaultfd\]": Scene(
        "import ctypes; u = ctypes.CDLL(None).syscall(323, 1)\n",
        "holds a userfaultfd, which CRIU cannot dump",
    ),
    r"Can't dump nested user namespace": Scene(
        "import ctypes; r, w = os.pipe()\n"
        "if not os.fork():\n"
        " ctypes.CDLL(None).unshare(0x10000000); os.write(w, b'x'); time.sleep(600)\n"
        "os.read(r, 1)\n",
        "a user namespace of its own, which CRIU cannot dump",
    ),
    r"Unsupported proto \d+": Scene(
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)\n"
        "s.bind(('127.0.0.1', 0)); s.listen()\n",
        "an MPTCP socket, which CRIU cannot dump",
    ),
    r"Dump eventpoll .*failed": Scene(
        "import select, socket\n"
        "e = select.epoll(); r, w = os.pipe(); a, b = socket.socketpair(); e.register(r, 1)\n"
        "socket.send_fds(a, [b'x'], [r]); os.close(r)\n",
        "that no process of the capsule has open any more",
    ),
    r"ctty inheritance detected": Scene(
        "import pty\npid, m = pty.fork()\n"
        "if not pid:\n t = open('/dev/tty', 'wb'); os.write(1, b'x'); time.sleep(600)\n"
        "os.read(m, 1)\n",
        "holds /dev/tty, which CRIU cannot dump",
    ),
    r"Unable to open \S*ptmx with specified index (\d+)": Scene(
        "for _ in range(41): pair = os.openpty()\nos.closerange(3, pair[0])\n",
        "holds the terminal /dev/pts/40 and",
        "restore",
    ),
    r"Index (\d+) on \S+ is too big": Scene(
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\n"
        "pairs = [os.openpty() for _ in range(1002)]\n",
        "holds the terminal /dev/pts/1001, and CRIU dumps none above 1000",
    ),
    r"Can't dump ghost file (\S.*) of (\d+) size": Scene(
        "f = open('/tmp/large', 'wb'); f.write(bytes(5 << 20)); f.flush()\n"
        "os.unlink('/tmp/large')\n",
        "/tmp/large, which was deleted and has",
    ),
    r"Dangling connection|half of stream unix connection|"
    r"External socket is used|name-less external socket": Scene(
        "import socket; s = socket.socket(socket.AF_UNIX); s.connect('{socket}')\n",
        "outside its capsule",
    ),
    r"Found a closed in-flight socket": Scene(
        "import socket; l = socket.socket(socket.AF_UNIX); l.bind('/tmp/own'); l.listen()\n"
        "c = socket.socket(socket.AF_UNIX); c.connect('/tmp/own'); c.close()\n",
        "has closed its UNIX socket before it was accepted",
    ),
    r"In-flight connection \(l\)": Scene(
        "import socket; l = socket.create_server(('127.0.0.1', 7001))\n"
        "c = socket.create_connection(('127.0.0.1', 7001))\n",
        "has not accepted a TCP connection",
    ),
}
"""By the pattern in ``KNOWN``."""

ELSEWHERE = (
    r"Can not set (?:ofd lock|posix lock|flock)",  # test_file_locks.py
    r"Unseizable non-zombie|Unable to interrupt task: (\d+) \(Operation not permitted\)"
    r"[\s\S]*Unable to detach from \1:",  # test_traced.py: the tracer is outside the capsule
    r"io_uring",  # cannot be: seccomp hides it (capsule_task.c)
    r"Can't lookup mount=(\d+)",  # a program in a sandbox cannot mount anything
)


@pytest.fixture
def server(place: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(place.parent / "server.sock"))
        listening.listen()
        yield listening


@pytest.fixture
def outside(server: socket.socket) -> str:
    return str(server.getsockname())


def test_there_is_a_scene_for_each_cause_in_a_capsule() -> None:
    causes = {known.pattern for known in KNOWN if known.in_capsule}
    assert causes == {*SCENES, *ELSEWHERE}


@pytest.mark.parametrize("pattern", SCENES)
@pytest.mark.root
def test_the_survey_says_before_what_criu_says_after(
    criu: Criu,
    new_sandboxes: SandboxMaker,
    place: Path,
    sink: Sink,
    outside: str,
    pattern: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = SCENES[pattern]
    monkeypatch.setattr(lost_names, "MOST_DELETED", 4 << 20)
    monkeypatch.setattr(dump, "COMMON", [*dump.COMMON[:-1], str(4 << 20)])
    here = new_sandboxes.counting(scene.program.replace("{socket}", outside) + COUNTER)
    ((text, remedy),) = survey(here, ROOT_PID, Placement((), ())).problems
    assert scene.words in text
    assert remedy
    with pytest.raises(StepFailed, match=scene.step) as failed:
        moved(criu, here, new_sandboxes.empty(), place, sink)
    assert scene.words.removeprefix("that ") in str(failed.value)
    if scene.step == "dump":
        assert goes_on(here)
        assert not isinstance(failed.value, SourceFailed), "the survey decides about the next one"
    else:
        assert isinstance(failed.value, SourceFailed), "with any destination it would again"


@pytest.mark.root
def test_the_socket_is_named_and_those_inside_are_no_problem(
    new_sandboxes: SandboxMaker, server: socket.socket, outside: str
) -> None:
    program = (
        "import socket; a, b = socket.socketpair(); l = socket.socket(socket.AF_UNIX)\n"
        "l.bind('/tmp/own'); l.listen(); c = socket.socket(socket.AF_UNIX); c.connect('/tmp/own')\n"
        "d, _ = l.accept(); e = socket.socket(socket.AF_UNIX); e.connect('/tmp/own'); a.close()\n"
        "if not os.fork(): time.sleep(600)\n"
    )
    fine = new_sandboxes.counting(program + COUNTER)
    assert survey(fine, ROOT_PID, Placement((), ())).problems == ()
    scene = next(scene for scene in SCENES.values() if "{socket}" in scene.program)
    here = new_sandboxes.counting(scene.program.replace("{socket}", outside) + COUNTER)
    accepted, _ = server.accept()
    with accepted:
        ((text, _),) = survey(here, ROOT_PID, Placement((), ())).problems
    us = f"process {os.getpid()} ({Path('/proc/self/comm').read_text().strip()}) of its host"
    assert text.startswith(f"process {ROOT_PID} is connected to {us} outside its capsule")
    until(lambda: survey(here, ROOT_PID, Placement((), ())).problems == ())
