# SPDX-License-Identifier: Apache-2.0
"""The agent remembers which files a capsule took along from this host's carried paths.

A carried path may also hold files of other jobs, so a capsule that leaves deletes nothing in it.
When the same capsule returns, files that it took away then and has deleted since must not reappear.
These are the remembered files that did not come back with it and have not changed on this host.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from ....criu_glue.files import trees
from ....criu_glue.files.trees import Stamp
from .running_capsule import CapsuleFactory

log = logging.getLogger("liveshift.capsules")


def remember(factory: CapsuleFactory, capsule: str, taken: dict[str, dict[str, Stamp]]) -> None:
    """Note the files that the capsule took along: carried path → (name → stamp)."""
    note = _note(factory, capsule)
    note.parent.mkdir(parents=True, exist_ok=True)
    part = note.with_name(f"{note.name}.new")
    part.write_text(json.dumps(taken))
    part.rename(note)


def reconcile(factory: CapsuleFactory, capsule: str, came: dict[str, set[str]]) -> None:
    """Remove the files that left with the capsule and did not come back; delete the note."""
    note = _note(factory, capsule)
    if not note.exists():
        return
    try:
        taken = json.loads(note.read_text())
    except ValueError as error:  # empty, if this host lost its power soon after it was written
        log.warning("files that %s took along before may be back: %s: %s", capsule, note, error)
        taken = {}
    for path, stamps in taken.items():
        if path in came:
            stale = {name: s for name, s in stamps.items() if name not in came[path]}
            trees.remove(Path(path), trees.unchanged(Path(path), stale))
    note.unlink()


def drop_note(factory: CapsuleFactory, capsule: str) -> None:
    """Delete the note: the capsule goes back to a snapshot, and that removes nothing."""
    _note(factory, capsule).unlink(missing_ok=True)


def forget_job(factory: CapsuleFactory, job: str) -> None:
    for note in _note(factory, f"{job}/0").parent.glob(f"{job}.*"):
        note.unlink(missing_ok=True)


def _note(factory: CapsuleFactory, capsule: str) -> Path:
    return factory.cluster.paths.state / "carried-out" / capsule.replace("/", ".")
