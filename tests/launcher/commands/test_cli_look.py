# SPDX-License-Identifier: Apache-2.0
"""`liveshift status` and `events`."""

from __future__ import annotations

import fcntl
import json
import re
import signal
import struct
import termios
import time
from io import StringIO
from typing import Any

import msgspec
import pytest
from cli_harness import DEADLINE, Call, Starter, Terminal, ended
from rich.console import Console

from liveshift.launcher.show import protection, status_tables
from liveshift.runtime.messages import (
    GetEvents,
    GetMigration,
    GetStatus,
    GpuSeat,
    JobRow,
    ProtectionRow,
    RunJob,
    Status,
)

# ---- status -------------------------------------------------------------------------------------


def test_status_says_which_output_cannot_be_kept(gpt: Any, call: Call) -> None:
    gpt._capsule("gpt/1").output_trouble = "70 bytes of its output were lost: /v: disk full"
    _, out, _ = call("status")
    assert "gpt/1 on h1: 70 bytes of its output were lost: /v: disk full" in out
    _, out, _ = call("status", "-o", "json")
    assert json.loads(out)["jobs"][0]["capsules"][1]["output_trouble"].startswith("70 bytes")


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


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (ProtectionRow(), "– train"),
        (
            ProtectionRow(30.0, "s17", 12.4, 1_200_000_000, ["h2", "h3"]),
            "s17, 12 s ago, on h2, h3",
        ),
        (ProtectionRow(30.0, why_not="h2 has no room"), " no train"),
        (
            ProtectionRow(30.0, "s17", 12.4, 0, ["h2"], why_not="h2, which keeps s17, is not up"),
            "no: s17, 12 s ago, on h2",
        ),
    ],
)
def test_wide_status_shows_whether_a_job_is_protected(row: ProtectionRow, words: str) -> None:
    job = JobRow("gpt", "running", "train", 0, 0.0, 12.3, None, [], row)
    status = Status("c", 1.0, [job], [], [])
    shown = {}
    for wide in (True, False):
        written = StringIO()
        Console(width=400, file=written).print(status_tables.jobs(status, wide=wide))
        shown[wide] = " ".join(written.getvalue().split())
    assert words in shown[True]
    assert "protected" in shown[True]
    assert "protected" not in shown[False]
    assert "s17" not in shown[False]


GOOD = ProtectionRow(
    150.0,
    "s17",
    12.4,
    1_200_000_000,
    ["h2"],
    0.31,
    auto=True,
    rewind_s=8.2,
    failure_s=20.6,
    in_place=["gpt/0", "gpt/1"],
)
NO_ROOM = "h2 cannot hold s1.0 (it fits if snapshots.memory is 2.00 GB there, or more)"


@pytest.mark.parametrize(
    ("row", "short", "wide"),
    [
        (None, [], []),
        (ProtectionRow(), [], []),
        (
            GOOD,
            [],
            [
                "gpt: s17 is 12 s old, 1.20 GB on h2; the job was paused for 0.31 s; a snapshot"
                " every 2 min 30 s (auto)",
                "gpt: if a host failed now: 20 s lost, of which 12 s are trained again, and 8 s"
                " pass until the job runs (estimated); gpt/0 and gpt/1 would go back in place where"
                " the host lives, from a copy there",
            ],
        ),
        (
            msgspec.structs.replace(
                GOOD,
                takes_s=5.2,
                mttf_s=28_800.0,
                mttf_from="learnt from 2 losses in 512 host-hours",
            ),
            [],
            [
                "gpt: s17 is 12 s old, 1.20 GB on h2; the job was paused for 0.31 s; one is"
                " complete after 5.20 s; a snapshot every 2 min 30 s (auto; a failure every 8 h"
                " 00 min: learnt from 2 losses in 512 host-hours)",
            ],
        ),
        (
            msgspec.structs.replace(GOOD, sent=["gpt/1"]),
            [],
            [
                "gpt: if a host failed now: 20 s lost, of which 12 s are trained again, and 8 s"
                " pass until the job runs (estimated); gpt/0 and gpt/1 would go back in place where"
                " the host lives, with the image of gpt/1 sent by the holder",
            ],
        ),
        (
            msgspec.structs.replace(GOOD, trouble="h2 has no room", would_wait="if h0 died, …"),
            [],
            ["gpt: if h0 died, …", "gpt: no later snapshot than s17: h2 has no room"],
        ),
        (
            msgspec.structs.replace(GOOD, age=451.0, trouble="h2 has no room"),
            ["gpt: no later snapshot than s17: h2 has no room"],
            [],
        ),
        (
            msgspec.structs.replace(GOOD, why_not="h2, which keeps s17, is not up"),
            ["gpt: unprotected: h2, which keeps s17, is not up"],
            ["gpt: unprotected: h2, which keeps s17, is not up"],
        ),
        (
            ProtectionRow(30.0, why_not=NO_ROOM),
            [f"gpt: unprotected: {NO_ROOM}"],
            [f"gpt: unprotected: {NO_ROOM}"],
        ),
    ],
)
def test_status_says_what_a_failure_would_cost_and_why_a_job_is_unprotected(
    row: ProtectionRow | None, short: list[str], wide: list[str]
) -> None:
    job = JobRow("gpt", "running", "train", 0, 0.0, 12.3, None, [], row)
    assert [line.plain for line in protection.lines([job], wide=False)] == short
    shown = [line.plain for line in protection.lines([job], wide=True)]
    assert [line for line in shown if line in wide] == wide
    if row is None or not row.newest or row.why_not:
        assert not any("if a host failed" in line for line in shown)


def test_status_shows_gpus_where_there_are_any(gpt: Any, call: Call) -> None:
    assert "GPUs" not in call("status")[1]
    gpt.hosts["h1"].gpus = [
        GpuSeat("GPU-0", "NVIDIA H200", True),
        GpuSeat("GPU-1", "NVIDIA H200", False),
        GpuSeat("GPU-2", "NVIDIA A100", False),
    ]
    _, out, _ = call("status")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "host state slots spare free memory GPUs taint" in lines
    assert "h0 up 1/1 floating 7.00 GB" in lines
    assert any("7.00 GB H200 ×2 (1 free), A100 ×1 (0" in line for line in lines), out


def test_status_as_json(gpt: Any, call: Call) -> None:
    code, out, err = call("status", "gpt", "-o", "json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert set(told) == {"cluster", "time", "jobs", "hosts", "moving", "trouble", "unknown"}
    assert told["jobs"][0]["capsules"][1]["host"] == "h1"
    assert [host["name"] for host in told["hosts"]] == ["h0", "h1"]


def test_status_of_a_job_that_is_not_there(gpt: Any, call: Call) -> None:
    code, out, err = call("status", "gtp", "-o", "json")
    assert (code, out) == (4, "")
    first, hint = err.splitlines()
    assert first == 'error: no job "gtp" in the cluster double'
    assert hint == "hint: did you mean gpt? its jobs are: gpt"


def test_status_watched_in_a_pipe_prints_again_until_interrupted(gpt: Any, start: Starter) -> None:
    process = start("status", "--watch")
    gpt.wait_for(GetStatus, 3)
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert (code, err) == (130, "")
    asked = sum(isinstance(ask, GetStatus) for ask in gpt.asks)
    assert out.count("gpt/0") in (asked - 1, asked), "it was interrupted before the last or after"


def ended_jobs(double: Any, count: int) -> None:
    for n in range(count):
        double._run(RunJob(f"old{n}", 1, ["train"], {}, "/", 0, []))
        double.end(f"old{n}/0", 0)


def names(out: str) -> list[str]:
    """The jobs in the order of the table."""
    return re.findall(r"^([a-z]\w*) +(?:running|ended)", out, re.MULTILINE)


def test_status_shows_what_runs_first_and_few_that_ended(double: Any, call: Call) -> None:
    ended_jobs(double, 6)
    double._run(RunJob("calm", 1, ["train"], {}, "/", 0, []))
    double._run(RunJob("gpt", 2, ["train"], {}, "/", 0, []))
    double.begin_move("gpt/1", "h2")
    out = call("status")[1]
    assert names(out) == ["gpt", "calm", "old5", "old4", "old3"]
    assert "and 3 ended jobs more: --all\n" in out
    every = call("status", "--all")[1]
    assert names(every) == ["gpt", "calm", "old5", "old4", "old3", "old2", "old1", "old0"]
    assert "--all" not in every
    assert len(json.loads(call("status", "-o", "json")[1])["jobs"]) == 8


TROUBLE = "the journal waits for h2 to report"


def test_status_says_at_its_head_what_the_orchestrator_waits_for(gpt: Any, call: Call) -> None:
    assert "waits" not in call("status")[1]
    gpt.trouble = TROUBLE
    code, out, err = call("status")
    assert (code, err) == (0, "")
    assert out.splitlines()[:2] == [TROUBLE, ""]
    assert json.loads(call("status", "-o", "json")[1])["trouble"] == TROUBLE


def test_status_watched_on_a_terminal_says_it_too(
    gpt: Any, start: Starter, terminal: Terminal
) -> None:
    gpt.trouble = TROUBLE
    process = start("status", "--watch", stdout=terminal.theirs)
    terminal.read_until(TROUBLE.encode())
    terminal.read_until(b"gpt/0")
    gpt.trouble = ""
    gpt.wait_for(GetStatus, 4)
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE) == 130


@pytest.mark.parametrize("moves", [1, 8])
@pytest.mark.parametrize("size", [(24, 80), (24, 200), (16, 80)])
def test_status_watched_shows_moves_and_hosts_on_a_small_terminal(
    double: Any, start: Starter, terminal: Terminal, size: tuple[int, int], moves: int
) -> None:
    fcntl.ioctl(terminal.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    ended_jobs(double, 20)
    double._run(RunJob("gpt", 12, ["train"], {}, "/", 0, []))
    double.hosts["h1"].taint = "ECC"
    for capsule in range(1, 1 + moves):
        double.begin_move(f"gpt/{capsule}", "h2")
    process = start("status", "--watch", stdout=terminal.theirs)
    double.wait_for(GetStatus, 2)
    terminal.read_until(b"more lines")
    terminal.read_until(b"ECC (by root)")
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE) == 130
    pictures = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", terminal.seen).decode().split("job ")
    first = ("job " + pictures[1]).rstrip().splitlines()
    assert len(first) <= size[0]
    shown = "\n".join(first)
    assert "h1 → h2" in shown
    assert "up, tainted" in shown
    assert "h0    up" in shown, "the hosts without a taint, too"
    assert names(shown)[0] == "gpt"


def test_status_of_an_empty_cluster(double: Any, call: Call) -> None:
    code, out, _ = call("status")
    assert code == 0
    assert out.startswith("no jobs; `liveshift run -- COMMAND` starts one\n")


# ---- events -------------------------------------------------------------------------------------


def test_events_tell_who_and_what(gpt: Any, call: Call) -> None:
    gpt.move("gpt/1", "h2")
    code, out, _ = call("events")
    assert code == 0
    lines = [re.sub(r"^\S+ \S+ ", "", " ".join(line.split())) for line in out.splitlines()[1:]]
    assert lines == [
        "root gpt train",
        "root gpt/1 m1 begins: h1 → h2",
        "root gpt/1 paused after collective 7 of gloo",
        "root gpt/1 moved h1 → h2 (m1)",
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
    assert [row["kind"] for row in rows] == ["move", "boundary", "moved"]
    assert rows[2]["migration"]["phases"][1]["bytes"] == 246_000_000


def test_events_of_a_migration_under_way(gpt: Any, call: Call) -> None:
    gpt.begin_move("gpt/1", "h2")
    code, out, _ = call("events", "m1")
    assert code == 0
    assert "under way: freezing" in out
    rows = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    assert "freezing 0.500 100 % 123 MB frozen under way" in rows, "the step of now has a row"
    assert any(row.startswith("unaccounted 0.000") for row in rows)


def test_events_of_a_migration_that_the_end_of_its_job_overtook(gpt: Any, call: Call) -> None:
    gpt.end_before_move(gpt.begin_move("gpt/1", "h2"))
    code, out, _ = call("events", "m1")
    assert code == 0
    assert out.splitlines()[-1] == "gpt/1 ended with code 0 before it could move h1 → h2"


def test_events_since_a_while_ago(gpt: Any, call: Call) -> None:
    old = msgspec.structs.replace(gpt.events[0], time=time.time() - 3600, text="long ago")
    gpt.events[0] = old
    gpt.move("gpt/1", "h2")
    assert "long ago" in call("events")[1]
    out = call("events", "--since", "5m")[1]
    assert "long ago" not in out
    assert "moved h1 → h2" in out
    assert call("events", "gpt/1", "--since", "1ms")[0] == 0, "it is known, and nothing happened"
    assert len(json.loads(call("events", "--since", "2h", "-o", "json")[1])) == 4


def test_events_are_followed(gpt: Any, start: Starter) -> None:
    process = start("events", "gpt", "--follow")
    gpt.wait_for(GetEvents, 2)
    gpt.move("gpt/1", "h2")
    gpt.wait_for(GetEvents, 4)
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert (code, err) == (130, "")
    assert [line.split("gpt", 1)[1] for line in out.splitlines()] == [
        "         train",
        "/1       m1 begins: h1 → h2",
        "/1       paused after collective 7 of gloo",
        "/1       moved h1 → h2",
    ]


def test_events_that_are_too_old_are_not_followed_either(gpt: Any, start: Starter) -> None:
    gpt.events[:] = [msgspec.structs.replace(each, time=1.0) for each in gpt.events]
    process = start("events", "gpt", "--follow", "--since", "5m")
    gpt.wait_for(GetEvents, 3)
    gpt.begin_move("gpt/1", "h2")
    gpt.wait_for(GetEvents, 5)
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert (code, err) == (130, "")
    assert [line.split("gpt", 1)[1] for line in out.splitlines()] == [
        "/1       m1 begins: h1 → h2",
    ]


def test_one_migration_is_followed_to_its_end(gpt: Any, start: Starter) -> None:
    gpt.begin_move("gpt/1", "h2")
    process = start("events", "m1", "-f")
    gpt.wait_for(GetMigration, 3)
    assert process.poll() is None
    gpt.finish_move("m1")
    code, out, _ = ended(process)
    assert code == 0
    assert "copied 246 MB paused" in out
    assert "under way" not in out


def test_events_of_nothing(gpt: Any, call: Call) -> None:
    code, out, err = call("events", "h9")
    assert (code, out) == (4, "")
    assert err.startswith('error: nothing is known of "h9"')
