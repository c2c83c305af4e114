# SPDX-License-Identifier: Apache-2.0
"""What the source of a migration writes down for a restarted agent: that a freeze began, and that
the source has promised. Both files lie in the directory of the migration's images."""

from __future__ import annotations

from pathlib import Path

import msgspec

NOTE, PROMISED = "departure", "promised"


class OutgoingNote(msgspec.Struct, frozen=True):
    """A freeze has begun.

    ``gpus``: the GPUs that stay reserved while the capsule may return. ``epoch``: that of the copy
    which was frozen; 0 in the note of an earlier build.
    """

    migration: str
    capsule: str
    gpus: list[str] = msgspec.field(default_factory=list)
    epoch: int = 0


def write_note(images: Path, note: OutgoingNote) -> None:
    (images / NOTE).write_bytes(msgspec.msgpack.encode(note))


def read_note(images: Path) -> OutgoingNote | None:
    """The note of an earlier agent; None if there is none that can be read."""
    try:
        return msgspec.msgpack.decode((images / NOTE).read_bytes(), type=OutgoingNote)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def write_promise(images: Path) -> None:
    (images / PROMISED).touch()


def has_promised(images: Path) -> bool:
    return (images / PROMISED).exists()
