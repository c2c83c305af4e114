# SPDX-License-Identifier: Apache-2.0
"""`make nightly`, with parts that take no time: every part runs, and the page says what came."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import ModuleType

import pytest
from checkout import ROOT
from repository_scripts import script

STARTED = "echo $$ >{place}/started; sleep 60 & wait"


@pytest.fixture
def nightly(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = script("nightly")
    monkeypatch.setattr(made, "GRACE_S", 2.0)
    return made


def part(nightly: ModuleType, name: str, program: str, limit_s: float = 30.0) -> object:
    short = ("sh", "-c", "echo 1 of 1 short")
    return nightly.Part(name, ("sh", "-c", program), short, limit_s, (r"\d of \d \w+",), "a <part>")


def test_parts_run_one_after_the_other_whatever_comes_of_them(
    nightly: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [
        part(nightly, "one", "echo 1 of 9 good; printf '\\033[1m2 of 9 \\033[0mgood\\n'"),
        part(nightly, "two", "echo on stderr >&2; exit 3"),
        part(nightly, "three", "trap 'echo labs are down; exit 1' INT; sleep 60 & wait", 0.5),
        part(nightly, "four", "trap '' INT; sleep 60", 0.5),
        part(nightly, "five", "echo 5 of 5 '<b>|'"),
    ]
    began = time.monotonic()
    assert nightly.main([], parts, tmp_path, tmp_path) == 1
    assert time.monotonic() - began < 30
    rows = [line.split(" | ") for line in (tmp_path / "nightly.md").read_text().splitlines()[6:]]
    assert [(row[0].strip("| "), row[1]) for row in rows] == [
        ("one", "passed"),
        ("two", "failed (3)"),
        ("three", "took too long"),
        ("four", "took too long"),
        ("five", "passed"),
    ]
    assert rows[0][2] == "2 of 9 good"
    assert "exit 3" in rows[1][-1]
    assert (tmp_path / "two.log").read_text() == "on stderr\n"
    assert (tmp_path / "three.log").read_text() == "labs are down\n"
    page = (tmp_path / "index.html").read_text()
    assert "Failed: two, three, four" in page
    assert 'title="a &lt;part&gt;"' in page
    assert '<a href="two.log"' in page
    assert "2 of 9 good" in capsys.readouterr().out


def test_some_parts_in_their_short_form(nightly: ModuleType, tmp_path: Path) -> None:
    parts = [part(nightly, name, "exit 1") for name in ("one", "two", "three")]
    words = ["--short", "--parts", "three,one"]
    assert nightly.main(words, parts, tmp_path, tmp_path) == 0
    text = (tmp_path / "nightly.md").read_text()
    assert "Not run: two." in text
    order = [text.index(f"| {row} |") for row in ("one | passed | 1 of 1 short", "two | not run")]
    assert order == sorted(order)
    assert order[-1] < text.index("| three | passed")
    assert (tmp_path / "one-short.log").read_text() == "1 of 1 short\n"
    with pytest.raises(SystemExit):
        nightly.main(["--parts", "four"], parts, tmp_path)


def test_an_interruption_ends_the_part_and_begins_no_other(tmp_path: Path) -> None:
    program = f"""
    import sys
    from pathlib import Path
    sys.path.insert(0, {str(ROOT / "scripts")!r})
    import nightly
    def part(name):
        words = ("sh", "-c", {STARTED.format(place=tmp_path)!r})
        return nightly.Part(name, words, words, 60.0, (), "")
    sys.exit(nightly.main([], [part("one"), part("two")], Path({str(tmp_path)!r})))
    """
    words = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 30
        while not (tmp_path / "started").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 130
    text = (tmp_path / "nightly.md").read_text()
    assert "| one | interrupted |" in text
    assert "| two | not run |" in text
    assert "Not run: one, two." in text
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "started").read_text()), 0)


def test_each_part_is_a_target_of_the_makefile(nightly: ModuleType) -> None:
    every = nightly.parts(20261125)
    assert [each.name for each in every] == [
        "long",
        "coverage",
        "fault-matrix",
        "soak",
        "losses",
        "fuzz",
        "compat",
    ]
    for each in every:
        for command in (each.command, each.short):
            done = subprocess.run(
                [command[0], "--dry-run", *command[1:]],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=True,
            )
            assert done.stdout
    assert "SEED=20261125" in every[4].command
    assert nightly.seed_of_today() > 20260000
