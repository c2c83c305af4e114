# SPDX-License-Identifier: Apache-2.0
"""What a holder knows of an image before it comes, and writes down beside it for a restarted agent.

A host that restores the image later is asked for a sandbox with these facts.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ....criu_glue.survey.found import Survey
from ...messages import CapsuleSpec, GpuSurvey, HostFacts

NOTE = "note"


class HeldNote(msgspec.Struct, frozen=True):
    """One capsule of one snapshot. ``migration``: the image's name on the wire, "s17.0" for the
    capsule with index 0 of snapshot 17, whose ``number`` is 17. ``source``: the host that sends it.
    ``facts``: of the host on which the capsule was dumped. ``epoch`` and ``rewinds`` are those of
    the copy; claims name them. ``limit_bytes``: as in Reserve.

    ``bytes``: the size of the whole image here. ``rewritten``: so many bytes of an image differ
    from the one before. ``gpu``: what the capsule used of GPUs at its source. ``own``: the capsule
    runs on this host, which keeps a copy to rewind it in place. ``stays``: as in Hold.
    """

    migration: str
    number: int
    source: str
    spec: CapsuleSpec
    survey: Survey
    facts: HostFacts
    epoch: int
    rewinds: int
    limit_bytes: int
    bytes: int
    rewritten: int = 0
    gpu: GpuSurvey | None = None
    own: bool = False
    stays: bool = False

    @property
    def gives_way(self) -> bool:
        """Whether this is a copy that goes when its memory is needed."""
        return self.own and not self.stays

    @property
    def needed(self) -> int:
        """Bytes of memory that the capsule may take here: an image, and what two further ones have
        of their own, one that comes and one that is just dropped."""
        return self.bytes + 2 * self.rewritten


def write_note(images: Path, note: HeldNote) -> None:
    (images / NOTE).write_bytes(msgspec.msgpack.encode(note))


def read_note(images: Path) -> HeldNote | None:
    """The note of an earlier agent; None if there is none that can be read."""
    try:
        return msgspec.msgpack.decode((images / NOTE).read_bytes(), type=HeldNote)
    except (OSError, msgspec.DecodeError):
        return None
