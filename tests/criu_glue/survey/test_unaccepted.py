# SPDX-License-Identifier: Apache-2.0
"""A connection that a program has not accepted yet keeps its capsule where it is.

That CRIU cannot dump it shows in test_known_causes.py.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from captured import PYTHON, ROOT_PID
from one_sandbox import Start, netns, plan, said, start
from waits import until

from liveshift.criu_glue.capsule.mounts import Placement
from liveshift.criu_glue.survey.survey import passing, survey
from liveshift.criu_glue.survey.unaccepted import REMEDY, find

__all__ = ["netns", "plan", "start"]

PROGRAM = """
import os, socket, time
idle = socket.create_server(("127.0.0.1", 7001))
four = socket.create_server(("127.0.0.1", 7002))
six = socket.create_server(("::", 7003), family=socket.AF_INET6)
at = [("127.0.0.1", 7002), ("127.0.0.1", 7002), ("::1", 7003)]
clients = [socket.create_connection(each) for each in at]
clients[2].sendall(b"before it is accepted")
os.write(1, b"ready\\n")
while not os.path.exists("/tmp/accept"):
    time.sleep(0.01)
accepted = [each.accept()[0] for each in (four, four, six)]
os.write(1, b"accepted\\n")
time.sleep(60)
"""


@pytest.mark.root
def test_it_is_named_until_it_is_accepted(start: Start, netns: Path) -> None:
    subprocess.run(["ip", "-netns", netns.name, "link", "set", "lo", "up"], check=True)
    here, nothing = start(PYTHON, "-Sc", PROGRAM), Placement((), ())
    until(lambda: "ready" in said(here))
    found = find(here)
    assert [remedy for _, remedy in found] == [REMEDY, REMEDY]
    for (text, _), port in zip(found, (7002, 7003), strict=True):
        assert text.startswith(f"process {ROOT_PID} (python3")
        assert text.endswith(
            f") has not accepted a TCP connection to its port {port} yet, which CRIU cannot dump"
        )
    assert passing(here, nothing) == found
    assert list(survey(here, ROOT_PID, nothing).problems) == found
    (here.root / "tmp/accept").touch()
    until(lambda: "accepted" in said(here))
    assert find(here) == passing(here, nothing) == []
    assert survey(here, ROOT_PID, nothing).problems == ()


@pytest.mark.root
def test_a_capsule_that_has_ended_has_none(start: Start) -> None:
    here = start("true")
    until(lambda: not here.alive())
    assert find(here) == []
