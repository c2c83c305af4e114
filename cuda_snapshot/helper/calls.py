# SPDX-License-Identifier: Apache-2.0
"""What passes between an agent and its GPU helper: asks, and what they are answered with.

A message is a u32 little-endian length and msgpack; an ask is a Struct tagged by its name, a reply
holds ``ok`` (of the type that the ask's docstring names) or ``error`` as errors.to_wire makes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec import UNSET, Raw, UnsetType

from ...errors import to_wire
from ..devices import Gpu

PROTOCOL = 1
"""To be raised with every change that a helper of the version before would not understand."""

SOCKET = "gpu.sock"
LOCK = "gpu-helper.lock"
LOG = "gpu-helper.log"


class Ask(msgspec.Struct, frozen=True, tag_field="t", tag=True, forbid_unknown_fields=True):
    """Base of all asks; the tag is the class name."""


class Reply(msgspec.Struct, frozen=True):
    ok: Raw | UnsetType = UNSET
    error: tuple[str, str, str | None] | UnsetType = UNSET


def done(answer: object) -> Reply:
    return Reply(ok=Raw(msgspec.msgpack.encode(answer)))


def failed(error: Exception) -> Reply:
    return Reply(error=to_wire(error))


class Hello(Ask, frozen=True):
    """First of every connection; answered with a Welcome."""


class Host(Ask, frozen=True):
    """HostGpus."""


class State(Ask, frozen=True):
    """int (ProcessState) | None."""

    pid: int


class RestoreThread(Ask, frozen=True):
    """int."""

    pid: int


class Used(Ask, frozen=True):
    """dict[str, int]."""

    pid: int


class Change(Ask, frozen=True):
    """Base of those that change something: the helper does not leave before they have ended."""


class Leave(Change, frozen=True):
    """End as soon as nothing is under way; refused while it holds device memory. None."""


class Operation(Change, frozen=True):
    """Base of those that change a process. One is done at a time on a host; ``turn_s`` is how long
    it may wait until its turn comes, after which it is not done at all."""

    pid: int
    turn_s: float


class Lock(Operation, frozen=True):
    """None."""

    timeout_s: float


class Checkpoint(Operation, frozen=True):
    """Checkpointed."""


class Restore(Operation, frozen=True):
    """None. ``needed`` is in bytes by new UUID; None: as this helper saw it at the checkpoint."""

    gpus: list[tuple[str, str]]
    needed: dict[str, int] | None


class Unlock(Operation, frozen=True):
    """None."""


class HoldThreads(Change, frozen=True):
    """Keep the process's threads still but for the driver's and liveshift's own; None.
    ``kill_on_exit``: it is to end with the helper, until SpareFromExit."""

    pid: int
    kill_on_exit: bool
    timeout_s: float


class SpareFromExit(Change, frozen=True):
    """None."""

    pid: int


class Release(Change, frozen=True):
    """Let the threads go on; None. Nothing is held: as good."""

    pid: int


class Holds(Ask, frozen=True):
    """bool."""

    pid: int


class Welcome(msgspec.Struct, frozen=True):
    protocol: int
    pid: int


@dataclass(frozen=True)
class HostGpus:
    """A host's driver and GPUs, now."""

    cuda: tuple[int, int]
    """The newest CUDA that the driver supports, such as (13, 0)."""
    driver: str
    """Its version, such as "580.159.03"; "" where NVML does not tell."""
    gpus: tuple[Gpu, ...]
    why_none: str | None
    """Why ``gpus`` is empty, where it is."""
    can_remap: bool
    """A process can be restored onto other GPUs."""
    mps: bool
    """A GPU is shared by MPS clients."""
    fast_path: str
    """"" where device memory can be handed over by descriptor, else why not."""
    sessions: str = ""
    """Why there can't be a device session with anybody, not even for checksums; else ""."""


@dataclass(frozen=True)
class Checkpointed:
    """What a checkpoint found."""

    used: dict[str, int]
    """Device bytes that the process held before, by GPU UUID; {} where NVML can't tell."""
    remark: str
    """What could not be verified, in words; mostly ""."""
