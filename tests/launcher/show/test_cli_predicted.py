# SPDX-License-Identifier: Apache-2.0
"""Pauses on the command line: predicted, coming nearer while memory is copied, and seen."""

from __future__ import annotations

import fcntl
import json
import re
import struct
import termios
from typing import Any

import msgspec
import pytest
from cli_harness import DEADLINE, Call, Starter, Terminal, ended

from liveshift.errors import Refused
from liveshift.launcher.show import forecast
from liveshift.runtime.cost.words import in_words
from liveshift.runtime.messages import GetMigration, Part, Phase, Prediction, Rounds
from liveshift.runtime.model.steps import MigrationStep

GB, MB = 10**9, 10**6
TASKS = "12 processes, 1000 mappings"
COPIED = Prediction(
    "pre-copy",
    "",
    0.941,
    [
        Part("quiesce", 0.01),
        Part("dump", 0.144, None, TASKS),
        Part("memory", 0.01, 13 * MB, "of 2.00 GB: 260 MB/s written, 1.30 GB/s seen on the way"),
        Part("restore", 0.047, None, TASKS),
        Part("fill", 0.68, 2 * GB),
        Part("handover", 0.05, None, "commit, checks, grant, network"),
    ],
    2 * GB,
    4,
)
DUMPED = Prediction(
    "full dump",
    "too old",
    0.25,
    [Part("dump", 0.25, GB), Part("gpu save", None, 80 * GB)],
    GB,
    0,
    "device memory, for which there is no earlier move in this cluster",
)
THIRD = Rounds(3, 2300 * MB, 48 * MB, 12 * MB, 612e6, 0.061, 0.312)


def told(gpt: Any, prediction: Prediction = COPIED, rounds: Rounds | None = THIRD) -> str:
    """A move of gpt/1 whose memory is being copied; its name."""
    gpt.prediction = prediction
    name: str = gpt.begin_move("gpt/1", "h2")
    gpt.precopying(name, rounds)
    return name


def cells(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_dry_run_shows_the_parts_and_their_sum(gpt: Any, call: Call) -> None:
    gpt.prediction = COPIED
    code, out, err = call("migrate", "gpt/1", "--to", "h2", "--dry-run")
    assert (code, err) == (0, "")
    lines = cells(out)
    at = lines.index("predicted pause 0.94 s (pre-copy)")
    assert lines[at - 1] == "", "apart from the checks"
    assert lines[at + 1 :] == [
        "part predicted bytes what",
        "quiesce 0.010 s",
        "dump 0.144 s 12 processes, 1000 mappings",
        "memory 0.010 s 13.0 MB of 2.00 GB: 260 MB/s written, 1.30 GB/s seen on the way",
        "restore 0.047 s 12 processes, 1000 mappings",
        "fill 0.680 s 2.00 GB",
        "handover 0.050 s commit, checks, grant, network",
        "total 0.941 s learnt from 4 earlier moves",
    ]


def test_a_dry_run_tells_why_all_is_dumped_and_what_it_leaves_out(gpt: Any, call: Call) -> None:
    gpt.prediction = DUMPED
    out = call("migrate", "gpt/1", "--dry-run")[1]
    assert (
        "predicted pause 0.25 s, without device memory, for which there is no earlier move"
        " in this cluster (full dump: too old)\n" in out
    )
    assert "gpu save ? 80.0 GB" in cells(out)
    assert cells(out)[-1].endswith("defaults: no similar move yet")


def test_a_dry_run_as_json_has_the_prediction(gpt: Any, call: Call) -> None:
    gpt.prediction = DUMPED
    plan = json.loads(call("migrate", "gpt/1", "--dry-run", "-o", "json")[1])
    assert msgspec.convert(plan["prediction"], Prediction) == DUMPED
    gpt.prediction = None
    assert json.loads(call("migrate", "gpt/1", "--dry-run", "-o", "json")[1])["prediction"] is None
    assert "predicted" not in call("migrate", "gpt/1", "--dry-run")[1]


def test_status_shows_how_far_the_copy_is(gpt: Any, call: Call) -> None:
    told(gpt)
    lines = call("status")[1].splitlines()
    (row,) = [n for n, line in enumerate(lines) if line.startswith("gpt/1   h1 → h2")]
    assert "pre-copying  ━━━━━━━━━─ 99 %  2.30 GB of 2.31 GB" in lines[row]
    assert lines[row + 1] == (
        "  round 3: 48.0 MB dirty, 612 MB/s, job 6.1 % slower, pause about 0.31 s"
    )


def test_lines_about_several_moves_name_their_capsules(gpt: Any, call: Call) -> None:
    gpt.hosts["h3"] = type(gpt.hosts["h2"])("h3")
    told(gpt)
    gpt.begin_move("gpt/0", "h3")
    out = call("status")[1]
    assert "\n  gpt/1: round 3: 48.0 MB dirty" in out
    assert "\n  gpt/0: paused for 0.20 s of about 0.94 s\n" in out


def test_status_as_json_has_rounds_and_prediction(gpt: Any, call: Call) -> None:
    told(gpt)
    (row,) = json.loads(call("status", "gpt", "-o", "json")[1])["moving"]
    assert msgspec.convert(row["precopy"], Rounds) == THIRD
    assert row["predicted"]["seconds"] == COPIED.seconds


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", ["migrate", "drain"])
def test_it_is_live_on_a_terminal(
    gpt: Any, start: Starter, terminal: Terminal, width: int, command: str
) -> None:
    fcntl.ioctl(terminal.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    gpt.hold_moves, gpt.prediction = True, COPIED
    words = ("migrate", "gpt/1", "--to", "h2") if command == "migrate" else ("drain", "h1")
    process = start(*words, stderr=terminal.theirs)
    terminal.read_until(b"paused for 0.20 s of about 0.94 s")
    gpt.precopying("m1", None)
    terminal.read_until(b"  pause about 0.94 s")
    gpt.precopying("m1", THIRD)
    terminal.read_until(b"round 3: 48.0 MB dirty, 612 MB/s, job 6.1 % slower, pause about 0.3")
    terminal.read_until(b"2.30 GB of 2.31 GB")
    gpt.finish_move("m1")
    assert process.wait(DEADLINE) == 0
    shown = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", terminal.seen).decode()
    assert max(len(line.rstrip()) for line in re.split(r"[\r\n]+", shown)) <= width


def test_a_pipe_gets_no_progress(gpt: Any, start: Starter) -> None:
    gpt.hold_moves, gpt.prediction = True, COPIED
    process = start("migrate", "gpt/1", "--to", "h2")
    gpt.wait_for(GetMigration, 2)
    gpt.precopying("m1", THIRD)
    gpt.wait_for(GetMigration, 4)
    gpt.finish_move("m1")
    code, out, err = ended(process)
    assert (code, err) == (0, f"{in_words(gpt.cost)}\n")
    last = out.splitlines()[-1]
    assert "round 3" not in out
    said = "paused 0.70 s (predicted 0.94 s); copied 2.30 GB running, 246 MB paused"
    assert last == said


def test_events_hold_what_was_predicted_against_what_was_seen(gpt: Any, call: Call) -> None:
    gpt.finish_move(told(gpt))
    out = call("events", "m1")[1]
    lines = cells(out)
    at = lines.index("predicted pause 0.94 s, seen 0.70 s (pre-copy)")
    assert lines[at + 1] == "part predicted seen bytes what"
    assert "dump 0.144 s 0.400 s 12 processes, 1000 mappings" in lines
    assert "restore 0.047 s 0.300 s 12 processes, 1000 mappings" in lines
    assert lines[-1] == "total 0.941 s 0.700 s learnt from 4 earlier moves"
    wide = call("events", "gpt/1", "--wide")[1]
    assert "predicted pause 0.94 s, seen 0.70 s (pre-copy)" in wide
    row = json.loads(call("events", "m1", "-o", "json")[1])
    assert (row["predicted"]["seconds"], row["frozen_s"]) == (COPIED.seconds, 0.7)


def test_events_of_a_move_under_way_tell_its_progress(gpt: Any, call: Call) -> None:
    name = told(gpt)
    out = call("events", name)[1]
    assert "under way: pre-copying, round 3: 48.0 MB dirty" in out
    assert "seen" not in out


def test_a_move_that_never_stopped_the_job_is_not_compared(gpt: Any, call: Call) -> None:
    name = told(gpt)
    gpt.finish_move(name, Refused("a file differs", hint="copy it"))
    assert "seen" not in call("events", name)[1]


def test_a_drain_tells_both(gpt: Any, call: Call) -> None:
    gpt.prediction = COPIED
    out = call("drain", "h1")[1]
    assert out.startswith("gpt/1 moved h1 → h2, paused 0.70 s (predicted 0.94 s)\n")


def test_what_nobody_foresaw_is_shown_as_well(gpt: Any) -> None:
    row = gpt.moves[told(gpt)]
    odd = Phase("gpu restore", 1.3, 0.5, None, True)
    over = msgspec.structs.replace(row, state=MigrationStep.DONE.value, frozen_s=0.9, phases=[odd])
    expected = forecast.compared(over)
    assert expected is not None
    (part,) = [p for p in expected.parts if p.name == "gpu restore"]
    assert (part.predicted_s, part.seen_s) == (None, 0.5)
    assert expected.seen_s == 0.9


def test_nothing_is_said_where_nothing_is_known(gpt: Any) -> None:
    row = gpt.moves[told(gpt)]
    nothing = msgspec.structs.replace(row, predicted=None, precopy=None)
    assert forecast.now(nothing) == ""
    first = msgspec.structs.replace(nothing, precopy=Rounds(1, 0, GB, GB, 0.0))
    assert forecast.now(first) == "round 1: 1.00 GB dirty, 0 B/s"
    began = msgspec.structs.replace(nothing, precopy=Rounds(1, 0, 0, 0, 0.0))
    assert forecast.now(began) == "round 1, 0 B/s"
    worst = msgspec.structs.replace(COPIED, parts=[Part("memory", 0.9, COPIED.memory)])
    assert forecast.now(msgspec.structs.replace(row, precopy=None, predicted=worst)) == (
        "pause at most 0.94 s"
    )
    assert forecast.now(msgspec.structs.replace(first, state=MigrationStep.DONE.value)) == ""
    frozen = msgspec.structs.replace(nothing, state=MigrationStep.FREEZING.value, frozen_s=0.25)
    assert forecast.now(frozen) == "paused for 0.25 s"
