# SPDX-License-Identifier: Apache-2.0
"""The messages between an agent and its GPU helper: requests and replies. A message is a u32
little-endian length and msgpack. A request is a Struct with a tag. A reply holds
``ok``, of the type that the request's docstring names, or ``error`` as errors.to_wire makes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from ...errors import to_wire
from ..devices import NvmlGpu
from .blocks import Block

PROTOCOL = 4
"""Raise this number with every change that a helper of the version before would not understand,
also if a class of a request gets another name: its tag is its name."""

SOCKET = "gpu.sock"
LOCK = "gpu-helper.lock"
LOG = "gpu-helper.log"


class HelperRequest(
    msgspec.Struct, frozen=True, tag_field="t", tag=True, forbid_unknown_fields=True
):
    """Base of all requests; the tag is the class name, unless the class gives another one."""


class HelperReply(msgspec.Struct, frozen=True):
    """The helper answers one request with a HelperReply, in which exactly one field is set. ``ok``:
    the answer in msgpack, of the type that the request's docstring names. ``error``: why the
    request failed, as (kind, message, hint); HelperConnection.ask raises it as a LiveshiftError."""

    ok: Raw | UnsetType = UNSET
    error: tuple[str, str, str | None] | UnsetType = UNSET


def done(answer: object) -> HelperReply:
    return HelperReply(ok=Raw(msgspec.msgpack.encode(answer)))


def failed(error: Exception) -> HelperReply:
    return HelperReply(error=to_wire(error))


class HelloHelper(HelperRequest, frozen=True, tag="Hello"):
    """The first request of every connection. Reply: Welcome."""

    # This tag and Welcome never change: a helper of another version must understand the hello, so
    # that the client learns the helper's protocol and says what to do.


class GetHost(HelperRequest, frozen=True):
    """Asks about the host's driver and GPUs. Reply: HostGpus."""


class State(HelperRequest, frozen=True):
    """Asks for the driver's state of a process. Reply: int (CudaState) | None."""

    pid: int


class Used(HelperRequest, frozen=True):
    """Asks for a process's device memory in bytes, by GPU UUID. Reply: dict[str, int]."""

    pid: int


class Change(HelperRequest, frozen=True):
    """Base of all requests that change something. The helper does not end before they have
    ended."""


class Operation(Change, frozen=True):
    """Base of all requests that change a process. The helper does one at a time. An operation waits
    for its turn for at most ``turn_s`` seconds; after that the helper does not begin it."""

    what: ClassVar[str]
    pid: int
    turn_s: float


class Lock(Operation, frozen=True):
    """RUNNING to LOCKED. Reply: None."""

    what = "lock"
    timeout_s: float


class CheckpointProcess(Operation, frozen=True):
    """LOCKED to CHECKPOINTED. Reply: None."""

    what = "checkpoint"


class RestoreProcess(Operation, frozen=True):
    """CHECKPOINTED to LOCKED. Reply: None. ``needed`` is in bytes by new UUID; None: what this
    helper saw at the checkpoint."""

    what = "restore"
    gpus: list[tuple[str, str]]
    needed: dict[str, int] | None


class Unlock(Operation, frozen=True):
    """LOCKED to RUNNING. Reply: None."""

    what = "unlock"


class HoldThreads(Change, frozen=True):
    """Stops the process's threads, except those of the driver and of liveshift. Reply: None.
    ``kill_on_exit``: if the helper ends, the process is killed, until SpareFromExit. ``outside_s``:
    wait so long until each thread is outside of the driver's calls; 0: hold them anywhere."""

    pid: int
    kill_on_exit: bool
    timeout_s: float
    outside_s: float


class SpareFromExit(Change, frozen=True):
    """A held process must not be killed any more if the helper ends. Reply: None."""

    pid: int


class Release(Change, frozen=True):
    """Lets the threads go on. Succeeds also if none is held. Reply: None."""

    pid: int


class Holds(HelperRequest, frozen=True):
    """Asks whether the helper holds the process's threads. Reply: bool."""

    pid: int


# ---- device memory; ``key`` is "<migration>/<inner pid>"


class Warm(Change, frozen=True):
    """Prepares contexts on GPUs for a key. Reply: None."""

    key: str
    gpus: list[str]


class Create(Change, frozen=True):
    """Makes memory for blocks under a key. Reply: None."""

    key: str
    blocks: list[Block]


class Drop(Change, frozen=True):
    """Frees a key's memory. Reply: None."""

    key: str


class GetHeldMemory(HelperRequest, frozen=True, tag="GetHeld"):
    """Asks how many bytes each key holds. Reply: dict[str, int]."""


class CopyOut(HelperRequest, frozen=True):
    """Copies a key's memory out. No reply: the words of slots.py follow, and then the connection
    ends."""

    key: str


class CopyIn(HelperRequest, frozen=True):
    """Copies bytes into a key's memory. No reply, as for CopyOut."""

    key: str


# ---- a device session with one process


class BeginSession(HelperRequest, frozen=True, tag="Session"):
    """Begins a device session, which ends with the connection. Reply: None."""

    pid: int
    directory: str
    inner_pid: int


class Wait(HelperRequest, frozen=True):
    """Waits for the process's service thread. Reply: None."""

    timeout_s: float


class Blocks(HelperRequest, frozen=True):
    """Asks for all device allocations. Reply: list[Block]."""


class Checksums(HelperRequest, frozen=True):
    """Asks for the checksums of all memory. Reply: dict[int, int]."""

    samples: int


class GiveUp(Change, frozen=True):
    """The helper takes the process's arena memory. Reply: list[Block]."""

    key: str


class TakeBack(Change, frozen=True):
    """The process gets its arena memory back. Reply: None."""

    key: str
    keep: bool
    gpus: list[tuple[str, str]]


class Own(Change, frozen=True):
    """The process makes its arena memory its own. Reply: None."""


Operations = Lock | CheckpointProcess | RestoreProcess | Unlock
InSession = Wait | Blocks | Checksums | GiveUp | TakeBack | Own
_Processes = GetHost | State | Used | HoldThreads | SpareFromExit | Release | Holds
_Memory = Warm | Create | Drop | GetHeldMemory | CopyOut | CopyIn | BeginSession
ServiceRequest = Operations | InSession | _Processes | _Memory
Request = HelloHelper | ServiceRequest


# ---- replies


class Welcome(msgspec.Struct, frozen=True):
    """The helper answers HelloHelper with a Welcome. ``protocol``: the PROTOCOL that the helper
    speaks; the client raises Unreachable if it speaks another one. ``pid``: the process id of the
    helper, which that error names."""

    protocol: int
    pid: int


@dataclass(frozen=True)
class HostGpus:
    """A host's driver and GPUs at this moment."""

    cuda: tuple[int, int]
    """The newest CUDA that the driver supports, such as (13, 0)."""
    driver: str
    """The driver's version, such as "580.159.03"; "" if NVML does not report it."""
    gpus: tuple[NvmlGpu, ...]
    why_none: str | None
    """Why ``gpus`` is empty; None if it is not."""
    can_remap: bool
    """Whether a process can be restored onto other GPUs."""
    fast_path: str
    """"" if device memory can be handed over by descriptor, else why not."""
    sessions: str = ""
    """Why no process can have a device session, not even for checksums; "" if it can."""
