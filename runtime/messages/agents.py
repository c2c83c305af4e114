# SPDX-License-Identifier: Apache-2.0
"""Messages between the orchestrator and the agents."""

from __future__ import annotations

import msgspec

from ...criu_glue.survey.found import Footprint, Survey
from .base import Answer, Message
from .gpus import GpuSeat, GpuSurvey
from .predictions import Chosen, Cores, Situation, Writing
from .records import Book, CapsuleSpec, CapsuleState, DataLink, HostFacts, Phase

# ---- orchestrator → agent ----------------------------------------------------------------------


class Start(Message, frozen=True):
    """Build a room and start the command; answers None."""

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
    """Remove what a job left on this host: rooms, directories, overlay; answers None."""

    job: str


class Locate(Message, frozen=True):
    """Enter an address book; entries of an epoch older than one known are dropped."""

    book: Book


class Inspect(Message, frozen=True):
    """Survey a capsule while it runs; answers Inspected. ``watch``: for a second also how much it
    writes."""

    capsule: str
    watch: bool = False


class Inspected(Answer, frozen=True):
    """``carried_bytes``: of the directories that go along, and of the output so far; ``gpu`` None:
    no process of it has to do with a GPU.

    ``writing``: None where it was not looked at what it writes;
    ``full_dump``: why its memory cannot be copied while it trains, in words, else empty;
    ``outside``: connections that the move breaks, each in words (criu_glue/survey/connections.py);
    ``cores``: how many cores of this host are idle.
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
    """Preflight at the destination, then (unless ``dry_run``) an empty room; answers Reserved.

    ``limit_bytes``: what may come in all for this migration; more is refused. ``gpus_wanted``:
    (GPU of the source, GPU here) that somebody has asked for; the others are chosen here.
    ``full_dump``: as in Inspected.
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


class Reserved(Answer, frozen=True):
    """``checks``: (what was checked, what was found) for the plan that --dry-run prints.

    ``gpus``: (GPU of the source, GPU here), for every GPU of the source; empty where the capsule
    holds none. ``plain``: why device memory can't be streamed to this host, in words, else empty.
    ``full_dump``: why this host can't take the capsule's own memory while it trains, else empty.
    ``cores``: how many cores of this host are idle.
    """

    checks: list[tuple[str, str]]
    endpoint: str
    gpus: list[tuple[str, str]] = msgspec.field(default_factory=list)
    plain: str = ""
    full_dump: str = ""
    cores: Cores | None = None


class Precopy(Message, frozen=True):
    """Open the wire and send directories, output and memory while the job runs, until what it
    rewrites meanwhile gets no less or ``deadline`` seconds are over; answers Moved.

    ``full_dump`` says why its memory can't go ahead, "" where it can. For a capsule with CUDA
    processes: ``plain`` says why its device memory can't be streamed to the destination, "" where
    it can; ``verify``: checksums over every byte of it. ``way``: precopy.way for this move.
    ``plan``: what the source chooses by, once it has measured the link; None: it makes rounds.
    ``max_pause``: seconds for which the way chosen may pause the job. ``within``: seconds until the
    host must be empty, and ``sooner``: those after which no further round begins for that; 0
    without a deadline.
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
    """The capsule's host must be empty sooner than was known when its move began. The source begins
    no further round of its pre-copy after ``sooner`` seconds. It answers None, also where no
    pre-copy is under way."""

    capsule: str
    sooner: float


class Freeze(Message, frozen=True):
    """Lock the network, freeze, dump into the wire; answers Frozen with the tree held frozen.

    ``deadline`` in seconds. On an error before the source has promised, the tasks run again and
    the network is open; after it the source waits for a ruling.
    """

    migration: str
    capsule: str
    deadline: float


class Moved(Answer, frozen=True):
    """``outside``: as in Inspected, at the end of a pre-copy; ``chosen``: the way that the source
    has chosen for memory, None where it had no choice."""

    bytes: int
    phases: list[Phase]
    outside: list[str] = msgspec.field(default_factory=list)
    chosen: Chosen | None = None


class Frozen(Answer, frozen=True):
    """The image is complete at the destination, and the source waits for a ruling."""

    image_bytes: int
    phases: list[Phase]


class Restore(Message, frozen=True):
    """Restore into the reserved room under ``epoch``; answers Moved once it runs.

    The agent asks (Claim) before the tree runs. StepFailed: nothing runs or ran here, and nothing
    will before the agent was told to restore again. Repeatable: one that runs already is as good.
    """

    migration: str
    capsule: str
    epoch: int
    deadline: float


class Forward(Message, frozen=True):
    """Send a complete image, which could not be restored here, on to another spare, which has
    reserved a room; answers Frozen without phases."""

    migration: str
    capsule: str
    destination: str
    endpoint: str


class Resume(Message, frozen=True):
    """Wait for a sign of the capsule's progress after its restore: its first collective or, where
    these are rare, time on a core; answers Moved (bytes 0)."""

    capsule: str
    deadline: float


class Settle(Message, frozen=True):
    """Ask now (Claim) what becomes of whatever you hold of a migration; answers Settled."""

    migration: str
    capsule: str


class Settled(Answer, frozen=True):
    """``state``: runs; ended (by itself, or by the ruling); held (the ruling was to wait, or it is
    being worked on); nothing: the capsule is not here, or only what is left of a held one that was
    killed."""

    state: str


class LookAtGpus(Message, frozen=True):
    """What it would be to bring a capsule from one GPU of its host to another; nothing is changed.
    Answers SwapPlan.

    ``to``: the GPU to go to, ``leave``: the one to leave, each an index or the beginning of a
    UUID; ``leave`` empty: the only one that the capsule uses.
    """

    capsule: str
    to: str
    leave: str


class SwapPlan(Answer, frozen=True):
    """``leave`` and ``to``: the GPUs in words, such as ``GPU 3``; ``pairs``: (old UUID, new UUID)
    of every GPU of the host; ``pids``: the processes that use the one to leave, as inside;
    ``bytes`` of device memory that would change places."""

    leave: str
    to: str
    pairs: list[tuple[str, str]]
    pids: list[int]
    bytes: int
    checks: list[tuple[str, str]]


class SwapGpu(Message, frozen=True):
    """Bring the device state of some processes of a capsule, whose job is at a boundary, onto
    other GPUs of its host; answers Moved (bytes 0) once they run there.

    ``pairs`` and ``pids`` as in SwapPlan; ``deadline`` in seconds: what is on its way then goes
    back to where it was. An error does not say on which GPU the capsule is: SettleSwap does.
    Never done twice, nor after it was settled. ``verify`` as in Precopy.
    """

    migration: str
    capsule: str
    pairs: list[tuple[str, str]]
    pids: list[int]
    deadline: float
    verify: bool = False


class SettleSwap(Message, frozen=True):
    """What became of a swap, after what is under way of it; answers SwapSettled. One that has not
    begun never will."""

    migration: str
    capsule: str


class SwapSettled(Answer, frozen=True):
    """``state``: swapped (it runs on the other GPU), stays (it runs on the old one), lost (its
    device state is, so it was ended), gone (it has ended by itself, or is not here), held (not
    known yet). ``why`` it is not swapped, in words."""

    state: str
    why: str


class Progress(Message, frozen=True):
    """How much of a migration's image is here; answers Arrived. ``close``: take nothing more.

    ``stop``: bytes of memory for which the destination makes room, as all of them come at the
    standstill.
    """

    migration: str
    close: bool = False
    stop: int = 0


class Arrived(Answer, frozen=True):
    """``complete``: all of the image is here, so the source has promised to wait.

    ``placed``: bytes of cold memory that wait where the restored processes will have them;
    ``placing``: there is more to put there, or the destination still makes room.
    """

    bytes: int
    image_bytes: int
    complete: bool
    placed: int = 0
    placing: bool = False


# ---- agent → orchestrator ----------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First word of an agent on every connection; answers the books it must enter (Books).

    ``epochs``: what is here, running or held; a capsule that its owner lacks is lost. ``life``
    names this run of the agent: with another one, asks to the one before are lost. ``ended``: the
    codes of those of them whose commands have ended.
    """

    host: str
    facts: HostFacts
    epochs: dict[str, int]
    digest: str
    life: str = ""
    ended: dict[str, int] = msgspec.field(default_factory=dict)


class Books(Answer, frozen=True):
    books: list[Book]


class Claim(Message, frozen=True):
    """May the copy that is held for a migration run? Answers Ruled.

    ``side``: leaving or coming (ownership.Side); ``epoch``: the one it was frozen under, or is
    to run under; ``ready``: it would run at once, otherwise the ruling is never to run.
    """

    migration: str
    capsule: str
    side: str
    epoch: int
    ready: bool


class Ruled(Answer, frozen=True):
    """``ruling``: wait, run or end (ownership.Ruling); ``epoch``: the owner's."""

    ruling: str
    epoch: int


class Beat(Message, frozen=True):
    """Sign of life; memory in bytes; answers None."""

    host: str
    memory_free: int
    capsules: list[CapsuleState]
    gpus: list[GpuSeat] = msgspec.field(default_factory=list)
    link: DataLink | None = None


class Progressed(Message, frozen=True):
    """How far the pre-copy of a migration's memory is, a few times a second; answers None. One
    that is lost does no harm: each says all. Fields as in Rounds.

    ``delta_s``: seconds that sending what would be left over at a stop would take, None while
    that is not known; the orchestrator knows what a stop takes besides.
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


class Ended(Message, frozen=True):
    """A capsule's command has ended: exit code, or 128 + signal; answers None."""

    capsule: str
    epoch: int
    code: int


class Relay(Message, frozen=True):
    """A request that came in on an agent's local socket, with the caller's uid."""

    uid: int
    request: bytes
