# SPDX-License-Identifier: Apache-2.0
"""`liveshift run` as a person and a script meet it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli_harness import DEADLINE, Call, Starter, Terminal, ended

from liveshift.criu_glue.capsule.output import STDERR
from liveshift.errors import LiveshiftError, NotPermitted, Refused
from liveshift.runtime.messages import (
    SNAPSHOTS_AUTO,
    SNAPSHOTS_OFF,
    GetEvents,
    GetStatus,
    ReadOutput,
    RunJob,
    SignalJob,
)


def test_run_relays_both_streams_unmodified_and_ends_with_the_jobs_code(
    double: Any, start: Starter
) -> None:
    process = start("run", "--name", "gpt", "--", "train")
    double.wait_for(ReadOutput)
    double.print("gpt/0", b"a\x00\xff\rb")
    double.print("gpt/0", b"oops\n", STDERR)
    double.print("gpt/0", b" no newline")
    double.end("gpt/0", 3)
    out, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, out, err) == (3, b"a\x00\xff\rb no newline", b"oops\n")


def test_run_passes_on_command_environment_directory_and_groups(
    double: Any, call: Call, environment: dict[str, str], tmp_path: Path
) -> None:
    odd = {**environment, "EMPTY": "", "TWO": "a=b\nc"}
    words = ("run", "-d", "--nnodes", "2", "--name", "gpt", "--", "torchrun", "--nnodes", "9", "--")
    assert call(*words, "-x", "", env=odd) == (0, "gpt\n", "")
    ask = double.wait_for(RunJob)
    assert ask.argv == ["torchrun", "--nnodes", "9", "--", "-x", ""]
    assert (ask.nnodes, ask.name, ask.cwd) == (2, "gpt", str(tmp_path))
    assert ask.env == odd
    assert (ask.gid, sorted(ask.groups)) == (os.getgid(), sorted(os.getgroups()))


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_run_passes_on_the_umask(double: Any, call: Call, umask: int) -> None:
    assert call("run", "-d", "--name", "gpt", "--", "train", umask=umask) == (0, "gpt\n", "")
    assert double.wait_for(RunJob).umask == umask


@pytest.mark.parametrize(
    "locale", [{}, {"LANG": "C"}, {"LC_CTYPE": "C"}, {"LC_CTYPE": "C.UTF-8"}, {"LC_ALL": "C"}]
)
def test_run_passes_on_the_callers_locale_and_not_the_one_of_its_own_python(
    double: Any, call: Call, environment: dict[str, str], locale: dict[str, str]
) -> None:
    """Python sets LC_CTYPE for itself where the caller's locale is C (PEP 538)."""
    own = {k: v for k, v in environment.items() if not k.startswith(("LC_", "LANG"))} | locale
    assert call("run", "-d", "--", "train", env=own | {"NAME": "Zoë"})[0] == 0
    assert double.wait_for(RunJob).env == own | {"NAME": "Zoë"}


@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_run_says_that_what_waits_on_stdin_is_not_read(
    double: Any, start: Starter, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "input").write_bytes(b"hello\n")
    reads, writes = os.pipe()
    os.write(writes, b"hello\n")
    with (tmp_path / "input").open("rb") as file, open(reads, "rb"), open(writes, "wb"):
        process = start("run", "-d", "--", "cat", stdin=file if kind == "file" else reads)
        code, _, err = ended(process)
    assert code == 0
    (line,) = err.splitlines()
    assert line.startswith("the command's standard input is empty: ")
    assert line.endswith("liveshift run -- sh -c 'COMMAND < FILE'")
    double.wait_for(RunJob)


def test_run_says_nothing_of_a_stdin_without_data(
    double: Any, start: Starter, terminal: Terminal, tmp_path: Path
) -> None:
    """CI systems start programs with an open pipe or a socket that brings nothing."""
    reads, writes = os.pipe()
    ours, theirs = socket.socketpair()
    (tmp_path / "empty").touch()
    terminal.type(b"typed ahead\n")
    with (
        open(reads, "rb"),
        open(writes, "wb"),
        ours,
        theirs,
        (tmp_path / "empty").open("rb") as empty,
    ):
        for stdin in (reads, theirs, empty, terminal.theirs, subprocess.DEVNULL):
            code, _, err = ended(start("run", "-d", "--", "cat", stdin=stdin))
            assert (code, err) == (0, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_run_goes_on_where_the_caller_has_closed_a_stream(
    double: Any, environment: dict[str, str], tmp_path: Path, closed: str
) -> None:
    words = [sys.executable, "-m", "liveshift.launcher", "run", "--name", "gpt", "--", "train"]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        shell, env=environment, cwd=tmp_path, stdout=pipe, stderr=pipe
    ) as process:
        double.wait_for(ReadOutput)
        double.print("gpt/0", b"out\n")
        double.print("gpt/0", b"err\n", STDERR)
        double.end("gpt/0", 3)
        out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 3
    streams = closed.split()
    assert out == (b"" if ">&-" in streams else b"out\n")
    assert err == (b"" if "2>&-" in streams else b"err\n")


def test_run_works_without_the_two_dashes(double: Any, call: Call) -> None:
    code, _, _ = call("run", "-d", "python", "-c", "pass", "--nnodes", "3", "--", "--help")
    assert code == 0
    ask = double.wait_for(RunJob)
    assert ask.argv == ["python", "-c", "pass", "--nnodes", "3", "--", "--help"]
    assert ask.nnodes == 1


def test_run_asks_for_a_ranks_variables_only_when_told_to(double: Any, call: Call) -> None:
    assert call("run", "-d", "--", "train")[0] == 0
    assert not double.wait_for(RunJob).env_ranks
    assert call("run", "-d", "--env-ranks", "--", "train")[0] == 0
    assert double.wait_for(RunJob, 2).env_ranks


def test_run_passes_on_how_often_snapshots_are_taken(double: Any, call: Call) -> None:
    for number, (words, every) in enumerate(
        [
            ((), 0.0),
            (("--snapshot-every", "2.5m"), 150.0),
            (("--snapshot-every", "off"), SNAPSHOTS_OFF),
            (("--snapshot-every", "auto"), SNAPSHOTS_AUTO),
        ],
        start=1,
    ):
        assert call("run", "-d", *words, "--", "train")[0] == 0
        assert double.wait_for(RunJob, number).snapshot_every == every
    for wrong in ("soon", "0", "0.5", "-1", "-2"):
        code, out, err = call("run", "-d", "--snapshot-every", wrong, "--", "train")
        assert (code, out) == (2, "")
        assert err


def test_run_passes_on_how_long_ranks_wait_for_each_other(double: Any, call: Call) -> None:
    assert call("run", "-d", "--", "train")[0] == 0
    assert double.wait_for(RunJob).collective == 0
    assert call("run", "-d", "--collective-timeout", "5m", "--", "train")[0] == 0
    assert double.wait_for(RunJob, 2).collective == 300
    for wrong in ("soon", "0", "-1"):
        code, out, err = call("run", "-d", "--collective-timeout", wrong, "--", "train")
        assert (code, out) == (2, "")
        assert "error: " in err


def test_run_leaves_out_of_the_environment_what_is_no_text(
    double: Any, call: Call, environment: dict[str, str]
) -> None:
    odd = {os.fsencode(k): os.fsencode(v) for k, v in environment.items()} | {b"ODD": b"\xff\xfe"}
    code, _, err = call("run", "-d", "--", "train", env=odd)
    assert code == 0
    assert "'ODD' is left out" in err
    assert "ODD" not in double.wait_for(RunJob).env


def test_run_tells_several_capsules_apart_and_holds_back_started_lines(
    double: Any, start: Starter
) -> None:
    process = start("run", "--nnodes", "2", "--name", "gpt", "--", "train")
    double.wait_for(ReadOutput, 2)
    double.print("gpt/0", b"step ")
    double.print("gpt/1", b"one\ntwo\n")
    double.print("gpt/1", b"warning\n", STDERR)
    double.print("gpt/0", b"1\nlast words")
    double.end("gpt/0")
    double.end("gpt/1")
    code, out, err = ended(process)
    assert code == 0
    assert sorted(out.splitlines()) == [
        "gpt/0: last words",
        "gpt/0: step 1",
        "gpt/1: one",
        "gpt/1: two",
    ]
    assert err == "gpt/1: warning\n"


def test_run_relays_everything_before_it_ends(double: Any, start: Starter) -> None:
    """Much more than an answer holds, and the job has ended before it is read."""
    process = start("run", "--name", "gpt", "--", "train")
    double.wait_for(RunJob)
    expected = b"".join(b"line %d\n" % n for n in range(40_000))
    for at in range(0, len(expected), 10_007):
        double.print("gpt/0", expected[at : at + 10_007])
    double.end("gpt/0")
    out, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0
    assert out == expected


def test_a_move_neither_loses_nor_doubles_output(double: Any, start: Starter) -> None:
    process = start("run", "-v", "--nnodes", "2", "--name", "gpt", "--", "train")
    double.wait_for(ReadOutput, 2)
    double.wait_for(GetEvents)
    expected = []
    for n, to in enumerate(("h2", "h1", "h2")):
        double.print("gpt/1", b"before %d, and cut " % n)
        double.move("gpt/1", to)
        double.print("gpt/1", b"here\n")
        expected.append(f"gpt/1: before {n}, and cut here")
    double.end("gpt/1")
    double.end("gpt/0", 7)
    code, out, err = ended(process)
    assert code == 7
    assert out.splitlines() == expected
    assert err.splitlines()[0] == "gpt: 2 capsules on h0, h1"


def test_run_tells_of_moves_when_asked_to(double: Any, start: Starter) -> None:
    process = start("run", "-v", "--name", "gpt", "--", "train")
    double.wait_for(GetEvents)  # it has looked at the job, and where that runs
    double.move("gpt/0", "h2")
    double.finish_move(double.begin_move("gpt/0", "h1"), Refused("no memory there"))
    seen = len([ask for ask in double.asks if isinstance(ask, GetStatus)])
    double.wait_for(GetStatus, seen + 2)
    double.end("gpt/0")
    code, _, err = ended(process)
    assert code == 0
    assert err.splitlines() == [
        "gpt: 1 capsule on h0",
        "gpt/0 moved h0 → h2, paused 0.70 s",
        "gpt/0 stays on h2: no memory there",
    ]


def test_run_tells_whether_the_job_is_protected(double: Any, start: Starter) -> None:
    double._tell("gpt", "protected", "of an earlier job of this name", "")
    process = start("run", "-v", "--name", "gpt", "--snapshot-every", "150s", "--", "train")
    double.wait_for(GetEvents)
    double._tell(
        "gpt", "unprotected", "not protected: no host can hold its snapshots: h1 is not up", ""
    )
    double._tell("gpt", "protected", "protected: a snapshot every 150 s, held by h2", "")
    seen = len([ask for ask in double.asks if isinstance(ask, GetStatus)])
    double.wait_for(GetStatus, seen + 2)
    double.end("gpt/0")
    code, _, err = ended(process)
    assert code == 0
    assert err.splitlines() == [
        "gpt: 1 capsule on h0",
        "not protected: no host can hold its snapshots: h1 is not up",
        "protected: a snapshot every 150 s, held by h2",
    ]


def test_run_says_nothing_of_its_own_in_a_pipe(double: Any, start: Starter) -> None:
    process = start("run", "--name", "gpt", "--", "train")
    double.wait_for(ReadOutput)
    double.move("gpt/0", "h2")
    seen = len([ask for ask in double.asks if isinstance(ask, GetStatus)])
    double.wait_for(GetStatus, seen + 2)
    double.end("gpt/0")
    assert ended(process) == (0, "", "")


def test_signals_go_on_to_the_job_and_a_second_interrupt_kills_it(
    double: Any, start: Starter
) -> None:
    process = start("run", "--name", "gpt", "--", "train")
    double.wait_for(ReadOutput)
    process.send_signal(signal.SIGINT)
    double.wait_for(SignalJob, 1)
    process.send_signal(signal.SIGINT)
    double.wait_for(SignalJob, 2)
    code, _, err = ended(process)
    assert double.jobs["gpt"].signals == [signal.SIGINT, signal.SIGKILL]
    assert code == 128 + signal.SIGKILL
    assert err.splitlines() == [
        "gpt: SIGINT passed on; Ctrl-C once more kills it",
        "gpt: killing it (SIGKILL)",
    ]


def test_sigterm_ends_the_job_not_the_command(double: Any, start: Starter) -> None:
    process = start("run", "--name", "gpt", "--", "train")
    double.wait_for(ReadOutput)
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process)
    assert double.jobs["gpt"].signals == [signal.SIGTERM]
    assert code == 128 + signal.SIGTERM
    assert err == "gpt: SIGTERM passed on\n"


def test_an_interrupt_is_not_for_a_command_that_a_script_started_with_an_ampersand(
    double: Any, start: Starter
) -> None:
    """POSIX: a shell without job control starts it with SIGINT ignored. SIGTERM still goes on."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = start("run", "--name", "gpt", "--", "train")
    finally:
        signal.signal(signal.SIGINT, before)
    double.wait_for(ReadOutput)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)  # the kernel delivers the lower number first
    code, _, err = ended(process)
    assert double.jobs["gpt"].signals == [signal.SIGTERM]
    assert (code, err) == (128 + signal.SIGTERM, "gpt: SIGTERM passed on\n")


def test_a_third_interrupt_leaves_a_job_that_does_not_end(double: Any, start: Starter) -> None:
    process = start("run", "--name", "gpt", "--", "train")
    double.wait_for(ReadOutput)
    double.refuse[SignalJob] = LiveshiftError("the agent is busy")
    for n in range(3):
        process.send_signal(signal.SIGINT)
        if n < 2:
            double.wait_for(SignalJob, n + 1)
    code, _, err = ended(process)
    assert code == 130
    assert "error: SIGINT was not passed on to gpt: the agent is busy" in err
    assert "gpt is left to itself" in err


def test_lost_contact_is_waited_out(double: Any, start: Starter) -> None:
    process = start("run", "--nnodes", "2", "--name", "gpt", "--", "train")
    double.wait_for(ReadOutput, 2)
    double.print("gpt/0", b"before\n")
    assert process.stdout is not None
    assert process.stdout.readline() == b"gpt/0: before\n"
    double.stop()
    double.print("gpt/0", b"meanwhile\n")
    assert process.stderr is not None
    assert b"gpt goes on, trying again" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)  # cannot be passed on now, and is not forgotten
    double.start()
    code, out, err = ended(process)
    assert code == 128 + signal.SIGTERM
    assert out == "gpt/0: meanwhile\n"
    assert err.splitlines()[-1] == "gpt: contact again"


def test_output_that_cannot_be_read_is_said_and_the_job_waited_for(
    double: Any, start: Starter
) -> None:
    double.refuse[ReadOutput] = NotPermitted("gpt is somebody else's")
    process = start("run", "--name", "gpt", "--", "train")
    double.wait_for(ReadOutput)
    double.wait_for(GetStatus, 3)
    assert process.poll() is None
    double.print("gpt/0", b"never seen\n")
    double.end("gpt/0", 5)
    assert ended(process) == (
        5,
        "",
        "error: gpt/0: its output cannot be read: gpt is somebody else's\n",
    )


def test_the_newest_reason_is_given_for_output_that_cannot_be_read(
    double: Any, start: Starter
) -> None:
    double.refuse[ReadOutput] = LiveshiftError("the first reason")
    process = start("run", "--name", "gpt", "--", "train")
    double.wait_for(ReadOutput)
    double.refuse[ReadOutput] = LiveshiftError("the newest reason")
    assert process.stderr is not None
    line = process.stderr.readline().decode()
    assert line == "gpt/0: its output cannot be read: the newest reason; trying again\n"
    del double.refuse[ReadOutput]
    double.print("gpt/0", b"all\n")
    double.end("gpt/0")
    assert ended(process) == (0, "all\n", "")


def test_a_reader_that_goes_away_does_not_end_the_job(double: Any, start: Starter) -> None:
    process = start("run", "--name", "gpt", "--", "train")
    double.wait_for(ReadOutput)
    assert process.stdout is not None
    process.stdout.close()
    double.print("gpt/0", b"nobody reads this\n")
    double.print("gpt/0", b"but this\n", STDERR)
    double.end("gpt/0", 0)
    assert process.stderr is not None
    err = process.stderr.read().decode()
    assert process.wait(DEADLINE) == 0
    assert err.splitlines() == [
        "but this",
        "not all of its output was read here: see `liveshift logs gpt`",
    ]


def test_a_refused_start_shows_message_hint_and_code(double: Any, call: Call) -> None:
    double.refuse[RunJob] = Refused("only 1 slots are free", hint="uncordon one")
    assert call("run", "--", "train") == (
        5,
        "",
        "error: only 1 slots are free\nhint: uncordon one\n",
    )


def test_run_says_which_of_the_callers_variables_are_in_the_way_of_moving(
    double: Any, call: Call, environment: dict[str, str]
) -> None:
    odd = {**environment, "NCCL_RAS_ENABLE": "1", "NCCL_IB_DISABLE": "1"}
    code, out, err = call("run", "-d", "--name", "gpt", "--", "train", env=odd)
    assert (code, out) == (0, "gpt\n")
    (line,) = err.splitlines()
    assert line.startswith("NCCL_RAS_ENABLE=1 of your environment is kept, and in the way")
    assert double.wait_for(RunJob).env["NCCL_RAS_ENABLE"] == "1"
    ranked = {**environment, "RANK": "3"}
    said = "RANK=3 of your environment is passed on: the command may take itself for one of"
    assert call("run", "-d", "--name", "alone", "--", "train", env=ranked)[2].startswith(said)
    assert call("run", "-d", "--name", "two", "--nnodes", "2", "--", "train", env=ranked)[2] == ""


def test_run_asks_for_its_own_job_only(double: Any, start: Starter) -> None:
    """The whole status of a cluster of a thousand hosts is a megabyte, each second."""
    process = start("run", "--name", "gpt", "--", "train")
    double.wait_for(GetStatus, 2)
    double.end("gpt/0")
    assert ended(process)[0] == 0
    assert {ask.job for ask in double.asks if isinstance(ask, GetStatus)} == {"gpt"}


def test_run_tells_of_its_own_job_also_after_the_clock_was_set_back(
    double: Any, start: Starter, terminal: Terminal
) -> None:
    """An earlier job of that name has the later time then."""
    double._run(RunJob("gpt", 1, ["train"], {}, "/", 0, []))
    double._tell("gpt", "rewound", "goes on from s1", "root")
    now = time.time()
    double.events = [msgspec.structs.replace(event, time=now + 3600) for event in double.events]
    process = start("run", "--name", "gpt", "--", "train", stderr=terminal.theirs)
    double.wait_for(GetStatus, 1)
    with double.changed:
        double._tell("gpt", "rewound", "goes on from s2", "root")
        double.events[-1] = msgspec.structs.replace(double.events[-1], time=now - 3600)
    terminal.read_until(b"gpt: rewound: goes on from s2")
    assert b"s1" not in terminal.seen
    double.end("gpt/0")
    assert process.wait(DEADLINE) == 0
