# SPDX-License-Identifier: Apache-2.0
"""An ended child keeps its capsule where it is if CRIU would alter the status of the child."""

from __future__ import annotations

import resource
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from captured import ROOT_PID, Sink, sink
from one_sandbox import said
from sandbox_trees import SandboxMaker, criu, moved, new_sandboxes, place
from waits import until

from liveshift.criu_glue.capsule.mounts import Placement
from liveshift.criu_glue.capsule.sandboxes import Sandbox
from liveshift.criu_glue.criu.tool import Criu
from liveshift.criu_glue.survey.survey import passing, survey
from liveshift.criu_glue.survey.unwaited import REMEDY, altered, find
from liveshift.errors import StepFailed
from liveshift.runtime.agent.departure import freeze_obstacles

__all__ = ["criu", "new_sandboxes", "place", "sink"]

PARENT = """
import resource, signal
_, most = resource.getrlimit(resource.RLIMIT_CORE)
os.chdir("/tmp")
for number in signal.valid_signals() - {{signal.SIGKILL, signal.SIGSTOP}}:
    signal.signal(number, signal.SIG_DFL)  # Python handles some, and its caller may ignore some
children = []
for status in {statuses}:
    if not (pid := os.fork()):
        resource.setrlimit(resource.RLIMIT_CORE, (most if status & 0x80 else 0, most))
        if not status & 0x7f:
            os._exit(status >> 8)
        os.kill(os.getpid(), status & 0x7f)
        time.sleep(60)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    children.append(pid)
os.write(1, b"ready\\n")
while not os.path.exists("/tmp/wait"):
    time.sleep(0.01)
os.write(1, b"got %s\\n" % b" ".join(b"%d" % os.waitpid(pid, 0)[1] for pid in children))
time.sleep(600)
"""
"""Its children end with these statuses of wait(2), and it waits for them when it is told to."""

HARMLESS = {
    *(signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH),
    *(signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
}
"""A process does not end by these (signal(7))."""

CODES = [code << 8 for code in (0, 1, 64, 126, 127, 128, 129, 130, 137, 143, 192, 200, 255)]
SIGNALS = sorted(signal.valid_signals() - HARMLESS)  # without 32 and 33, which are glibc's own
WITH_CORE = [signal.SIGABRT | 0x80, signal.SIGSEGV | 0x80]


def parent(new_sandboxes: SandboxMaker, statuses: Sequence[int]) -> Sandbox:
    here = new_sandboxes.start(PARENT.format(statuses=[*map(int, statuses)]))
    until(lambda: "ready" in said(here))
    return here


def got(stands: Sandbox) -> list[int]:
    (stands.root / "tmp/wait").touch()
    until(lambda: "got" in said(stands))
    _, _, line = said(stands).partition("got ")
    return [int(word) for word in line.split()]


@pytest.mark.root
def test_a_status_is_named_where_criu_would_alter_it(
    criu: Criu, new_sandboxes: SandboxMaker, place: Path, sink: Sink
) -> None:
    """CRIU decides, on real children; nothing is refused that comes back as it was."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    dumped = WITH_CORE if most else []  # what may leave no core has none
    statuses = [*CODES, *SIGNALS, *dumped]
    here, there = parent(new_sandboxes, statuses), new_sandboxes.empty()
    named = find(here)
    moved(criu, here, there, place, sink)
    after = got(there)
    assert len(after) == len(statuses)
    other = {before: now for before, now in zip(statuses, after, strict=True) if before != now}
    assert {status for status in statuses if altered(status)} == other.keys()
    assert len(named) == len(other) == 8 + 1 + len(dumped)
    for status, now in other.items():
        if status & 0x7F:
            assert ("without one" in altered(status)) == (now == status & 0x7F)
            assert "without one" in altered(status) or f"make signal {now}" in altered(status)
        else:
            assert f"with code {status >> 8}," in altered(status)
            assert f"CRIU would make code {now >> 8} of that" in altered(status)


@pytest.mark.root
def test_it_keeps_the_capsule_here_until_the_parent_has_waited(
    new_sandboxes: SandboxMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, nothing = parent(new_sandboxes, [137 << 8, 3 << 8]), Placement((), ())
    ((text, remedy),) = survey(here, ROOT_PID, nothing).problems
    assert text.startswith(f"process {ROOT_PID + 1} (python3")
    assert text.endswith(
        ") has ended with code 137, and its parent has not waited for it: CRIU would make code 9 of"
        " that"
    )
    assert remedy == REMEDY
    assert passing(here, nothing) == find(here) == [(text, remedy)]
    monkeypatch.setattr(freeze_obstacles, "UNLOCKED_FROZEN_S", 0.05)
    with pytest.raises(StepFailed, match=r"at that moment process .* has ended with code 137"):
        freeze_obstacles.check_before_dump(here, nothing, lambda: False)
    with pytest.raises(StepFailed, match=r"at that moment process .* has ended with code 137"):
        freeze_obstacles.check_after_dump(here)
    assert got(here) == [137 << 8, 3 << 8]
    assert find(here) == passing(here, nothing) == []
    freeze_obstacles.check_after_dump(here)


def test_a_capsule_that_has_ended_has_none() -> None:
    gone: Any = SimpleNamespace(init=2**22 + 1)
    assert find(gone) == []
