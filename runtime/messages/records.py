# SPDX-License-Identifier: Apache-2.0
"""Messages about jobs, hosts and moves. Bytes, seconds, seconds since the epoch."""

from __future__ import annotations

import msgspec

from .costs import Cost
from .gpus import GpuSeat
from .predictions import Prediction


class Phase(msgspec.Struct, frozen=True):
    """One row of a migration's table. ``frozen``: the job was paused meanwhile.

    ``start``: seconds since the migration began. ``bytes``: None if none were sent.
    """

    name: str
    start: float
    seconds: float
    bytes: int | None = None
    frozen: bool = False
    detail: str = ""


class Book(msgspec.Struct, frozen=True):
    """A job's address book: mobile address → (host name, epoch of that ownership).

    ``rewinds``: how often the job was rewound. A host never goes back to a lower number."""

    job: str
    vni: int
    subnet: str
    where: dict[str, tuple[str, int]]
    rewinds: int = 0


class CapsuleSpec(msgspec.Struct, frozen=True):
    """All that a host needs to start a capsule, or to build a sandbox for its restore."""

    name: str  # "gpt/1"
    job: str
    index: int
    argv: list[str]
    env: dict[str, str]
    cwd: str
    uid: int
    gid: int
    groups: list[int]
    hosts_file: str
    umask: int = -1  # as in RunJob


class CapsuleState(msgspec.Struct, frozen=True):
    """What an agent reports of a capsule in every heartbeat; bytes, and collectives per second.

    ``gpus``: UUIDs of the GPUs that its processes use, as far as NVML reports them, and
    ``device_memory`` the bytes that they have there.
    ``output_trouble``: which part of its output could not be kept, in words. ``rewinds``: how often
    its job had been rewound when this copy was made. ``unanswered``: by address of a peer of its
    job that answers nothing, the seconds for which it has not.
    """

    name: str
    epoch: int
    pids: int
    resident: int
    collectives: int
    rate: float
    ranks: list[int]
    command: str
    gpus: list[str] = msgspec.field(default_factory=list)
    output_trouble: str = ""
    rewinds: int = 0
    device_memory: int = 0
    unanswered: dict[str, float] = msgspec.field(default_factory=dict)


class HostFacts(msgspec.Struct, frozen=True):
    """The facts that decide whether a tree dumped on one host can run on another."""

    kernel: str
    machine: str
    cpu: str
    cpu_flags: list[str]
    criu: str
    liveshift: str


class CapsuleRow(msgspec.Struct, frozen=True):
    """``state``: starting, running, moving, ended, or unknown while its host is lost.

    ``rate``: collectives per second. ``resident``: bytes. ``output_trouble``: which part of its
    output could not be kept on its host, in words.
    """

    name: str
    index: int
    state: str
    host: str
    epoch: int
    address: str
    ranks: list[int]
    pids: int
    resident: int
    collectives: int
    rate: float
    code: int | None
    migration: str | None
    output_trouble: str = ""


NOT_YET = "no snapshot is complete yet"
"""Why a job that has only begun is not protected (ProtectionRow.why_not)."""


class ProtectionRow(msgspec.Struct, frozen=True):
    """The snapshots of a job. ``every``: seconds between two, 0 if none are taken; ``auto``: the
    orchestrator chooses them.

    ``newest``: the complete one, such as s17; empty if there is none. ``age``: seconds since its
    boundary. ``bytes``: memory that its images take, on all holders together. ``holders``: the
    hosts that keep them. ``pause_s``: how long the job was paused for it, 0 if that is not known.
    ``why_not``: why the job could not be taken back if a host died now, as text; else empty.
    ``trouble``: why there is no later snapshot, as text, if the last attempt failed or has to
    wait; else empty. ``silent``: if no host of the job is heard and one of them may be dead, which,
    since when, and what a person can do, as text; else empty. ``rewinding``: how far a rewind of
    the job is, or why a job that has lost something is not taken back yet, as text; else empty.

    ``rewind_s``: seconds that a rewind takes until the job runs again. It is what the last one took
    if ``rewind_measured``, else an estimate. ``failure_s``: what a host's death would cost now:
    those seconds, and ``age``, which is trained again. ``in_place``: the capsules that a rewind
    restores where they are, if their hosts live; ``sent``: those of them whose image comes from its
    holder, as their own host keeps no copy. ``would_wait``: which host's death would leave the
    job waiting, and for what, as text; else empty. ``directory``: where the images of a
    suspended job are saved; else empty. ``alone``: the hosts that have the only copy of
    some image of a suspended job. All these are only set with ``newest``.

    ``rewound_to``: the time of the boundary to which the job's last rewind led, in seconds since
    1970, 0 if there was none. ``repeated_s``: seconds of training that were repeated then.
    ``rewound_ago_s``: seconds since that rewind ended and the job ran again, 0 if there was none.

    ``mttf_s``: seconds until one of the job's hosts fails, on average; 0 if the interval does not
    follow from it. ``mttf_from``: where that comes from, as text: given in the cluster file,
    assumed, or learnt from what was seen. ``takes_s``: seconds from the beginning of a snapshot
    until it is complete, smoothed over those that were taken; 0 if it is not known. An interval
    that the orchestrator chooses is at least twice that.
    """

    every: float = 0.0
    newest: str = ""
    age: float = 0.0
    bytes: int = 0
    holders: list[str] = msgspec.field(default_factory=list)
    pause_s: float = 0.0
    why_not: str = ""
    auto: bool = False
    trouble: str = ""
    rewind_s: float = 0.0
    rewind_measured: bool = False
    failure_s: float = 0.0
    in_place: list[str] = msgspec.field(default_factory=list)
    would_wait: str = ""
    directory: str = ""
    sent: list[str] = msgspec.field(default_factory=list)
    rewound_to: float = 0.0
    repeated_s: float = 0.0
    rewound_ago_s: float = 0.0
    mttf_s: float = 0.0
    mttf_from: str = ""
    silent: str = ""
    rewinding: str = ""
    takes_s: float = 0.0
    alone: list[str] = msgspec.field(default_factory=list)


class JobRow(msgspec.Struct, frozen=True):
    """``state``: running, rewinding, suspended, ending or ended; ``rate``: that of its slowest
    capsule. ``command``: cut to 1,000 characters.

    ``protection``: its snapshots; None for a job that has ended."""

    name: str
    state: str
    command: str
    user: int
    started: float
    rate: float
    code: int | None
    capsules: list[CapsuleRow]
    protection: ProtectionRow | None = None


class DataLink(msgspec.Struct, frozen=True):
    """The interface that has a host's address and carries its images; "" for none.

    ``speed``: bit/s, 0 if it is not known. ``rates``: bytes per second last measured to other
    hosts, by name. ``warning``: what is wrong with it and what to do, in words, else "".
    """

    interface: str
    speed: int
    up: bool
    rates: dict[str, float]
    warning: str


class HostRow(msgspec.Struct, frozen=True):
    """``state``: up or lost. ``taint``: the reason, None when untainted. ``cordon``: who keeps new
    work away from it, None without a cordon.

    ``other_file``: its agent uses another cluster file than the orchestrator.
    """

    name: str
    address: str
    state: str
    spare: str
    slots: int
    used: int
    taint: str | None
    taint_by: str | None
    memory_free: int
    capsules: list[str]
    gpus: list[GpuSeat] = msgspec.field(default_factory=list)
    link: DataLink | None = None
    other_file: bool = False
    cordon: str | None = None


class Rounds(msgspec.Struct, frozen=True):
    """The progress of a pre-copy, as its source last reported it; bytes, bytes per second.

    ``bytes``: sent in all rounds. ``dirty``: the last set of bytes found written after they were
    sent. ``left``: the part of it that this round must still send. ``rate``: of the last second.
    ``best``: the rate at which a stop would send, because rounds are paced. ``slow_down``: the
    share by which the job is slower than before, None while not known. ``stop_s``: seconds for
    which the job would be frozen if it was stopped now, None while nothing shows how much it
    writes.
    """

    round: int
    bytes: int
    dirty: int
    left: int
    rate: float
    slow_down: float | None = None
    stop_s: float | None = None
    best: float = 0.0


class MigrationRow(msgspec.Struct, frozen=True):
    """A migration. ``state``: a Step's value. ``frozen_s``: how long the job was paused.

    ``kind``: move (from host to host) or swap. Source and destination of a swap are GPUs of one
    host (``h1 GPU 3``). ``precopy``: None if memory was not copied while the job trained, or not
    yet. ``predicted``: the pause that was expected just before the job was stopped, or, until then,
    before the move began; None without a prediction. ``cost``: None for a swap, and until it was
    measured, some seconds after the end.
    """

    name: str
    capsule: str
    source: str
    destination: str
    reason: str
    by: str
    epoch: int
    state: str
    asked: float
    seconds: float
    frozen_s: float
    image_bytes: int
    bytes: int
    expected_bytes: int
    link_rate: float
    phases: list[Phase]
    error: str | None
    hint: str | None
    kind: str = "move"
    precopy: Rounds | None = None
    predicted: Prediction | None = None
    cost: Cost | None = None


class UnknownRow(msgspec.Struct, frozen=True):
    """A capsule that a host runs and the journal does not have. ``resident``: bytes."""

    capsule: str
    host: str
    pids: int
    resident: int
    command: str


class Event(msgspec.Struct, frozen=True):
    """An event is one line of the cluster's history. Each has a higher ``number`` than those before
    it. ``subject``: a job, a capsule or a host; empty for the whole cluster. ``kind``: what
    happened, such as moved. ``by``: the person who asked for it; empty if no person did.
    ``migration``: the record of the migration to which it belongs; None if it belongs to none."""

    number: int
    time: float
    subject: str
    kind: str
    text: str
    by: str
    migration: MigrationRow | None
