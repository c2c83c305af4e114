# SPDX-License-Identifier: Apache-2.0
"""The agent remembers which files a capsule took along from this host's carried paths.

A carried path may also hold files of other jobs, so a capsule that leaves deletes nothing in it.
When the same capsule returns, what it brings replaces the files that it took along then, unless
they have changed on this host. Those that it has deleted since do not come back; they must not
reappear, and are removed here. The same holds for files that a move which failed has put here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ....criu_glue.files import trees
from ....criu_glue.files.sparing import Stamps
from ....criu_glue.files.trees import Stamp
from .running_capsule import CapsuleFactory

log = logging.getLogger("liveshift.capsules")


def remember(factory: CapsuleFactory, capsule: str, taken: Mapping[str, Stamps]) -> None:
    """Note the files that the capsule took along: carried path → (name → stamp)."""
    note = _note(factory, capsule)
    note.parent.mkdir(parents=True, exist_ok=True)
    part = note.with_name(f"{note.name}.new")
    raw = {
        os.fsencode(path): {os.fsencode(name): stamp for name, stamp in stamps.items()}
        for path, stamps in taken.items()
    }
    part.write_bytes(msgspec.msgpack.encode(raw))
    part.rename(note)


def add(factory: CapsuleFactory, capsule: str, files: Mapping[str, Stamps]) -> None:
    """Note files that came for the capsule, which does not run here in the end. Never raises: the
    next move only finds more files that count as another job's."""
    if not any(files.values()):
        return
    left = left_here(factory, capsule)
    known = {path: {**left.get(path, {}), **files.get(path, {})} for path in left.keys() | files}
    try:
        remember(factory, capsule, known)
    except OSError as error:
        log.warning("that files of %s are here cannot be noted: %s", capsule, error)


def left_here(factory: CapsuleFactory, capsule: str) -> dict[str, dict[str, Stamp]]:
    """The files that the capsule has left on this host's carried paths: path → (name → stamp)."""
    note = _note(factory, capsule)
    try:
        raw = msgspec.msgpack.decode(note.read_bytes(), type=dict[bytes, dict[bytes, Stamp]])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:  # empty, if this host lost its power soon after
        log.warning("files that %s took along before may be back: %s: %s", capsule, note, error)
        return {}
    return {
        os.fsdecode(path): {os.fsdecode(name): stamp for name, stamp in stamps.items()}
        for path, stamps in raw.items()
    }


def reconcile(
    factory: CapsuleFactory,
    capsule: str,
    left: Mapping[str, Stamps],
    came: Mapping[str, set[str]],
) -> None:
    """Remove the files that left with the capsule and did not come back; delete the note. ``left``:
    what :func:`left_here` has returned."""
    for path, stamps in left.items():
        if path in came:
            stale = {name: s for name, s in stamps.items() if name not in came[path]}
            trees.remove(Path(path), trees.unchanged(Path(path), stale))
    drop_note(factory, capsule)


def drop_note(factory: CapsuleFactory, capsule: str) -> None:
    """Delete the note: the capsule goes back to a snapshot, and that removes nothing."""
    _note(factory, capsule).unlink(missing_ok=True)


def forget_job(factory: CapsuleFactory, job: str) -> None:
    for note in _note(factory, f"{job}/0").parent.glob(f"{job}.*"):
        note.unlink(missing_ok=True)


def _note(factory: CapsuleFactory, capsule: str) -> Path:
    return factory.cluster.paths.state / "carried-out" / capsule.replace("/", ".")
