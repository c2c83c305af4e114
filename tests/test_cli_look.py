# SPDX-License-Identifier: Apache-2.0
"""`liveshift logs`, `status` and `events`."""

from __future__ import annotations

import json
import re
import signal
from typing import Any

import pytest
from cli_harness import Call, Starter, ended

from liveshift.criu_glue.output import STDERR
from liveshift.runtime.messages import (
    GetStatus,
    GpuSeat,
)

# ---- logs ---------------------------------------------------------------------------------------


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
