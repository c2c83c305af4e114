# SPDX-License-Identifier: Apache-2.0
"""How sandboxes end: with their command, by a signal, from outside, or before they ever stood."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from captured import ENV, ROOT_PID
from one_sandbox import Start, ended, netns, plan, said, start
from waits import until

from liveshift.criu_glue.capsule import output, sandboxes
from liveshift.criu_glue.capsule.mounts import Placement
from liveshift.criu_glue.capsule.output import STDERR
from liveshift.criu_glue.capsule.sandboxes import SandboxPlan
from liveshift.criu_glue.capsule.tree import inner_pid, tasks
from liveshift.criu_glue.images import pids
from liveshift.criu_glue.survey.survey import survey
from liveshift.errors import LiveshiftError, NotFound
from liveshift.runtime.agent.host.running_capsule import RunningCapsule

__all__ = ["netns", "plan", "start"]


@pytest.mark.parametrize(
    ("argv", "cwd", "status", "words"),
    [
        (["true"], "/", "exit 0", ""),
        (["sh", "-c", "exit 7"], "/", "exit 7", ""),
        (["sh", "-c", "kill -9 $$"], "/", "signal 9", ""),
        (["sh", "-c", "kill -TERM $$"], "/", "signal 15", ""),
        (["no-such-program"], "/", "exit 127", "cannot run no-such-program"),
        (["/etc/passwd"], "/", "exit 126", "cannot run /etc/passwd: Permission denied"),
        (["true"], "/nowhere", "exit 126", "cannot enter /nowhere on this host"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
@pytest.mark.root
def test_how_a_command_ended(
    start: Start, argv: list[str], cwd: str, status: str, words: str
) -> None:
    stands = start(*argv, cwd=cwd)
    assert ended(stands) == status
    assert words in said(stands, STDERR)


@pytest.mark.root
def test_signals_reach_a_command_whatever_its_starter_ignores(start: Start) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        stands = start("sleep", "60")
    finally:
        signal.signal(signal.SIGINT, before)
    until(lambda: [t for t in tasks(stands) if t.name() == "sleep"])
    (task,) = tasks(stands)
    assert inner_pid(task.pid) == ROOT_PID
    os.kill(task.pid, signal.SIGINT)
    assert ended(stands) == "signal 2"


@pytest.mark.root
def test_the_command_ends_the_sandbox_whatever_it_left_behind(start: Start) -> None:
    """Even something that never stops writing."""
    stands = start("sh", "-c", "yes & sleep 60 & exit 4")
    children = tasks(stands)
    assert ended(stands) == "exit 4"
    until(lambda: not [t for t in children if t.is_running()])


SLOW_CAT = "sh -c 'sleep 0.05; cat; echo done'"  # it reads when the command has long ended


@pytest.mark.parametrize(
    "script",
    [
        "exec > >({slow} > {log}); echo last",
        "exec 2> >({slow} > {log}); echo last >&2",
        "echo last | {slow} > {log} & exit 0",
    ],
    ids=["a reader of stdout", "a reader of stderr", "a pipeline in the background"],
)
@pytest.mark.root
def test_what_the_command_left_behind_may_finish_its_output(
    start: Start, plan: SandboxPlan, script: str
) -> None:
    stands = start("bash", "-c", script.format(slow=SLOW_CAT, log="/tmp/log"))
    assert ended(stands) == "exit 0"
    assert (plan.tmp / "log").read_text() == "last\ndone\n"


@pytest.mark.root
def test_late_output_of_what_was_left_behind_is_in_the_log(start: Start) -> None:
    stands = start("sh", "-c", "(sleep 0.05; echo late; echo error >&2) & exit 0")
    assert ended(stands) == "exit 0"
    assert (said(stands), said(stands, STDERR)) == ("late\n", "error\n")


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 4", "exit 4"),
        ("sleep 60 > /dev/null 2>&1 & exit 4", "exit 4"),
        ("sleep 60 & kill -9 $$", "signal 9"),
        ("sleep 60 & exit 4", "exit 4"),
        ("sleep 60 & exit 0", "exit 0"),
    ],
    ids=[
        "nothing is left",
        "what is left has closed its output",
        "a command that was killed",
        "what is left is quiet after a failure",
        "what is left is quiet",
    ],
)
@pytest.mark.root
def test_a_sandbox_ends_at_once_if_it_has_nothing_to_wait_for(
    start: Start, script: str, code: str
) -> None:
    stands = start("sh", "-c", script)
    until(lambda: stands.plan.status.read_text().endswith("\n"))
    until(lambda: not stands.alive(), seconds=1.5, what="the end: the longest wait takes 2 s")
    assert ended(stands) == code


@pytest.mark.root
def test_a_capsule_without_its_command_is_not_moved_and_ends_by_sigterm(start: Start) -> None:
    stands = start("sh", "-c", "while echo on; do sleep 0.05; done & exit 0")
    left = SimpleNamespace(name="gpt/1")
    capsule = RunningCapsule(left, 1, None, stands)  # type: ignore[arg-type]
    until(lambda: capsule.exit_code() == 0)
    assert tasks(stands), "what it left behind runs on"
    with pytest.raises(ProcessLookupError, match="gpt-1 has just ended"):
        survey(stands, ROOT_PID, Placement((), ()))
    with pytest.raises(LiveshiftError, match="gpt-1 has ended"):
        output.settle(stands)
    with pytest.raises(NotFound, match="gpt/1 has no running command any more"):
        capsule.send_signal(signal.SIGUSR1)
    assert stands.alive()
    capsule.send_signal(signal.SIGTERM)
    assert not stands.alive()
    with pytest.raises(NotFound):
        capsule.send_signal(signal.SIGTERM)
    assert capsule.exit_code() == 0


@pytest.mark.root
def test_ending_a_sandbox_ends_all_of_it_at_once(start: Start) -> None:
    stands = start("sh", "-c", "trap '' TERM INT HUP; sleep 60 & sleep 60 & setsid sleep 60 & wait")
    until(lambda: len(tasks(stands)) == 4)
    everyone = tasks(stands)
    sandboxes.end(stands)
    until(lambda: not [t for t in everyone if t.is_running()])
    assert not stands.alive()
    assert tasks(stands) == []
    sandboxes.end(stands)  # may be said again


@pytest.mark.root
def test_a_sandbox_that_cannot_be_built_says_why_and_leaves_nothing(plan: SandboxPlan) -> None:
    without = replace(plan, netns=Path("/run/netns/ls-test-missing"))
    with pytest.raises(LiveshiftError, match=r"the sandbox of gpt-1: .*ls-test-missing"):
        sandboxes.start(without, ["true"], ENV, "/")
    missing = replace(plan, shared=("/tmp/ls-test-missing",))
    with pytest.raises(LiveshiftError, match="cannot take /tmp/ls-test-missing"):
        sandboxes.start(missing, ["true"], ENV, "/")


@pytest.mark.root
@pytest.mark.parametrize(
    "early", [True, False], ids=["handed over while it runs", "and after its end"]
)
def test_a_tree_that_was_handed_over_is_reaped_as_if_it_had_been_started_here(
    plan: SandboxPlan, early: bool
) -> None:
    """As a restore does it: a task of the given pid, orphaned into the sandbox, is its root
    task. One that ends before it is handed over was an attempt, and the sandbox stays for the
    next."""
    stands = sandboxes.build_empty(plan, ROOT_PID, pids.RESERVED)
    try:
        assert tasks(stands) == []
        orphan = "(echo out; (sleep 0.25; echo err >&2)& sleep 0.2; exit 0)"
        ends = [f"/proc/{stands.init}/fd/{n}" for n in (sandboxes.STDOUT_FD, sandboxes.STDERR_FD)]
        script = f"echo {ROOT_PID - 1} > /proc/sys/kernel/ns_last_pid; {orphan} & true"
        command = [*sandboxes.enter(stands), "sh", "-c", script]
        with open(ends[0], "wb") as out, open(ends[1], "wb") as err:
            for attempt in range(2):
                subprocess.run(command, check=True, stdout=out, stderr=err)
                if attempt == 1 and early:
                    sandboxes.hand_over(stands)
                    break
                until(lambda: not tasks(stands))
                assert stands.alive()
        sandboxes.hand_over(stands)  # repeatable
        assert ended(stands) == "exit 0"
        assert (said(stands), said(stands, STDERR)) == ("out\n" * 2, "err\n" * 2)
    finally:
        sandboxes.end(stands)
