# SPDX-License-Identifier: Apache-2.0
"""The survey names processes that have other rights than the capsule's user."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from captured import PYTHON, ROOT_PID
from one_sandbox import Start, netns, plan, said, start
from waits import until

from liveshift.criu_glue.capsule.mounts import Placement
from liveshift.criu_glue.capsule.sandboxes import SandboxPlan
from liveshift.criu_glue.survey.survey import survey

__all__ = ["netns", "plan", "start"]

NOBODY = 65534

STARTS = """
import os, subprocess, sys, time
os.chdir("/tmp")
child = subprocess.Popen(sys.argv[1:])
if sys.argv[2] == "0":
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def sleep() -> Iterator[Path]:
    """A program with rights of its own."""
    place = Path(f"/var/tmp/ls-test-ids-{os.getpid()}")
    place.mkdir(mode=0o755)
    program = Path(shutil.copy("/usr/bin/sleep", place))
    yield program
    shutil.rmtree(place)


def problems(start: Start, plan: SandboxPlan, uid: int, program: Path, seconds: str) -> list[str]:
    theirs = replace(plan, uid=uid, gid=uid, groups=(uid, 7))
    stands = start(PYTHON, "-Sc", STARTS, str(program), seconds, plan=theirs)
    until(lambda: "ready" in said(stands))
    return [text for text, _ in survey(stands, ROOT_PID, Placement((), ("/tmp",))).problems]


@pytest.mark.root
@pytest.mark.parametrize(
    ("mode", "group", "rights"),
    [
        (0o755, 0, None),
        (0o4755, 0, "user 0 and capabilities"),
        (0o2755, 8, "group 8"),
        (0o2755, 7, None),
    ],
)
def test_a_program_with_a_set_id_bit_is_named(
    start: Start, plan: SandboxPlan, sleep: Path, mode: int, group: int, rights: str | None
) -> None:
    os.chown(sleep, 0, group)
    sleep.chmod(mode)
    found = problems(start, plan, NOBODY, sleep, "600")
    text = f"has the rights of {rights}, and its capsule is user {NOBODY}'s"
    assert [text in each for each in found] == ([True] if rights else [])


@pytest.mark.root
def test_one_with_file_capabilities_is_named(start: Start, plan: SandboxPlan, sleep: Path) -> None:
    subprocess.run(["/usr/sbin/setcap", "cap_net_raw+ep", str(sleep)], check=True)
    (found,) = problems(start, plan, NOBODY, sleep, "600")
    assert f"has the rights of capabilities, and its capsule is user {NOBODY}'s" in found


@pytest.mark.root
@pytest.mark.parametrize(("uid", "seconds"), [(NOBODY, "0"), (0, "600")])
def test_one_that_has_ended_or_is_in_a_capsule_of_root_is_not(
    start: Start, plan: SandboxPlan, sleep: Path, uid: int, seconds: str
) -> None:
    os.chown(sleep, 1, 1)
    sleep.chmod(0o4755)
    assert problems(start, plan, uid, sleep, seconds) == []
