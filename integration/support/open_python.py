# SPDX-License-Identifier: Apache-2.0
"""A Python with liveshift and torch that another user can run, wherever the checkout lies."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NOBODY = 65534
"""An unprivileged user that every system has."""


@dataclass(frozen=True)
class OpenPython:
    """``python`` is an interpreter, ``files`` a directory; both are open to the user."""

    python: str
    files: Path


@contextmanager
def opened_python(user: int, place: Path) -> Iterator[OpenPython]:
    """The tests' own Python where the user can run it.

    Where that lies below a directory that is closed to others (somebody's home), its environment
    is mounted a second time in ``place`` for as long as this lasts.
    """
    files = place / "open"
    files.mkdir(exist_ok=True)
    if _can_run(user, sys.executable):
        yield OpenPython(sys.executable, files)
        return
    mounted = place / "python"
    mounted.mkdir()
    subprocess.run(["mount", "--bind", sys.prefix, str(mounted)], check=True)
    try:
        python = str(mounted / Path(sys.executable).relative_to(sys.prefix))
        assert _can_run(user, python), f"uid {user} cannot run {python} either"
        yield OpenPython(python, files)
    finally:
        subprocess.run(["umount", "--lazy", str(mounted)], check=True)
        mounted.rmdir()


def _can_run(user: int, python: str) -> bool:
    words = [python, "-c", "import liveshift, torch"]
    try:
        done = subprocess.run(
            words, user=user, group=user, extra_groups=[], cwd="/", capture_output=True
        )
    except PermissionError:
        return False
    return done.returncode == 0
