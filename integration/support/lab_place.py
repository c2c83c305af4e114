# SPDX-License-Identifier: Apache-2.0
"""Where labs of ours keep what they write, and how a program that makes labs begins."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PLACE = Path("/var/lib/liveshift-test")
"""On the machine's own disk, which all lab hosts share, and open to every user."""


@contextmanager
def a_place(*, kept: bool = False, may_remain: bool = False) -> Iterator[Path]:
    """A directory of our own, removed at the end unless ``kept``; OSError where that cannot be,
    unless it ``may_remain``."""
    place = PLACE / secrets.token_hex(4)
    place.mkdir(parents=True)
    PLACE.chmod(0o755)
    try:
        yield place
    finally:
        if not kept:
            shutil.rmtree(place, ignore_errors=may_remain)
            if not any(PLACE.iterdir()):
                PLACE.rmdir()


def as_program() -> None:
    """What daemons and jobs are not to inherit goes, and SIGTERM leaves nothing behind."""
    # Started from a background shell we would ignore SIGINT, and hand that on to all daemons.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.pop("PYTHONPATH", None)  # how this program is found is not the job's business
