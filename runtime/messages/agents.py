# SPDX-License-Identifier: Apache-2.0
"""Messages between the orchestrator and the agents."""

from __future__ import annotations

import msgspec

from ...criu_glue.survey.found import Footprint, Survey
from .base import Answer, Message
from .gpus import DeviceError, GpuSeat, GpuSurvey
from .predictions import Chosen, Cores, Situation, Writing
from .records import Book, CapsuleSpec, CapsuleState, DataLink, HostFacts, Phase

# ---- orchestrator → agent ----------------------------------------------------------------------


class Start(Message, frozen=True):
    """Build a sandbox and start the command; answers None."""

    spec: CapsuleSpec
    book: Book
    epoch: int


class Signal(Message, frozen=True):
    """Send a signal to a capsule's command; answers None."""

    capsule: str
    signum: int


class End(Message, frozen=True):
    """Kill a capsule that is here under ``epoch``, and everything in it; answers None."""

    capsule: str
    epoch: int


class Forget(Message, frozen=True):
    """Remove what a job left on this host: sandboxes, directories, overlay; answers None."""

    job: str


class Locate(Message, frozen=True):
    """Enter an address book; entries with an epoch older than the known one are dropped."""

    book: Book


class TryHosts(Message, frozen=True):
    """Try to connect to the kernels of other hosts, for ``limit`` seconds; answers HostsReached."""

    hosts: list[str]
    limit: float


class HostsReached(Answer, frozen=True):
    """Which hosts have accepted or refused a TCP connection from this one."""

    hosts: list[str]


class Inspect(Message, frozen=True):
    """Survey a capsule while it runs; answers Inspected. ``watch``: also measure for one second
    how much it writes. ``snapshot``: for a snapshot, which has no full dump to fall back on."""

    capsule: str
    watch: bool = False
    snapshot: bool = False


class Inspected(Answer, frozen=True):
    """What the source found in its survey of a capsule.

    ``carried_bytes``: size of the directories that go along, and of the output so far. ``gpu``:
    None if no process of the capsule uses a GPU. ``writing``: None if there was no look at what the
    capsule writes. ``full_dump``: why its memory cannot be copied while it trains, in words, else
    empty. ``outside``: connections that the move breaks, each in words
    (criu_glue/survey/connections.py). ``cores``: how many cores of this host are idle.
    """

    survey: Survey
    facts: HostFacts
    carried_bytes: int
    gpu: GpuSurvey | None = None
    footprint: Footprint | None = None
    writing: Writing | None = None
    full_dump: str = ""
    outside: list[str] = msgspec.field(default_factory=list)
    cores: Cores | None = None


class Reserve(Message, frozen=True):
    """Preflight at the destination, then (unless ``dry_run``) an empty sandbox; answers Reserved.

    ``limit_bytes``: the destination takes at most so many bytes for this migration.
    ``gpus_wanted``: the (GPU of the source, GPU here) pairs that a person asked for; this host
    chooses the others. ``full_dump``: as in Inspected. ``dumped_under``: the epoch of the
    capsule at the snapshot to which it goes back; 0 in a migration.
    """

    migration: str
    spec: CapsuleSpec
    survey: Survey
    facts: HostFacts
    source: str
    epoch: int
    book: Book
    limit_bytes: int
    dry_run: bool
    gpu: GpuSurvey | None = None
    gpus_wanted: list[tuple[str, str]] = msgspec.field(default_factory=list)
    full_dump: str = ""
    dumped_under: int = 0


class Reserved(Answer, frozen=True):
    """What the destination found. ``checks``: (check, result) rows for the plan of --dry-run.

    ``gpus``: (GPU of the source, GPU here), for every GPU of the source; empty if the capsule
    holds none. ``plain``: why device memory cannot be streamed to this host, in words, else empty.
    ``full_dump``: why this host cannot take memory of the capsule while it trains, else empty.
    ``cores``: how many cores of this host are idle. ``warnings``: which versions here may make the
    restore fail, for the history; ``checks`` has them too.
    """

    checks: list[tuple[str, str]]
    endpoint: str
    gpus: list[tuple[str, str]] = msgspec.field(default_factory=list)
    plain: str = ""
    full_dump: str = ""
    cores: Cores | None = None
    warnings: list[str] = msgspec.field(default_factory=list)


class StartPrecopy(Message, frozen=True):
    """Open the wire, and send directories, output and memory while the job runs; answers Moved.

    It ends when the memory that the job rewrites meanwhile gets no less, or after ``deadline``
    seconds. ``full_dump``: why memory cannot go ahead, "" if it can. For a capsule with CUDA
    processes: ``plain`` says why its device memory cannot be streamed to the destination, "" if it
    can; ``verify`` orders checksums over every byte of it. ``way``: precopy.way for this move.
    ``plan``: the source chooses the way by it, once it has measured the link; None: it makes
    rounds. ``max_pause``: seconds for which the chosen way may pause the job. ``within``: seconds
    until the host must be empty. ``sooner``: for that deadline all rounds but the first end after
    so many seconds. Both are 0 without a deadline.
    """

    migration: str
    capsule: str
    destination: str
    endpoint: str
    deadline: float
    plain: str = ""
    verify: bool = False
    full_dump: str = ""
    way: str = "auto"
    plan: Situation | None = None
    max_pause: float = 0.0
    within: float = 0.0
    sooner: float = 0.0


class EndSooner(Message, frozen=True):
    """A capsule's host must be empty sooner than was known when its move began. The source ends
    the rounds of its pre-copy after ``sooner`` seconds, but finishes the first one. It answers
    None, even if no pre-copy is under way."""

    capsule: str
    sooner: float


class Freeze(Message, frozen=True):
    """Lock the network, freeze, dump into the wire; answers Frozen with the tree held frozen.

    ``deadline``: in seconds. If the source fails before it has promised, the tasks run again and
    the network is open. After the promise the source waits for a ruling.
    """

    migration: str
    capsule: str
    deadline: float


class Moved(Answer, frozen=True):
    """A step of a move is done.

    ``outside``: as in Inspected, at the end of a pre-copy. ``chosen``: the way that the source has
    chosen for memory; None if it had no choice.
    """

    bytes: int
    phases: list[Phase]
    outside: list[str] = msgspec.field(default_factory=list)
    chosen: Chosen | None = None


class Frozen(Answer, frozen=True):
    """The image is complete at the destination, and the source waits for a ruling.

    As the answer to DumpCapsule: it is at the holder, and the source waits for nothing."""

    image_bytes: int
    phases: list[Phase]


class RestoreCapsule(Message, frozen=True):
    """Restore into the reserved sandbox under ``epoch``; answers Moved once the capsule runs.

    The agent asks (Claim) before the tree runs. StepFailed means: nothing runs or has run here,
    and nothing will run before another RestoreCapsule. It may be repeated: if the capsule runs
    already, the agent answers Moved.

    ``hold``: if gates that came closed with the capsule are not opened within so many seconds, the
    agent opens them.
    """

    migration: str
    capsule: str
    epoch: int
    deadline: float
    hold: float


class Forward(Message, frozen=True):
    """Send a complete image that could not be restored here to another spare, which has reserved a
    sandbox; answers Frozen without phases."""

    migration: str
    capsule: str
    destination: str
    endpoint: str


class Resume(Message, frozen=True):
    """Wait for a sign that the capsule makes progress after its restore; answers Moved (bytes 0).

    The sign is its first collective or, where collectives are rare, time on a core.
    """

    capsule: str
    deadline: float


class Settle(Message, frozen=True):
    """Ask now (Claim) about all that this host holds of a migration; answers Settled."""

    migration: str
    capsule: str


class Settled(Answer, frozen=True):
    """What became of a copy. ``state`` is one of:

    runs; ended (by itself, or by the ruling); held (the ruling was to wait, or work on it goes
    on); nothing (the capsule is not here, or only remains of a held one that was killed).
    """

    state: str


class LookAtGpus(Message, frozen=True):
    """Look what a move of a capsule to another GPU of its host would be; answers SwapPlan.

    Nothing is changed. ``to``: the GPU to go to. ``leave``: the GPU to leave; empty: the only one
    that the capsule uses. Each is an index or the beginning of a UUID.
    """

    capsule: str
    to: str
    leave: str


class SwapPlan(Answer, frozen=True):
    """What a swap would do.

    ``leave`` and ``to``: the GPUs in words, such as ``GPU 3``. ``pairs``: (old UUID, new UUID) of
    every GPU of the host. ``pids``: the processes that use the GPU to leave, by their pids inside
    the capsule. ``bytes``: device memory that would move.
    """

    leave: str
    to: str
    pairs: list[tuple[str, str]]
    pids: list[int]
    bytes: int
    checks: list[tuple[str, str]]


class SwapGpu(Message, frozen=True):
    """Move the device state of some processes of a capsule to other GPUs of its host; answers
    Moved (bytes 0) once they run there. The job is at a boundary.

    ``pairs``, ``pids``: as in SwapPlan. ``deadline``: after so many seconds an unfinished swap goes
    back. An error does not say on which GPU the capsule is; SettleSwap does. The agent never does
    it twice, and never after SettleSwap. ``verify``: as in StartPrecopy.
    """

    migration: str
    capsule: str
    pairs: list[tuple[str, str]]
    pids: list[int]
    deadline: float
    verify: bool = False


class SettleSwap(Message, frozen=True):
    """Ask what became of a swap, once it has ended here; answers SwapSettled. A swap that has not
    begun never will."""

    migration: str
    capsule: str


class SwapSettled(Answer, frozen=True):
    """``state``: swapped (the capsule runs on the other GPU), stays (it runs on the old one), lost
    (its device state is lost, so it was ended), gone (it has ended by itself, or is not here), held
    (not known yet). ``why``: why it is not swapped, in words."""

    state: str
    why: str


class Progress(Message, frozen=True):
    """How much of a migration's image is here; answers Arrived. ``close``: take nothing more.

    ``stop``: bytes of memory that come during the freeze, for which the destination frees memory.
    """

    migration: str
    close: bool = False
    stop: int = 0


class Arrived(Answer, frozen=True):
    """``complete``: the whole image is here, so the source has promised to wait.

    ``placed``: bytes of cold memory that are already in the sandbox for the restored processes.
    ``placing``: there is more to place, or the destination still frees memory.
    """

    bytes: int
    image_bytes: int
    complete: bool
    placed: int = 0
    placing: bool = False


# ---- agent → orchestrator ----------------------------------------------------------------------


class Register(Message, frozen=True):
    """An agent's first message on every connection; answers the address books to enter (Books).

    ``epochs``: the capsules here, running or held; a capsule that its owner lacks is lost.
    ``boot_id`` names this run of the agent; requests to an earlier run are lost. ``ended``: the
    exit codes of those capsules whose commands have ended. ``rewinds``: how often each job was
    rewound, as far as this host knows; a job that it does not name was never. ``held``: the names
    of the images of snapshots that are here; a host that was switched off has lost them.
    """

    host: str
    facts: HostFacts
    epochs: dict[str, int]
    digest: str
    boot_id: str = ""
    ended: dict[str, int] = msgspec.field(default_factory=dict)
    rewinds: dict[str, int] = msgspec.field(default_factory=dict)
    held: list[str] = msgspec.field(default_factory=list)


class Books(Answer, frozen=True):
    """The orchestrator answers Register with it. ``books``: the address book of each job that has
    not ended. The agent enters these books, and removes what it has of jobs that are not named and
    do not run there."""

    books: list[Book]


class Claim(Message, frozen=True):
    """May the copy that is held for a migration or a rewind run? Answers Ruled.

    ``side``: leaving or coming (ownership.Side), or held, for an image of a snapshot, which
    ``migration`` then names. ``epoch``: the copy was frozen under it, or must run under it.
    ``ready``: the copy can run at once; otherwise the ruling is never to run. ``rewinds``: how
    often the job had been rewound when the copy was made.
    """

    migration: str
    capsule: str
    side: str
    epoch: int
    ready: bool
    rewinds: int = 0


class Ruled(Answer, frozen=True):
    """``ruling``: wait, run or end (ownership.Ruling). ``epoch``: the owner's."""

    ruling: str
    epoch: int


class Heartbeat(Message, frozen=True):
    """An agent's heartbeat; answers None. ``memory_free``: bytes for capsules that come.
    ``memory_left``: the share of the host's memory that is available, 0 to 1. ``device_errors``:
    those of this host's GPUs in the last ``timeouts.fault`` + LAUNCHER_S seconds."""

    host: str
    memory_free: int
    capsules: list[CapsuleState]
    gpus: list[GpuSeat] = msgspec.field(default_factory=list)
    link: DataLink | None = None
    memory_left: float = 1.0
    device_errors: list[DeviceError] = msgspec.field(default_factory=list)


class Progressed(Message, frozen=True):
    """The progress of a migration's pre-copy, sent a few times a second; answers None. Each message
    is complete, so a lost one does no harm. Fields as in Rounds.

    ``delta_s``: seconds to send the memory that a stop would leave; None while that is not known.
    The orchestrator knows what a stop takes in addition.
    """

    migration: str
    round: int
    bytes: int
    dirty: int
    left: int
    rate: float
    slow_down: float | None = None
    delta_s: float | None = None
    best: float = 0.0


class CapsuleEnded(Message, frozen=True):
    """A capsule's command has ended: exit code, or 128 + signal; answers None.

    ``signal``: the signal that has ended a rank below the command, which then failed; 0 if none is
    known. ``collectives``: how many the rank had finished that ended first; 0 if not known.
    ``found_dead``: nothing was left of it when this agent started, and it had written no exit code.
    ``rebooted``: that was because its host has been booted since. ``ago_s``: seconds since the
    command ended, or since that rank did; 0 if that is not known.
    """

    capsule: str
    epoch: int
    code: int
    signal: int = 0
    collectives: int = 0
    found_dead: bool = False
    rebooted: bool = False
    ago_s: float = 0.0


class Relay(Message, frozen=True):
    """A request from an agent's local socket, with the caller's uid."""

    uid: int
    request: bytes
