# SPDX-License-Identifier: Apache-2.0
"""Bind mounts that end with a test."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def bound(source: Path, target: Path) -> Iterator[None]:
    """``source`` is mounted on ``target``, which is made and removed."""
    target.parent.mkdir(exist_ok=True)
    target.mkdir() if source.is_dir() else target.touch()
    subprocess.run(["mount", "--bind", source, target], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", target], check=True)
        target.rmdir() if source.is_dir() else target.unlink()
