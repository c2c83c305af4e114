# SPDX-License-Identifier: Apache-2.0
"""The agent remembers the last epoch under which each capsule ran on this host.

A rewind asks for that: if the capsule ran here when its snapshot was taken, or later, the carried
paths of this host have its files.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection
from pathlib import Path

from .running_capsule import CapsuleFactory

log = logging.getLogger("liveshift.capsules")


def remember(factory: CapsuleFactory, capsule: str, epoch: int) -> None:
    """Note that the capsule runs here under this epoch, or is about to. Never raises: without the
    note a rewind only brings more files."""
    note = _place(factory) / capsule.replace("/", ".")
    part = note.with_name(f"{note.name}.new")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(str(epoch))
        part.rename(note)
    except OSError as error:
        log.warning("that %s runs here cannot be noted: %s", capsule, error)


def last_epoch(factory: CapsuleFactory, capsule: str) -> int:
    """The last epoch under which it ran here; 0 if it never did."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return int((_place(factory) / capsule.replace("/", ".")).read_text())
    return 0


def forget_unknown(factory: CapsuleFactory, jobs: Collection[str]) -> None:
    """Remove the notes of all other jobs."""
    for note in _place(factory).glob("*"):
        if note.name.removesuffix(".new").rpartition(".")[0] not in jobs:
            note.unlink(missing_ok=True)


def forget_job(factory: CapsuleFactory, job: str) -> None:
    for note in _place(factory).glob(f"{job}.*"):
        note.unlink(missing_ok=True)


def _place(factory: CapsuleFactory) -> Path:
    return factory.cluster.paths.state / "ran-here"
