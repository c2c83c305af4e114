# SPDX-License-Identifier: Apache-2.0
"""How the tests call the command line, with a double in the orchestrator's place."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from doubles.orchestrator import Orchestrator

from liveshift.runtime.messages import (
    RunJob,
)
from liveshift.waiting import readable

DEADLINE = 30.0  # seconds; nothing here takes that long


@pytest.fixture
def double(tmp_path: Path) -> Iterator[Any]:
    with Orchestrator(tmp_path / "orchestrator.sock") as orchestrator:
        yield orchestrator


Starter = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Where the command line finds the double, and nothing else of this machine."""
    # LINES and COLUMNS, which pytest-xdist sets, would count for more than a terminal's own size.
    others = ("LIVESHIFT_", "FORCE_COLOR", "LINES", "COLUMNS")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(others)}
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


@pytest.fixture
def gpt(double: Any) -> Any:
    """A job gpt of two capsules, on h0 and h1; h2 is free."""
    double._run(RunJob("gpt", 2, ["train"], {}, "/", 0, []))
    return double


class Terminal:
    """A pseudo-terminal and what was written to it."""

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        self.seen = b""

    def read_until(self, text: bytes) -> None:
        until = time.monotonic() + DEADLINE
        while text not in self.seen:
            assert time.monotonic() < until, self.seen
            if readable(0.2, self._ours):
                self.seen += os.read(self._ours, 65536)

    def type(self, text: bytes) -> None:
        os.write(self._ours, text)

    def close(self) -> None:
        os.close(self._ours)
        os.close(self.theirs)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with closing(Terminal()) as made:
        yield made
