# SPDX-License-Identifier: Apache-2.0
"""`liveshift logs`: what a job has printed, wherever its capsules were, and what it repeats after a
rewind."""

from __future__ import annotations

import json
import signal
from typing import Any

from cli_harness import Call, Starter, ended

from liveshift.criu_glue.capsule.output import STDERR


def test_logs_of_a_capsule_are_its_bytes(gpt: Any, call: Call) -> None:
    gpt.print("gpt/0", b"one\n")
    gpt.print("gpt/0", b"bad\n", STDERR)
    gpt.print("gpt/0", b"two, cut")
    assert call("logs", "gpt/0") == (0, "one\ntwo, cut", "bad\n")


def test_logs_say_where_output_is_missing_and_how_much(gpt: Any, call: Call) -> None:
    gpt.print("gpt/0", b"old\n")
    gpt._capsule("gpt/0").kept_from = len(gpt._capsule("gpt/0").log)
    gpt.print("gpt/0", b"new\n")
    code, out, err = call("logs", "gpt/0")
    assert (code, out) == (0, "new\n")
    assert err.startswith("[liveshift: 20 bytes of the output of gpt/0 are missing here: ")
    gpt.print("gpt/1", b"other\n")
    code, out, err = call("logs", "gpt")
    assert out == "gpt/0: new\ngpt/1: other\n"
    assert err.startswith("gpt/0: [liveshift: 20 bytes of the output of gpt/0 are missing here: ")


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


def rewound(gpt: Any, capsule: str = "gpt/0", gone: str = "") -> None:
    """It printed four lines, went back to the second one, and printed the third one again."""
    gpt.print(capsule, b"one\ntw", at=1)
    kept = len(gpt._capsule(capsule).log)
    gpt.print(capsule, b"o\nthree\n", at=2)
    gpt.print(capsule, b"four, cu", STDERR, at=3)
    gpt.cut_back(capsule, kept, gone)
    gpt.print(capsule, b"o\nthree\n", at=5)


WENT_ON = "went on here from a snapshot: it prints again what it had printed since]"
FOLLOWS = "printed what follows on h0, and then went back to a snapshot: it prints it again below]"


def test_logs_have_each_line_once_unless_told_otherwise(gpt: Any, call: Call) -> None:
    rewound(gpt)
    code, out, err = call("logs", "gpt/0")
    assert (code, out, err) == (0, "one\ntwo\nthree\n", f"[liveshift: gpt/0 {WENT_ON}\n")


def test_logs_show_both_runs_of_what_was_repeated(gpt: Any, call: Call) -> None:
    """A line that had begun before the snapshot is part of both."""
    rewound(gpt)
    code, out, err = call("logs", "gpt/0", "--with-repeated")
    assert code == 0
    assert out.splitlines() == ["one", "(repeated) two", "(repeated) three", "two", "three"]
    assert err.splitlines() == [
        f"[liveshift: gpt/0 {FOLLOWS}",
        "(repeated) four, cu",
        f"[liveshift: gpt/0 {WENT_ON}",
    ]


def test_scripts_can_tell_repeated_lines_apart(gpt: Any, call: Call) -> None:
    rewound(gpt)
    code, out, err = call("logs", "gpt", "--with-repeated", "-o", "json")
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    assert lines[0] == {
        "capsule": "gpt/0",
        "time": 1.0,
        "stream": "stdout",
        "text": "one",
        "repeated": False,
    }
    assert [(e["text"], e["stream"]) for e in lines if e["repeated"]] == [
        ("two", "stdout"),
        ("three", "stdout"),
        ("four, cu", "stderr"),
    ]
    own = [e["text"] for e in lines if not (e["repeated"] or e["stream"] == "stderr")]
    assert own == ["one", "two", "three"]


def test_repeated_lines_of_a_job_are_in_order_of_time(gpt: Any, call: Call) -> None:
    rewound(gpt)
    gpt.print("gpt/1", b"meanwhile\n", at=4)
    code, out, _ = call("logs", "gpt", "--with-repeated", "--timestamps")
    assert code == 0
    assert [line.partition("Z ")[2] for line in out.splitlines()] == [
        "gpt/0: one",
        "gpt/0: (repeated) two",
        "gpt/0: (repeated) three",
        "gpt/1: meanwhile",
        "gpt/0: two",
        "gpt/0: three",
    ]


def test_logs_say_that_repeated_lines_are_gone(gpt: Any, call: Call) -> None:
    rewound(gpt, gone="h0 is not up")
    code, out, err = call("logs", "gpt/0", "--with-repeated")
    assert (code, out) == (0, "one\ntwo\nthree\n")
    gone = "what gpt/0 printed on h0 before it went back to a snapshot is gone: h0 is not up]"
    assert err.splitlines() == [f"[liveshift: {gone}", f"[liveshift: gpt/0 {WENT_ON}"]


def test_who_follows_sees_repeated_lines_that_came_too_late(gpt: Any, start: Starter) -> None:
    gpt.print("gpt/1", b"one\n")
    kept = len(gpt._capsule("gpt/1").log)
    gpt.print("gpt/1", b"two\n")
    process = start("logs", "gpt/1", "-f", "--with-repeated")
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == [b"one\n", b"two\n"]
    with gpt.changed:  # what follows comes at once
        gpt.print("gpt/1", b"three\n")
        gpt.cut_back("gpt/1", kept)
        gpt.print("gpt/1", b"two\n")
    gpt.end("gpt/1", 9)
    code, out, err = ended(process)
    assert (code, out) == (0, "(repeated) three\ntwo\n")
    assert [WENT_ON in line for line in err.splitlines()] == [False, True]


def test_logs_of_nothing(gpt: Any, call: Call) -> None:
    said = 'error: no job "gtp"\nhint: did you mean gpt? there are: gpt\n'
    assert call("logs", "gtp") == (4, "", said)
    code, out, err = call("logs", "gpt/7")
    assert (code, out) == (4, "")
    assert err.startswith('error: no capsule "gpt/7"\n')
