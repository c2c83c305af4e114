# SPDX-License-Identifier: Apache-2.0
"""The command line as a person and a script meet it, with a double in the orchestrator's place."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from liveshift.criu_glue.output import STDERR
from liveshift.errors import LiveshiftError, NotPermitted, Refused
from liveshift.launcher import cli, taint
from liveshift.launcher.options import duration
from liveshift.launcher.status_tables import ranges
from liveshift.runtime.messages import (
    GetEvents,
    GetMigration,
    GetStatus,
    Migrate,
    ReadOutput,
    Run,
    SetTaint,
    SignalJob,
    Untaint,
)

DEADLINE = 30.0  # seconds; nothing here takes that long


def load_double(name: str) -> ModuleType:
    path = Path(__file__).with_name("doubles") / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"doubles_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def double(tmp_path: Path) -> Iterator[Any]:
    with load_double("orchestrator").Orchestrator(tmp_path / "orchestrator.sock") as orchestrator:
        yield orchestrator


Starter = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Where the command line finds the double, and nothing else of this machine."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LIVESHIFT_", "FORCE_COLOR"))}
    return kept | {
        "LIVESHIFT_SOCKET": str(tmp_path / "orchestrator.sock"),
        "LIVESHIFT_LAB_ROOT": str(tmp_path / "labs"),
        "TERM": "xterm",
    }


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Iterator[Starter]:
    """Starts the command line as a process of its own; all of them are gone afterwards."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(*words: str, **more: Any) -> subprocess.Popen[bytes]:
        options: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "env": environment,
            "cwd": tmp_path,
        }
        command = [sys.executable, "-m", "liveshift.launcher", *words]
        started.append(subprocess.Popen(command, **(options | more)))
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def call(start: Starter) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line to its end: exit code, stdout, stderr."""

    def run(*words: str, **more: Any) -> tuple[int, str, str]:
        return ended(start(*words, **more))

    return run


Call = Callable[..., tuple[int, str, str]]


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=DEADLINE)
    return process.returncode, out.decode(), err.decode()


# ---- run ----------------------------------------------------------------------------------------


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
    ask = double.wait_for(Run)
    assert ask.argv == ["torchrun", "--nnodes", "9", "--", "-x", ""]
    assert (ask.nnodes, ask.name, ask.cwd) == (2, "gpt", str(tmp_path))
    assert {k: v for k, v in ask.env.items() if k != "LC_CTYPE"} == odd
    assert (ask.gid, sorted(ask.groups)) == (os.getgid(), sorted(os.getgroups()))


def test_run_works_without_the_two_dashes(double: Any, call: Call) -> None:
    code, _, _ = call("run", "-d", "python", "-c", "pass", "--nnodes", "3", "--", "--help")
    assert code == 0
    ask = double.wait_for(Run)
    assert ask.argv == ["python", "-c", "pass", "--nnodes", "3", "--", "--help"]
    assert ask.nnodes == 1


def test_run_leaves_out_of_the_environment_what_is_no_text(
    double: Any, call: Call, environment: dict[str, str]
) -> None:
    odd = {os.fsencode(k): os.fsencode(v) for k, v in environment.items()} | {b"ODD": b"\xff\xfe"}
    code, _, err = call("run", "-d", "--", "train", env=odd)
    assert code == 0
    assert "'ODD' is left out" in err
    assert "ODD" not in double.wait_for(Run).env


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
    double.wait_for(Run)
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
        "gpt/0 moved h0 → h2, stood still 0.700 s",
        "gpt/0 stays on h2: no memory there",
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
        "nobody read its output here to the end: `liveshift logs gpt`",
    ]


def test_a_refused_start_shows_message_hint_and_code(double: Any, call: Call) -> None:
    double.refuse[Run] = Refused("only 1 slots are free", hint="uncordon one")
    assert call("run", "--", "train") == (
        5,
        "",
        "error: only 1 slots are free\nhint: uncordon one\n",
    )


# ---- logs ---------------------------------------------------------------------------------------


@pytest.fixture
def gpt(double: Any) -> Any:
    """A job gpt of two capsules, on h0 and h1; h2 is free."""
    double._run(Run("gpt", 2, ["train"], {}, "/", 0, []))
    return double


def test_logs_of_a_capsule_are_its_bytes(gpt: Any, call: Call) -> None:
    gpt.print("gpt/0", b"one\n")
    gpt.print("gpt/0", b"bad\n", STDERR)
    gpt.print("gpt/0", b"two, cut")
    assert call("logs", "gpt/0") == (0, "one\ntwo, cut", "bad\n")


def test_logs_of_a_job_are_in_order_of_time(gpt: Any, call: Call) -> None:
    for at, capsule in ((3.0, "gpt/0"), (4.0, "gpt/0"), (1.5, "gpt/1"), (3.5, "gpt/1")):
        gpt.print(capsule, b"at %g\n" % at, at=at)
    code, out, _ = call("logs", "gpt", "--timestamps")
    assert code == 0
    assert out.splitlines() == [
        "1970-01-01T00:00:01.500Z gpt/1: at 1.5",
        "1970-01-01T00:00:03.000Z gpt/0: at 3",
        "1970-01-01T00:00:03.500Z gpt/1: at 3.5",
        "1970-01-01T00:00:04.000Z gpt/0: at 4",
    ]


def test_logs_follow_a_capsule_across_moves_to_its_end(gpt: Any, start: Starter) -> None:
    gpt.print("gpt/1", b"history\n")
    process = start("logs", "gpt/1", "-f")
    assert process.stdout is not None
    assert process.stdout.readline() == b"history\n"
    for n, to in enumerate(("h2", "h1")):
        gpt.move("gpt/1", to)
        gpt.print("gpt/1", b"%d\n" % n)
    gpt.end("gpt/1", 9)
    code, out, _ = ended(process)
    assert (code, out) == (0, "0\n1\n")


def test_logs_end_quietly_when_interrupted(gpt: Any, start: Starter) -> None:
    gpt.print("gpt/1", b"history\n")
    process = start("logs", "gpt/1", "-f")
    assert process.stdout is not None
    assert process.stdout.readline() == b"history\n"
    process.send_signal(signal.SIGINT)
    assert ended(process) == (130, "", "")


def test_logs_of_nothing(gpt: Any, call: Call) -> None:
    assert call("logs", "gtp") == (4, "", 'error: no job "gtp"\nhint: there are: gpt\n')
    code, out, err = call("logs", "gpt/7")
    assert (code, out) == (4, "")
    assert err.startswith('error: no capsule "gpt/7"\n')


# ---- status -------------------------------------------------------------------------------------


def test_status_shows_jobs_hosts_and_moves(gpt: Any, call: Call) -> None:
    gpt.begin_move("gpt/1", "h2", "h1 is tainted: ECC")
    gpt.hosts["h1"].taint = "ECC errors [rising]"
    code, out, err = call("status")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "gpt running 12.3" in lines
    assert "gpt/0 running h0 1 10.99.1.2 0-1 12.3 250 MB" in lines
    assert "gpt/1 moving h1 1 10.99.1.3 2-3 12.3 250 MB" in lines
    assert "h1 up, tainted 1/1 floating 7.00 GB ECC errors [rising] (by root)" in lines
    moving = next(line for line in lines if line.startswith("gpt/1 h1 → h2"))
    assert "freezing ━━━━━───── 50 % 123 MB of 246 MB 0.5" in moving
    assert "train" not in out
    assert "train" in call("status", "-o", "wide")[1]


def test_status_as_json(gpt: Any, call: Call) -> None:
    code, out, err = call("status", "gpt", "-o", "json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert set(told) == {"cluster", "time", "jobs", "hosts", "moving"}
    assert told["jobs"][0]["capsules"][1]["host"] == "h1"
    assert [host["name"] for host in told["hosts"]] == ["h0", "h1"]


def test_status_of_a_job_that_is_not_there(gpt: Any, call: Call) -> None:
    code, out, err = call("status", "gtp", "-o", "json")
    assert (code, out) == (4, "")
    assert err == 'error: no job "gtp" in the cluster double\nhint: its jobs are: gpt\n'


def test_status_watched_in_a_pipe_prints_again_until_interrupted(gpt: Any, start: Starter) -> None:
    process = start("status", "--watch")
    gpt.wait_for(GetStatus, 3)
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert (code, err) == (130, "")
    assert out.count("gpt/0") in (2, 3)


def test_status_of_an_empty_cluster(double: Any, call: Call) -> None:
    code, out, _ = call("status")
    assert code == 0
    assert out.startswith("no jobs; `liveshift run -- COMMAND` starts one\n")


# ---- taint, drain, migrate, stop ----------------------------------------------------------------


@pytest.mark.parametrize("words", [("host", "h1"), ("h1",)])
def test_taint_says_what_will_move(gpt: Any, call: Call, words: tuple[str, ...]) -> None:
    assert call("taint", *words, "--reason", "ECC") == (
        0,
        "h1 is tainted: gpt/1 will move to a spare\n",
        "",
    )
    assert gpt.wait_for(SetTaint) == SetTaint("h1", "ECC")


@pytest.mark.parametrize(
    "words", [("untaint", "host", "h1"), ("untaint", "h1"), ("uncordon", "h1")]
)
def test_untaint(gpt: Any, call: Call, words: tuple[str, ...]) -> None:
    gpt.hosts["h1"].taint = "x"
    assert call(*words) == (0, "h1 takes work again\n", "")
    assert gpt.wait_for(Untaint) == Untaint("h1")


def test_taint_of_an_unknown_host(gpt: Any, call: Call) -> None:
    assert call("taint", "h9") == (
        4,
        "",
        'error: no host "h9" in this cluster\nhint: its hosts are: h0, h1, h2\n',
    )


def test_drain_waits_until_the_host_is_empty(gpt: Any, start: Starter) -> None:
    gpt.hold_moves = True
    process = start("drain", "h1", "--reason", "reboot")
    gpt.wait_for(SetTaint)
    gpt.wait_for(GetStatus, 3)
    assert process.poll() is None
    gpt.finish_move("m1")
    assert ended(process) == (
        0,
        "gpt/1 moved h1 → h2, stood still 0.700 s\nh1 is empty and tainted\n",
        "",
    )


def test_drain_without_a_spare_is_refused_with_the_reason(gpt: Any, call: Call) -> None:
    gpt.hosts["h2"].taint = "broken"
    code, out, err = call("drain", "h1")
    assert (code, out) == (5, "")
    assert "error: gpt/1 cannot leave h1: no spare can take gpt/1 (add a host)\n" in err
    assert "liveshift uncordon h1" in err


def test_drain_after_a_move_that_failed(gpt: Any, start: Starter) -> None:
    gpt.hold_moves = True
    process = start("drain", "h1")
    gpt.wait_for(SetTaint)
    gpt.finish_move("m1", LiveshiftError("a mapped file differs", hint="install the same torch"))
    code, out, err = ended(process)
    assert (code, out) == (5, "")
    assert "gpt/1 stays on h1" in err
    assert "error: gpt/1 cannot leave h1: a mapped file differs" in err
    assert "hint: install the same torch; h1 stays tainted" in err


def test_drain_gives_up_at_its_timeout(gpt: Any, call: Call) -> None:
    gpt.hold_moves = True
    code, out, err = call("drain", "h1", "--timeout", "300ms")
    assert (code, out) == (124, "")
    assert err.startswith("error: h1 is not empty after 300ms: gpt/1 still there\n")


def test_drain_of_an_empty_host(gpt: Any, call: Call) -> None:
    assert call("drain", "h2") == (0, "h2 is empty and tainted\n", "")


def test_migrate_shows_where_the_time_went(gpt: Any, call: Call) -> None:
    code, out, err = call("migrate", "gpt/1", "--to", "h2", "--reason", "try")
    assert (code, err) == (0, "")
    assert gpt.wait_for(Migrate) == Migrate("gpt/1", "h2", "try", False)
    lines = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    assert lines[0] == "gpt/1: h1 → h2, epoch 2"
    assert "dump 0.400 32 % 246 MB frozen" in lines
    assert any(line.startswith("unaccounted 0.100 8.0 %") for line in lines)
    assert any(line.startswith("total 1.250 100 % 246 MB") for line in lines)
    assert lines[-1] == "stood still 0.700 s, image 246 MB at 612 MB/s"


def test_migrate_as_json(gpt: Any, call: Call) -> None:
    code, out, _ = call("migrate", "gpt/1", "-o", "json")
    row = json.loads(out)
    assert code == 0
    assert (row["state"], row["destination"], row["frozen_s"]) == ("done", "h2", 0.7)
    assert [phase["name"] for phase in row["phases"]] == ["prepare", "dump", "restore"]


def test_migrate_dry_run_prints_the_plan(gpt: Any, call: Call) -> None:
    code, out, _ = call("migrate", "gpt/1", "--to", "h2", "--dry-run")
    assert code == 0
    assert gpt.moves == {}
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "gpt/1: h1 → h2 (nothing is done)"
    assert "CRIU 4.2.1" in lines
    assert "image about 250 MB" in lines


@pytest.mark.parametrize(
    ("error", "code"),
    [(Refused("a file differs", hint="copy it"), 5), (LiveshiftError("CRIU failed", hint="no"), 1)],
)
def test_migrate_that_fails(gpt: Any, start: Starter, error: LiveshiftError, code: int) -> None:
    gpt.hold_moves = True
    process = start("migrate", "gpt/1")
    gpt.wait_for(GetMigration)
    gpt.finish_move("m1", error)
    ending, out, err = ended(process)
    assert (ending, out) == (code, "")
    assert f"gpt/1 did not move h1 → h2: {error}\nhint: {error.hint}\n" in err


def test_migrate_to_where_it_is(gpt: Any, call: Call) -> None:
    assert call("migrate", "gpt/1", "--to", "h1") == (
        5,
        "",
        "error: gpt/1 cannot move to h1\nhint: name another host\n",
    )


def test_a_move_goes_on_when_its_watcher_is_interrupted(gpt: Any, start: Starter) -> None:
    gpt.hold_moves = True
    process = start("migrate", "gpt/1")
    gpt.wait_for(GetMigration)
    process.send_signal(signal.SIGINT)
    assert ended(process) == (130, "", "m1 goes on: `liveshift events m1`\n")


def test_stop_waits_for_the_end(gpt: Any, call: Call) -> None:
    assert call("stop", "gpt") == (0, "gpt has ended with code 143\n", "")
    assert gpt.jobs["gpt"].signals == [signal.SIGTERM]


# ---- events -------------------------------------------------------------------------------------


def test_events_tell_who_and_what(gpt: Any, call: Call) -> None:
    gpt.move("gpt/1", "h2")
    code, out, _ = call("events")
    assert code == 0
    lines = [re.sub(r"^\S+ \S+ ", "", " ".join(line.split())) for line in out.splitlines()[1:]]
    assert lines == [
        "root gpt train",
        "root gpt/1 h1 → h2 begins",
        "root gpt/1 h1 → h2 (m1)",
    ]


@pytest.mark.parametrize("words", [("gpt", "--wide"), ("gpt/1", "-o", "wide"), ("m1",)])
def test_events_with_phases(gpt: Any, call: Call, words: tuple[str, ...]) -> None:
    gpt.move("gpt/1", "h2")
    code, out, _ = call("events", *words)
    assert code == 0
    assert re.search(r"dump.*0\.400.*246 MB.*frozen", out)


def test_events_as_json(gpt: Any, call: Call) -> None:
    gpt.move("gpt/1", "h2")
    rows = json.loads(call("events", "gpt/1", "-o", "json")[1])
    assert [row["kind"] for row in rows] == ["move", "moved"]
    assert rows[1]["migration"]["phases"][1]["bytes"] == 246_000_000


def test_events_of_a_migration_under_way(gpt: Any, call: Call) -> None:
    gpt.begin_move("gpt/1", "h2")
    code, out, _ = call("events", "m1")
    assert code == 0
    assert "under way: freezing" in out


def test_events_of_nothing(gpt: Any, call: Call) -> None:
    code, out, err = call("events", "h9")
    assert (code, out) == (4, "")
    assert err.startswith('error: nothing is known of "h9"')


# ---- on a terminal ------------------------------------------------------------------------------


class Terminal:
    """A pseudo-terminal and what was written to it."""

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        self.seen = b""

    def read_until(self, text: bytes) -> None:
        until = time.monotonic() + DEADLINE
        while text not in self.seen:
            assert time.monotonic() < until, self.seen
            if select.select([self._ours], [], [], 0.2)[0]:
                self.seen += os.read(self._ours, 65536)

    def close(self) -> None:
        os.close(self._ours)
        os.close(self.theirs)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with closing(Terminal()) as made:
        yield made


def test_on_a_terminal_names_are_coloured_and_moves_told(
    double: Any, start: Starter, terminal: Terminal
) -> None:
    streams = {"stdout": terminal.theirs, "stderr": terminal.theirs}
    process = start("run", "--nnodes", "2", "--name", "gpt", "--", "train", **streams)
    terminal.read_until(b"gpt: 2 capsules on h0, h1")
    double.print("gpt/1", b"hello\n")
    terminal.read_until(b"\x1b[33mgpt/1:\x1b[0m hello\r\n")
    double.move("gpt/1", "h2")
    terminal.read_until("gpt/1 moved h1 → h2, stood still 0.700 s".encode())
    double.end("gpt/0")
    double.end("gpt/1")
    assert process.wait(DEADLINE) == 0


def test_no_color_is_honoured(
    double: Any, start: Starter, terminal: Terminal, environment: dict[str, str]
) -> None:
    environment["NO_COLOR"] = "1"
    double._run(Run("gpt", 2, ["train"], {}, "/", 0, []))
    double.print("gpt/1", b"hello\n")
    process = start("logs", "gpt", stdout=terminal.theirs)
    terminal.read_until(b"gpt/1: hello\r\n")
    assert process.wait(DEADLINE) == 0
    assert start("status", stdout=terminal.theirs).wait(DEADLINE) == 0
    terminal.read_until(b"h2")
    assert not re.search(rb"\x1b\[[0-9;]*3[0-9]m", terminal.seen)


def test_drain_shows_progress(gpt: Any, start: Starter, terminal: Terminal) -> None:
    gpt.hold_moves = True
    process = start("drain", "h1", stderr=terminal.theirs)
    terminal.read_until("gpt/1 h1 → h2".encode())
    terminal.read_until(b"123 MB of 246 MB")
    gpt.finish_move("m1")
    assert process.wait(DEADLINE) == 0
    assert process.stdout is not None
    assert process.stdout.read().endswith(b"h1 is empty and tainted\n")


def test_a_watched_status_lives_through_a_restart(
    gpt: Any, start: Starter, terminal: Terminal
) -> None:
    process = start("status", "-w", stdout=terminal.theirs)
    terminal.read_until(b"gpt/0")
    gpt.stop()
    terminal.read_until(b"no contact")
    terminal.seen = b""
    gpt.start()
    gpt.end("gpt/0", 1)
    terminal.read_until(b"ended")
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE) == 130


# ---- errors, usage, help ------------------------------------------------------------------------


def main(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The command line in this process."""
    monkeypatch.setattr(sys, "argv", ["liveshift", *words])
    return cli.main()


VERBS = [
    *("", "run", "status", "logs", "migrate", "events", "stop", "taint", "drain", "untaint"),
    *("uncordon", "lab", "lab up", "lab down", "lab list", "lab link", "lab exec", "doctor"),
    *("agent", "orchestrator", "config", "config validate", "config show", "keys", "keys init"),
    *("keys add-host", "version"),
]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_help_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(monkeypatch, *verb.split(), "--help") == 0
    shown = capsys.readouterr().out
    assert f"Usage: liveshift {verb}".strip() in shown
    assert re.search(r"[a-z]{3,}.*\.", shown)  # a sentence
    for noise in ("<bool>", "<str>", "<list", "{", "[dim]", "[/]"):
        assert noise not in shown


def test_no_verb_is_left_out_of_the_tests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {verb.split()[0] for verb in VERBS if verb} == set(cli.ORDER)


@pytest.mark.parametrize(
    "words",
    [
        ("nonsense",),
        ("run",),
        ("run", "--nnode", "2", "--", "train"),
        ("run", "--nnodes", "0", "--", "train"),
        ("status", "-o", "yaml"),
        ("drain", "h1", "--timeout", "soon"),
        ("taint", "host", "h1", "h2"),
        ("lab", "up", "--spare", "h1"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_where_to_look(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert main(monkeypatch, *words) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert re.fullmatch(r"error: .+\nhint: `liveshift.* --help` shows how it is used\n", told.err)


def test_a_cluster_that_is_not_there_ends_with_6(call: Call) -> None:
    code, out, err = call("status")
    assert (code, out) == (6, "")
    assert re.fullmatch(r"error: no daemon listens: .+\nhint: .+lab up --hosts 3.+\n", err)


def test_the_lab_may_be_named_before_or_after_the_verb(call: Call) -> None:
    for words in (("--lab", "a", "status"), ("status", "--lab", "a")):
        code, _, err = call(*words)
        assert code == 6
        assert 'no lab "a" runs here' in err


def test_an_error_that_nobody_foresaw(
    gpt: Any, call: Call, environment: dict[str, str], tmp_path: Path
) -> None:
    """A broken installation, here: a module of the name of one that is needed."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "msgpack.py").write_text("raise ZeroDivisionError('by design')\n")
    path = os.pathsep.join(filter(None, (str(tmp_path / "broken"), os.environ.get("PYTHONPATH"))))
    broken = environment | {"PYTHONPATH": path}
    code, out, err = call("status", env=broken)
    assert (code, out) == (1, "")
    assert err.splitlines() == [
        "error: liveshift met something that nobody foresaw: ZeroDivisionError: by design",
        "hint: LIVESHIFT_DEBUG=1 before the command shows where; please report it",
    ]
    code, _, err = call("status", env=broken | {"LIVESHIFT_DEBUG": "1"})
    assert code == 1
    assert "Traceback" in err


def test_version(call: Call) -> None:
    code, out, _ = call("version")
    assert code == 0
    assert re.fullmatch(r"liveshift \d+\.\d+\.\d+\n", out)
    assert call("--version")[1] == out


def test_names_are_completed_from_the_cluster(
    gpt: Any, call: Call, environment: dict[str, str]
) -> None:
    def completed(line: str) -> list[str]:
        shell = {"_LIVESHIFT_COMPLETE": "complete_bash", "COMP_WORDS": line}
        shell["COMP_CWORD"] = str(len(line.split(" ")) - 1)
        return call(env=environment | shell)[1].split()

    assert completed("liveshift migrate g") == ["gpt/0", "gpt/1"]
    assert completed("liveshift migrate gpt/1 --to h") == ["h0", "h1", "h2"]
    assert completed("liveshift status ") == ["gpt"]
    assert completed("liveshift dr") == ["drain"]
    gpt.stop()
    assert completed("liveshift migrate g") == []


def test_status_needs_no_torch_and_no_zeromq(gpt: Any, environment: dict[str, str]) -> None:
    """They take longer to import than everything else together."""
    code = (
        "import sys; from liveshift.launcher import cli; sys.argv = ['liveshift', 'status'];"
        "assert cli.main() == 0;"
        "print(sorted({'torch', 'zmq', 'numpy', 'asyncio'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == b"[]\n"


def test_durations() -> None:
    assert [duration(t) for t in ("0s", "0", "90", "1.5m", "2h", "300ms")] == [
        0,
        0,
        90,
        90,
        7200,
        0.3,
    ]


def test_ranks_are_shown_short() -> None:
    assert [ranges(r) for r in ([], [3], [0, 1, 2], [5, 0, 1])] == ["", "3", "0-2", "0-1,5"]


def test_host_words() -> None:
    assert taint.named(["host", "h1"]) == taint.named(["h1"]) == "h1"
    assert taint.named(["host"]) == "host"
