# SPDX-License-Identifier: Apache-2.0
"""`liveshift rewind`, and what `run` asks for about rewinds and prints of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cli_harness import Call, Starter, Terminal, ended

from liveshift.errors import Refused
from liveshift.runtime.messages import RewindJob, RunJob


def asked(double: Any) -> list[RewindJob]:
    return [ask for ask in double.asks if isinstance(ask, RewindJob)]


def test_it_takes_a_job_back_and_says_how_that_went(gpt: Any, call: Call) -> None:
    code, out, err = call("rewind", "gpt", "--yes")
    assert (code, out) == (0, "gpt runs again from s7\n")
    assert "goes back to s7: root wants it" in err
    assert asked(gpt) == [RewindJob("gpt")]


def test_scripts_get_json(gpt: Any, call: Call) -> None:
    code, out, err = call("rewind", "gpt", "--yes", "-o", "json", "--lost", "h1")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "job": "gpt",
        "state": "rewound",
        "snapshot": "s7",
        "ago": 21.6,
        "where": {"gpt/0": "h0", "gpt/1": "h1"},
        "text": "runs again from s7",
    }
    assert asked(gpt) == [RewindJob("gpt", "h1")]


def test_it_need_not_wait(gpt: Any, call: Call) -> None:
    gpt.rewind_ends = []
    assert call("rewind", "gpt", "-y", "--no-wait") == (0, "gpt is being taken back\n", "")


def test_it_asks_first_and_a_no_changes_nothing(
    gpt: Any, start: Starter, terminal: Terminal
) -> None:
    process = start("rewind", "gpt", "--lost", "h1", stdin=terminal.theirs, stderr=terminal.theirs)
    terminal.read_until(b"Take gpt back?")
    shown = " ".join(terminal.seen.decode().split())
    assert "gpt would go back 22 s, to s7 (step 9): gpt/0 on h0, gpt/1 on h1" in shown
    assert "if h1 is not dead, gpt may train twice" in shown
    terminal.type(b"n\n")
    assert process.wait(20) == 130
    assert asked(gpt) == [RewindJob("gpt", "h1", True)]


def test_a_yes_takes_the_job_back(gpt: Any, start: Starter, terminal: Terminal) -> None:
    process = start("rewind", "gpt", stdin=terminal.theirs, stderr=terminal.theirs)
    terminal.read_until(b"Take gpt back?")
    terminal.type(b"y\n")
    assert process.stdout is not None
    out = process.stdout.read()
    assert (process.wait(20), out) == (0, b"gpt runs again from s7\n")
    assert asked(gpt) == [RewindJob("gpt", "", True), RewindJob("gpt")]


def test_without_a_terminal_nobody_can_be_asked(gpt: Any, call: Call) -> None:
    code, out, err = call("rewind", "gpt")
    assert (code, out) == (2, "")
    assert "stdin is no terminal" in err
    assert "--yes takes gpt back 22 s, to s7" in err


def test_a_refusal_comes_before_the_question(gpt: Any, call: Call) -> None:
    gpt.refuse[RewindJob] = Refused("gpt cannot be taken back: it has no complete snapshot")
    code, out, err = call("rewind", "gpt")
    assert (code, out) == (5, "")
    assert "it has no complete snapshot" in err


@pytest.mark.parametrize(
    ("kind", "text"), [("ended", "ended with code 1"), ("not rewound", "it was stopped")]
)
def test_a_job_that_ends_meanwhile_was_not_taken_back(
    gpt: Any, call: Call, kind: str, text: str
) -> None:
    gpt.rewind_ends = [(kind, text)]
    code, out, err = call("rewind", "gpt", "--yes")
    assert (code, out) == (1, "")
    assert f"gpt was not taken back: {text}" in err


def test_an_order_that_has_become_void_is_no_success(
    gpt: Any, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(_ask: RewindJob) -> Any:
        made = original(_ask)
        gpt.events.clear()
        return made

    original = gpt._rewind
    monkeypatch.setattr(gpt, "_rewind", nothing)
    code, out, err = call("rewind", "gpt", "--yes")
    assert (code, out) == (1, "")
    assert "the order is void now" in " ".join(err.split())


def test_run_passes_on_what_it_is_told_of_rewinds(double: Any, call: Call) -> None:
    call("run", "-d", "--rewind-on", "any", "--max-rewinds", "0", "--", "train")
    call("run", "-d", "--", "train")
    told, left = (double.wait_for(RunJob, count) for count in (1, 2))
    assert (told.rewind_on, told.max_rewinds) == ("any", 0)
    assert (left.rewind_on, left.max_rewinds) == ("", -1)


def test_run_says_why_its_job_is_not_taken_back(double: Any, start: Starter) -> None:
    process = start("run", "--verbose", "--name", "gpt", "--", "train")
    double.wait_for(RunJob)
    double._tell("gpt", "not rewound", "gpt/0 was ended by SIGSEGV twice in a row", "")
    double.end("gpt/0", 139)
    code, _, err = ended(process)
    assert code == 139
    assert "gpt: not rewound: gpt/0 was ended by SIGSEGV twice in a row" in " ".join(err.split())
