# SPDX-License-Identifier: Apache-2.0
"""File systems that take nothing more."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOMY = "90%"
SLACK = 1 << 20
BLOCK = bytes(4096)
PERIOD_S = 0.001


@contextmanager
def filled(mount_point: Path, inside: int | None = None) -> Iterator[None]:
    """A tmpfs that is full, and takes at once what others free; ``inside`` is a process in whose
    view it lies."""
    seen = Path(f"/proc/{inside}/root{mount_point}") if inside else mount_point
    enter = ["nsenter", "--target", str(inside), "--mount", "--"] if inside else []

    def resize(size: str) -> bool:
        options = f"remount,size={size}"
        done = subprocess.run([*enter, "mount", "-o", options, mount_point], capture_output=True)
        return done.returncode == 0

    own = os.stat(seen).st_dev != os.stat(seen.parent).st_dev
    assert own, f"{seen} is no file system of its own"
    while not resize(str(_used(seen) + SLACK)):  # somebody has just written more than that
        pass
    filler, over, full = seen / ".filler", threading.Event(), threading.Event()

    def fill() -> None:
        with filler.open("wb", buffering=0) as file:
            while not over.wait(PERIOD_S):
                _fill(file.fileno())
                full.set()

    thread = threading.Thread(target=fill, name="filler", daemon=True)
    try:
        thread.start()
        assert full.wait(30), f"{seen} was not filled"
        yield
    finally:
        over.set()
        thread.join()
        filler.unlink()
        assert resize(ROOMY), f"{mount_point} stays as small as it was made"


def _fill(fd: int) -> None:
    try:
        while True:
            os.write(fd, BLOCK)
    except OSError as full:
        if full.errno != errno.ENOSPC:
            raise


def _used(path: Path) -> int:
    stat = os.statvfs(path)
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize
