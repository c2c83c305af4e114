# SPDX-License-Identifier: Apache-2.0
"""What the command line loads before it speaks. Modules are counted: seconds are the machine's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_harness import DEADLINE, Call

from liveshift.runtime.messages import RunJob

HEAVY = (
    *("pydantic", "pydantic_core", "markdown_it", "pygments", "rich.markdown", "rich.traceback"),
    *("torch", "numpy", "zmq", "cryptography", "sqlite3", "asyncio", "cffi", "importlib.metadata"),
    *("psutil", "tarfile", "ctypes"),
)
MOST = 300
"""Modules in all, those of Python's own start among them; 800 when pydantic was one of them, 330
when every command imported all others."""


def imported(environment: dict[str, str], *words: str) -> tuple[str, set[str]]:
    """What a command prints, and the modules that it imports."""
    command = [sys.executable, "-X", "importtime", "-m", "liveshift.launcher", *words]
    done = subprocess.run(
        command, env=environment, capture_output=True, timeout=DEADLINE, check=True
    )
    lines = done.stderr.decode().splitlines()
    names = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    return done.stdout.decode(), names


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("status",), "gpt/1"),
        (("status", "gpt", "-o", "json"), '"gpt/1"'),
        (("taint", "host", "h2"), "h2 is tainted"),
        (("events", "gpt"), "train"),
        (("--help",), "First steps"),
        (("status", "--help"), "--watch"),
    ],
)
def test_nothing_heavy_is_loaded(
    gpt: Any, environment: dict[str, str], words: tuple[str, ...], said: str
) -> None:
    out, names = imported(environment, *words)
    assert said in out
    assert "liveshift.launcher.cli" in names
    assert not names.intersection(HEAVY)
    assert len(names) < MOST


PROGRAM = """
import gc, sys
from liveshift.launcher import cli
code = cli.main()
print(gc.isenabled(), gc.get_freeze_count() > 10_000)
print(*sys.modules)
sys.exit(code)
"""
OTHERS = {f"liveshift.launcher.commands.{verb}" for verb in ("drain", "lab_cmd", "migrate", "run")}


def loaded(
    environment: dict[str, str], *words: str, code: int = 0, frozen: bool = False
) -> set[str]:
    """The modules that are there after a command, by whichever kind of import they came; whether
    the collector of cycles leaves them alone, but collects what comes later."""
    command = [sys.executable, "-c", PROGRAM, *words]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=DEADLINE)
    assert done.returncode == code, done.stderr.decode()
    *_, collector, modules = done.stdout.decode().splitlines()
    assert collector == f"True {frozen}"
    return set(modules.split())


@pytest.mark.parametrize("words", [("status",), ("events", "gpt"), ("events", "--help")])
def test_a_command_imports_no_other(
    gpt: Any, environment: dict[str, str], words: tuple[str, ...]
) -> None:
    names = loaded(environment, *words)
    assert f"liveshift.launcher.commands.{words[0]}" in names
    assert not names & OTHERS
    assert "liveshift.launcher.report.evidence" not in names
    assert loaded(environment, "--help") > OTHERS


@pytest.mark.parametrize("daemon", ["agent", "orchestrator"])
def test_a_daemon_starts_without_what_only_people_and_moves_need(
    environment: dict[str, str], daemon: str, tmp_path: Path
) -> None:
    words = (daemon, "--config", str(tmp_path / "none.toml"))
    names = loaded(environment, *words, code=3, frozen=True)
    assert f"liveshift.runtime.{daemon}.{daemon}" in names
    assert not names & OTHERS
    assert not names & {"pycparser", "rich.console", "rich.table", "torch", "numpy"}


def test_what_typer_checks_it_still_checks(double: Any, call: Call) -> None:
    code, _, err = call("run", "--nnodes", "0", "--", "true")
    assert (code, err.splitlines()[0]) == (
        2,
        "error: Invalid value for '--nnodes' / '-n': Input should be greater than or equal to 1",
    )
    code, _, err = call("status", "-o", "yaml")
    assert code == 2
    assert "yaml" in err
    assert call("run", "--nnodes", "2", "--detach", "--", "true")[0] == 0
    asked = double.wait_for(RunJob)
    assert (asked.nnodes, asked.argv) == (2, ["true"])
