# SPDX-License-Identifier: Apache-2.0
"""What the destination of a migration writes down for a restarted agent: the Reserve that announced
the capsule, and the sandbox that was built for it. It lies beside the image. The inbox writes down
what had come when the image was complete."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ....criu_glue.capsule.sandboxes import Sandbox
from ....cuda_snapshot.assignment import Pairs
from ...messages import Reserve
from ..host.running_capsule import CapsuleFactory, RunningCapsule

NOTE = "arrival"


class IncomingNote(msgspec.Struct, frozen=True):
    """``init``, ``init_started``: the sandbox's process 1."""

    reserve: Reserve
    init: int
    init_started: int
    gpus: Pairs = msgspec.field(default_factory=list)

    def reserved(self, factory: CapsuleFactory) -> RunningCapsule:
        """The capsule in its sandbox, which may have ended meanwhile."""
        sandbox = Sandbox(factory.plan(self.reserve.spec), self.init, self.init_started)
        return factory.resident(self.reserve, sandbox)


def write_note(images: Path, reserve: Reserve, sandbox: Sandbox, gpus: Pairs) -> None:
    note = IncomingNote(reserve, sandbox.init, sandbox.started, gpus)
    (images / NOTE).write_bytes(msgspec.msgpack.encode(note))


def read_note(images: Path) -> IncomingNote | None:
    """The note of an earlier agent; None if there is none that can be read."""
    try:
        return msgspec.msgpack.decode((images / NOTE).read_bytes(), type=IncomingNote)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def remove_note(images: Path) -> None:
    (images / NOTE).unlink(missing_ok=True)
