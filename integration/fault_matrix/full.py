# SPDX-License-Identifier: Apache-2.0
"""File systems that take nothing more."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOMY = "90%"


@contextmanager
def filled(mount_point: Path, inside: int | None = None) -> Iterator[None]:
    """A tmpfs made as small as what is in it; ``inside`` is a process in whose view it lies."""
    seen = Path(f"/proc/{inside}/root{mount_point}") if inside else mount_point
    enter = ["nsenter", "--target", str(inside), "--mount", "--"] if inside else []

    def resize(size: str) -> None:
        options = f"remount,size={size}"
        subprocess.run([*enter, "mount", "-o", options, str(mount_point)], check=True)

    own = os.stat(seen).st_dev != os.stat(seen.parent).st_dev
    assert own, f"{seen} is no file system of its own"
    stat = os.statvfs(seen)
    used = (stat.f_blocks - stat.f_bfree) * stat.f_frsize
    resize(str(max(used, stat.f_frsize)))  # 0 would mean: no limit
    try:
        yield
    finally:
        resize(ROOMY)
