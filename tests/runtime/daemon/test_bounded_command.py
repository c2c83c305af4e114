# SPDX-License-Identifier: Apache-2.0
"""A command that runs beside a daemon: its end, its time, and what becomes of its processes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from waits import until, until_async

from liveshift.runtime.daemon.bounded_command import CommandEnd, not_runnable, run_bounded

LONG_S = 60.0


def run(script: str, limit_s: float = LONG_S, **variables: str) -> CommandEnd:
    return asyncio.run(run_bounded(["/bin/sh", "-c", script], variables, limit_s))


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie that nobody has waited for has, too."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_it_has_the_variables_and_ends_with_a_code(tmp_path: Path) -> None:
    said = tmp_path / "said"
    end = run(f'echo "$WHAT, $PATH" > {said}; pwd >> {said}; exit 3', WHAT="a job")
    assert (end.code, end.said, end.error) == (3, "", "")
    assert said.read_text() == f"a job, {os.environ['PATH']}\n/\n"


@pytest.mark.parametrize(
    ("script", "last"),
    [
        ("echo first >&2; echo last >&2; echo >&2", "last"),
        ("printf 'no end of line' >&2", "no end of line"),
        ("printf 'a\\033[31mb\\377\\n' >&2", "a?[31mb\ufffd"),
        ("head -c 300000 /dev/zero | tr '\\0' x >&2; echo >&2; echo last >&2", "last"),
        ("echo on stdout; exec 2>&-", ""),
    ],
)
def test_the_last_line_of_stderr_is_kept(script: str, last: str) -> None:
    end = run(script)
    assert end.code == 0
    assert end.said[-200:].removeprefix("x" * 196) == last


def test_a_signal_that_ends_it_is_named() -> None:
    assert run("kill -TERM $$").code == -signal.SIGTERM


def test_what_cannot_be_started_is_an_end_too() -> None:
    end = asyncio.run(run_bounded(["/nothing/here"], {}, LONG_S))
    assert (end.code, end.error) == (None, "No such file or directory")


def test_it_is_killed_with_its_group_when_its_time_is_over(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    end = run(f"sleep 600 & echo $! $$ > {pids}; echo waits >&2; wait", limit_s=1.0)
    assert (end.code, end.said) == (None, "waits")
    assert 1.0 <= end.seconds < 30
    for pid in map(int, pids.read_text().split()):
        until(lambda pid=pid: gone(pid), what="its processes to be killed")  # type: ignore[misc]


def test_nobody_waits_for_children_that_it_leaves_behind(tmp_path: Path) -> None:
    """They have its stderr, and need not be of use to anybody."""
    pids = tmp_path / "pids"
    end = run(f"sleep 600 & echo $! > {pids}; echo started >&2")
    child = int(pids.read_text())
    try:
        assert (end.code, end.said) == (0, "started")
        assert not gone(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_it_is_killed_if_its_caller_is_cancelled(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def play() -> None:
        script = f"echo $$ > {pids}.new; mv {pids}.new {pids}; sleep 600"
        task = asyncio.ensure_future(run_bounded(["/bin/sh", "-c", script], {}, LONG_S))
        await until_async(pids.exists)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        pid = int(pids.read_text())
        await until_async(lambda: gone(pid))

    asyncio.run(play())


def test_a_program_that_is_not_there_is_known_before_it_is_needed(tmp_path: Path) -> None:
    assert not_runnable(()) == not_runnable(("/bin/sh", "-c")) == ""
    program = tmp_path / "power-off"
    why = f"{program} is no program that can be run here"
    assert not_runnable([str(program)]) == why
    program.touch()
    assert not_runnable([str(program)]) == why, "nobody may run it"
    program.chmod(0o755)
    assert not_runnable([str(program)]) == ""
    assert not_runnable([str(tmp_path)]) == f"{tmp_path} is no program that can be run here"
