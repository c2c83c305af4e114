# SPDX-License-Identifier: Apache-2.0
"""What the command line loads before it speaks. Modules are counted: seconds are the machine's."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import typer.main
from cli_harness import DEADLINE, Call
from typer.models import CommandInfo

from liveshift.launcher import cli
from liveshift.launcher.show import help_pages
from liveshift.runtime.messages import RunJob

HEAVY = (
    *("pydantic", "pydantic_core", "markdown_it", "pygments", "rich.markdown", "rich.traceback"),
    *("torch", "numpy", "zmq", "cryptography", "sqlite3", "asyncio", "cffi", "importlib.metadata"),
    *("psutil", "tarfile", "ctypes", "html", "statistics"),
    "liveshift.launcher.report.record",
)
MOST = 320
"""Modules in all, those of Python's own start among them; 800 when pydantic was one of them."""


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


def test_only_the_verb_that_is_asked_for_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """typer takes as long for all of them as Python takes to start, and for the imports."""
    made: list[str] = []
    true = typer.main.get_command_from_info

    def make(command_info: CommandInfo, **how: Any) -> Any:
        made.append(getattr(command_info.callback, "__name__", ""))
        return true(command_info, **how)

    monkeypatch.setattr(typer.main, "get_command_from_info", make)
    top = help_pages.command(cli.app, cli.ORDER)
    assert made == []
    for _ in range(2):
        assert top.commands["status"].name == "status"
        assert top.commands.get("statu") is None
    assert made == ["status"]
    assert [one.name for one in top.commands.values()] == list(top.commands) == list(cli.ORDER)


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
