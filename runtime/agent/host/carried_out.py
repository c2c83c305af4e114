# SPDX-License-Identifier: Apache-2.0
"""The agent remembers which files a capsule took along from this host's carried paths.

A carried path may also hold files of other jobs, so a capsule that leaves deletes nothing in it.
When the same capsule returns, what it brings replaces the files that it took along then, unless
they have changed on this host. Those that it has deleted since do not come back; they must not
reappear, and are removed here. The same holds for files that a move which failed has put here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from ....criu_glue.files import trees
from ....criu_glue.files.sparing import Stamps
from .running_capsule import CapsuleFactory

log = logging.getLogger("liveshift.capsules")


def remember(factory: CapsuleFactory, capsule: str, taken: Mapping[str, Stamps]) -> None:
    """Note the files that the capsule took along: carried path → (name → stamp)."""
    note = _note(factory, capsule)
    note.parent.mkdir(parents=True, exist_ok=True)
    part = note.with_name(f"{note.name}.new")
    part.write_text(json.dumps(taken))
    part.rename(note)


def add(factory: CapsuleFactory, capsule: str, files: Mapping[str, Stamps]) -> None:
    """Note files that came for the capsule, which does not run here in the end. Never raises: the
    next move only finds more files that count as another job's."""
    if not any(files.values()):
        return
    known = left_here(factory, capsule)
    for path, stamps in files.items():
        known.setdefault(path, {}).update(stamps)
    try:
        remember(factory, capsule, known)
    except OSError as error:
        log.warning("that files of %s are here cannot be noted: %s", capsule, error)


def left_here(factory: CapsuleFactory, capsule: str) -> dict[str, dict[str, Sequence[int]]]:
    """The files that the capsule has left on this host's carried paths."""
    note = _note(factory, capsule)
    try:
        left: dict[str, dict[str, Sequence[int]]] = json.loads(note.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # empty, if this host lost its power soon after
        log.warning("files that %s took along before may be back: %s: %s", capsule, note, error)
        return {}
    return left


def reconcile(factory: CapsuleFactory, capsule: str, came: dict[str, set[str]]) -> None:
    """Remove the files that left with the capsule and did not come back; delete the note."""
    for path, stamps in left_here(factory, capsule).items():
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
