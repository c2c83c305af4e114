# SPDX-License-Identifier: Apache-2.0
"""Programs on lab hosts that liveshift does not run, and the directories that they write to."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lab_session import environment

from liveshift.launcher.lab import LabHost, entry


def inside(out: Path, argv: Sequence[str]) -> list[str]:
    return [word.replace("{out}", str(out)) for word in argv]


@contextmanager
def running(command: Sequence[str], log: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """A program for as long as this lasts, its input and output ours, or its output in a file."""
    with ExitStack() as cleanup:
        written = cleanup.enter_context(log.open("wb")) if log else None
        process = cleanup.enter_context(
            subprocess.Popen(
                command,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=written or subprocess.PIPE,
                stderr=subprocess.STDOUT if log else None,
                text=True,
            )
        )
        cleanup.callback(process.kill)
        yield process


def line(process: subprocess.Popen[str]) -> str:
    """The next line that a program says; fails when it says no more."""
    assert process.stdout is not None
    said = process.stdout.readline()
    assert said, f"{process.args!r} ended with {process.wait()}"
    return said.rstrip("\n")


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@contextmanager
def on_host(
    machine: LabHost, argv: Sequence[str], log: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A program on a host, in the machine's own pid namespace, so that its pid is known."""
    command = [*entry(machine, "--mount", "--uts", "--ipc", "--net"), *argv]
    with running(command, log) as process:
        yield process


def emptied(directory: Path) -> Path:
    """Removed and made again."""
    with suppress(FileNotFoundError):
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    os.chmod(directory, 0o755)
    return directory
