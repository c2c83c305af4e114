# SPDX-License-Identifier: Apache-2.0
"""The command line on a terminal, its errors, its help."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_harness import DEADLINE, Call, Starter, Terminal
from daemon_process import Place

from liveshift.launcher import cli
from liveshift.launcher.commands import taint
from liveshift.launcher.commands.options import duration
from liveshift.launcher.lab.record import Lab, LabHost
from liveshift.runtime.messages import (
    RunJob,
)
from liveshift.units import ranges

# ---- on a terminal ------------------------------------------------------------------------------


def test_on_a_terminal_names_are_coloured_and_moves_told(
    double: Any, start: Starter, terminal: Terminal
) -> None:
    streams = {"stdout": terminal.theirs, "stderr": terminal.theirs}
    process = start("run", "--nnodes", "2", "--name", "gpt", "--", "train", **streams)
    terminal.read_until(b"gpt: 2 capsules on h0, h1")
    double.print("gpt/1", b"hello\n")
    terminal.read_until(b"\x1b[33mgpt/1:\x1b[0m hello\r\n")
    double.move("gpt/1", "h2")
    terminal.read_until("gpt/1 moved h1 → h2, paused 0.70 s".encode())
    double.end("gpt/0")
    double.end("gpt/1")
    assert process.wait(DEADLINE) == 0


def test_no_color_is_honoured(
    double: Any, start: Starter, terminal: Terminal, environment: dict[str, str]
) -> None:
    environment["NO_COLOR"] = "1"
    double._run(RunJob("gpt", 2, ["train"], {}, "/", 0, []))
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
    *(
        "",
        "run",
        "status",
        "logs",
        "inspect",
        "migrate",
        "cancel",
        "events",
        "snapshot",
        "suspend",
        "resume",
        "rewind",
        "stop",
        "taint",
        "drain",
        "cordon",
        "untaint",
    ),
    *("uncordon", "lab", "lab up", "lab down", "lab list", "lab link", "lab exec", "doctor"),
    *("agent", "orchestrator", "config", "config validate", "config show", "keys", "keys init"),
    *("keys add-host", "keys add-operator", "keys revoke", "keys list", "keys trust"),
    *("keys signer", "whoami", "version"),
    *("host", "host add", "host remove", "install-units"),
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


@pytest.fixture
def small_cluster(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]
) -> Path:
    """A cluster file with its keys, and a lab that is but its record."""
    root = tmp_path_factory.mktemp("labs")  # a short path, as a lab's must be
    environment["LIVESHIFT_LAB_ROOT"] = str(root)
    names = ("ctl", "h0", "h1")
    made = [LabHost(name, f"10.88.0.{n + 2}", f"ls-a-{name}") for n, name in enumerate(names)]
    hosts = {machine.name: machine for machine in made[1:]}
    lab = Lab("a", root / "a", hosts, made[0], [], [])
    lab.directory.mkdir()
    lab.save()
    return Place(tmp_path).config


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("lab up --hosts 40", "a lab has 1 to 32 hosts, got 40"),
        ("lab up --hosts 0", "a lab has 1 to 32 hosts, got 0"),
        ("lab up BAD_NAME", '"BAD_NAME" cannot be the name of a lab'),
        ("lab up x --spare h9=none", "spare of h9: no such host in a lab of 3"),
        ("lab up x --timeouts grace=soon", 'timeouts.grace: found "soon", expected a number'),
        ("lab up x --memory h1=much", 'memory of h1: found "much", expected a size'),
        ("lab up x --shared /nowhere", "/nowhere cannot be shared: there is no such directory"),
        ("lab up x --local /etc", "/etc cannot be a directory of each host's own"),
        ("lab link h1 --rate x", '"x" is no rate of a link'),
        ("lab link h1 --loss 101", "a link cannot lose 101.0 % of its packets"),
        ("lab link h1 --delay 1y", '"1y" is no delay of a link'),
        ("lab link h1 --cut --to h1", "h1 cannot be cut off from itself"),
        ("keys add-operator {A B} --role view -c FILE", 'operator name: found "A B", expected'),
        ("host add H_2 127.0.0.4 -c FILE", 'host H_2: found "H_2", expected a DNS label'),
        ("host add h2 nonsense -c FILE", 'host h2: found "nonsense", expected an IPv4 address'),
    ],
)
def test_a_name_or_value_that_cannot_be_ends_with_2_and_says_why(
    call: Call, small_cluster: Path, words: str, said: str
) -> None:
    there = {"FILE": str(small_cluster)}
    argv = [there.get(w, w) for w in re.findall(r"\{.*?\}|\S+", words)]
    code, out, err = call(*(word.strip("{}") for word in argv))
    assert (code, out) == (2, ""), err
    assert err.startswith(f"error: {said}")


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
    (tmp_path / "broken" / "msgspec.py").write_text("raise ZeroDivisionError('by design')\n")
    path = os.pathsep.join(filter(None, (str(tmp_path / "broken"), os.environ.get("PYTHONPATH"))))
    broken = environment | {"PYTHONPATH": path}
    code, out, err = call("status", env=broken)
    assert (code, out) == (1, "")
    assert err.splitlines() == [
        "error: internal error: ZeroDivisionError: by design",
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


# ---- a stdout that cannot be written -------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("status", "-o", "json"),
        ("events", "gpt"),
        ("logs", "gpt/0"),
        ("--help",),
        ("version",),
        ("stop", "gpt", "--no-wait"),
    ],
)
def test_a_full_disk_behind_stdout_is_named(
    gpt: Any, start: Starter, words: tuple[str, ...]
) -> None:
    gpt.print("gpt/0", b"step 1\n")
    gpt.end("gpt/0")
    with Path("/dev/full").open("wb") as full:
        process = start(*words, stdout=full)
        _, err = process.communicate(timeout=DEADLINE)
    assert err.decode().splitlines() == [
        "error: stdout cannot be written: No space left on device",
        "hint: redirect it elsewhere; what the command has changed is changed all the same",
    ]
    assert process.returncode == 1


@pytest.mark.parametrize("words", [("version",), ("status", "-o", "json")])
def test_a_reader_that_is_gone_is_no_error(
    gpt: Any, start: Starter, words: tuple[str, ...]
) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    try:
        process = start(*words, stdout=writes)
    finally:
        os.close(writes)
    assert process.communicate(timeout=DEADLINE)[1] == b""
    assert process.returncode == 1
