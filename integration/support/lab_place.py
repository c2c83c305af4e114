# SPDX-License-Identifier: Apache-2.0
"""Names and places of the labs that tests make, and how a program that makes labs begins."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from liveshift.launcher.lab.record import root

MADE = "LIVESHIFT_TEST_MADE"
"""A directory of a whole run, in which each lab and each place of its tests has a file: what an
interrupted test has left, scripts/whole_run.py removes."""

PLACE = Path("/var/lib/liveshift-test")
"""On the machine's own disk, which all lab hosts share, and open to every user."""


def lab_name(letter: str = "t") -> str:
    """A name that no other lab on this machine has."""
    name = letter + secrets.token_hex(3)
    _note(name, str(root()))
    return name


def _note(name: str, where: str) -> None:
    if made := os.environ.get(MADE):
        (Path(made) / name).write_text(where)


@contextmanager
def a_place(*, kept: bool = False, may_remain: bool = False) -> Iterator[Path]:
    """A directory of our own, removed at the end unless ``kept``; OSError where that cannot be,
    unless it ``may_remain``."""
    place = PLACE / secrets.token_hex(4)
    if not kept:
        _note(f"place-{place.name}", str(place))
    place.mkdir(parents=True)
    PLACE.chmod(0o755)
    try:
        yield place
    finally:
        if not kept:
            shutil.rmtree(place, ignore_errors=may_remain)
            if not any(PLACE.iterdir()):
                PLACE.rmdir()


def shared_place(place: Path, name: str) -> Path:
    """A directory that all processes of a whole run share until its end; outside of one, a
    directory below ``place``."""
    made = os.environ.get(MADE)
    if not made:
        shared = place / name
    else:
        shared = PLACE / f"{name}-{Path(made).name}"
        _note(f"place-{shared.name}", str(shared))
    shared.mkdir(parents=True, exist_ok=True)
    return shared


def as_program() -> None:
    """What daemons and jobs are not to inherit goes, and SIGTERM leaves nothing behind."""
    # Started from a background shell we would ignore SIGINT, and hand that on to all daemons.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.pop("PYTHONPATH", None)  # how this program is found is not the job's business
