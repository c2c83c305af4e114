# SPDX-License-Identifier: Apache-2.0
"""The agent remembers the last epoch under which each capsule ran on this host.

A rewind asks for that: if the capsule ran here when its snapshot was taken, or later, the carried
paths of this host have its files.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from ....criu_glue.files import statx
from .running_capsule import CapsuleFactory

log = logging.getLogger("liveshift.capsules")


class RanHere(msgspec.Struct, frozen=True):
    """``places``: carried path → which directory it was then (:func:`_identity`)."""

    epoch: int
    places: dict[str, list[int]]


def remember(factory: CapsuleFactory, capsule: str, epoch: int) -> None:
    """Note that the capsule runs here under this epoch, or is about to. Never raises: the capsule
    runs all the same."""
    note = _place(factory) / capsule.replace("/", ".")
    part = note.with_name(f"{note.name}.new")
    places = {path: _identity(path) for path in factory.placement.carried}
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(msgspec.json.encode(RanHere(epoch, places)))
        part.rename(note)
    except OSError as error:
        log.warning("that %s runs here cannot be noted: %s", capsule, error)


def last_epoch(factory: CapsuleFactory, capsule: str) -> int:
    """The last epoch under which it ran here; 0 if it never did, or if a carried path is another
    directory by now, such as an empty one after a boot."""
    try:
        raw = (_place(factory) / capsule.replace("/", ".")).read_bytes()
        note = msgspec.json.decode(raw, type=RanHere)
    except (OSError, msgspec.DecodeError):
        return 0
    same = all(note.places.get(path) in (_identity(path), []) for path in factory.placement.carried)
    return note.epoch if same else 0


def _identity(path: str) -> list[int]:
    """The inode of a directory and its time of birth; [] if there is none. A later directory may
    get the same inode."""
    try:
        return [os.stat(path).st_ino, statx.born_ns(path)]
    except OSError:
        return []


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
