# SPDX-License-Identifier: Apache-2.0
"""Every message that crosses a socket, and the one encode and decode for all of them.

How a planned migration flows (data goes source agent → destination agent, nothing else does):

A. orchestrator → source       ``Inspect``      what the capsule consists of, what stands in the way
B. orchestrator → destination  ``Reserve``      preflight; an empty, locked room; an inbox
C. orchestrator → source       ``Precopy``      directories and output so far, while training runs
D. orchestrator → source       ``Freeze``       network locked, dumped into the wire, held frozen
E. orchestrator: the journal   ``commit``       the destination owns epoch + 1 from here on
F. orchestrator → everyone     ``Locate``       the address book with the new epoch
G. orchestrator → destination  ``Restore``      CRIU restores, the hook opens the network
H. orchestrator → source       ``Finish``       the frozen copy ends, its room goes
   Before E a failure means ``Thaw`` at the source and ``Discard`` at the destination; after E
   the destination discards, E is done again for the source with epoch + 2, then ``Thaw``.

A frame is MessagePack: ``{"v": VERSION, "id": n, "body": {"t": tag, …}}`` asks, the same with
``"ok"`` answers, with ``"error": [kind, message, hint]`` refuses. Tags are the class names.
Bump VERSION when a field changes its meaning or a required field is added; adding a message or
an optional field needs no bump. Peers of different versions turn each other away, saying both.
"""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec

from ..criu_glue.survey import Survey
from ..errors import LiveshiftError

VERSION = 1


class Message(msgspec.Struct, frozen=True, tag_field="t", tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag is the class name."""


# ---- what is said about jobs, hosts and moves --------------------------------------------------


class Phase(msgspec.Struct, frozen=True):
    """One row of a migration's table. ``frozen``: the job stood still meanwhile.

    ``start`` is in seconds since the migration began; ``bytes`` None where none moved.
    """

    name: str
    start: float
    seconds: float
    bytes: int | None = None
    frozen: bool = False
    detail: str = ""


class Book(msgspec.Struct, frozen=True):
    """A job's address book: mobile address → (host name, epoch of that ownership)."""

    job: str
    vni: int
    subnet: str
    where: dict[str, tuple[str, int]]


class CapsuleSpec(msgspec.Struct, frozen=True):
    """All that a host needs to start a capsule, or to build the room it is restored into."""

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


class CapsuleState(msgspec.Struct, frozen=True):
    """What an agent reports of a capsule with every beat; bytes and collectives per second."""

    name: str
    epoch: int
    pids: int
    resident: int
    collectives: int
    rate: float
    ranks: list[int]
    command: str


class HostFacts(msgspec.Struct, frozen=True):
    """What decides whether a tree dumped on one host can run on another."""

    kernel: str
    machine: str
    cpu: str
    cpu_flags: list[str]
    criu: str
    liveshift: str


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
    """Kill a capsule and everything in it; answers None."""

    capsule: str


class Forget(Message, frozen=True):
    """Remove what a job left on this host: rooms, directories, overlay; answers None."""

    job: str


class Locate(Message, frozen=True):
    """Enter an address book; entries of an epoch older than one known are dropped."""

    book: Book


class Inspect(Message, frozen=True):
    """Survey a capsule while it runs; answers Inspected."""

    capsule: str


class Inspected(Message, frozen=True):
    survey: Survey
    facts: HostFacts
    carried_bytes: int


class Reserve(Message, frozen=True):
    """Preflight at the destination, then (unless ``dry_run``) an empty room; answers Reserved."""

    migration: str
    spec: CapsuleSpec
    survey: Survey
    facts: HostFacts
    source: str
    epoch: int
    book: Book
    dry_run: bool


class Reserved(Message, frozen=True):
    """``checks``: (what was checked, what was found) for the plan that --dry-run prints."""

    checks: list[tuple[str, str]]
    endpoint: str


class Precopy(Message, frozen=True):
    """Open the wire and send directories and output while the job runs; answers Moved."""

    migration: str
    capsule: str
    destination: str
    endpoint: str


class Freeze(Message, frozen=True):
    """Lock the network, freeze, dump into the wire; answers Frozen with the tree held frozen.

    On an error the tasks run again and the network is open.
    """

    migration: str
    capsule: str
    deadline: float


class Moved(Message, frozen=True):
    bytes: int
    phases: list[Phase]


class Frozen(Message, frozen=True):
    """What lies at the destination: bytes by stream, and the dumped tree's pipes by inode."""

    image_bytes: int
    streams: dict[str, int]
    pipes: dict[int, int]
    removed: dict[str, list[str]]
    phases: list[Phase]


class Restore(Message, frozen=True):
    """Restore into the reserved room; answers Moved. On an error nothing runs here."""

    migration: str
    epoch: int
    frozen: Frozen
    deadline: float


class Resume(Message, frozen=True):
    """Wait for the capsule's first collective after its restore; answers Moved (bytes 0)."""

    capsule: str
    deadline: float


class Thaw(Message, frozen=True):
    """Let the held tree go on here under ``epoch``, network open; answers None. Repeatable."""

    migration: str
    capsule: str
    epoch: int


class Discard(Message, frozen=True):
    """Drop the reserved room and the image; answers None. Repeatable."""

    migration: str
    capsule: str


class Finish(Message, frozen=True):
    """Kill the held tree and remove its room; answers None. Repeatable."""

    migration: str
    capsule: str


class Progress(Message, frozen=True):
    """Bytes received so far for a migration; answers Moved without phases."""

    migration: str


# ---- agent → orchestrator ----------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First word of an agent on every connection; answers the books it must enter (Books)."""

    host: str
    facts: HostFacts
    epochs: dict[str, int]
    digest: str


class Books(Message, frozen=True):
    books: list[Book]


class Beat(Message, frozen=True):
    """Sign of life; memory in bytes; answers None."""

    host: str
    memory_free: int
    capsules: list[CapsuleState]


class Ended(Message, frozen=True):
    """A capsule's command has ended: exit code, or 128 + signal; answers None."""

    capsule: str
    epoch: int
    code: int


class Relay(Message, frozen=True):
    """A request that came in on an agent's local socket, with the caller's uid."""

    uid: int
    request: bytes


# ---- CLI → local socket ------------------------------------------------------------------------


class Run(Message, frozen=True):
    """Start a job of ``nnodes`` capsules; answers Named. An empty name asks for one."""

    name: str
    nnodes: int
    argv: list[str]
    env: dict[str, str]
    cwd: str
    gid: int
    groups: list[int]


class Named(Message, frozen=True):
    name: str


class GetStatus(Message, frozen=True):
    """Answers Status."""


class CapsuleRow(msgspec.Struct, frozen=True):
    """``state``: starting, running, moving, ended, or unknown while its host is lost.

    ``rate`` is in collectives per second, ``resident`` in bytes.
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


class JobRow(msgspec.Struct, frozen=True):
    """``state``: running, ending or ended; ``rate``: that of its slowest capsule."""

    name: str
    state: str
    command: str
    user: int
    started: float
    rate: float
    code: int | None
    capsules: list[CapsuleRow]


class HostRow(msgspec.Struct, frozen=True):
    """``state``: up or lost; ``taint``: the reason, None when untainted."""

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


class Status(Message, frozen=True):
    cluster: str
    time: float
    jobs: list[JobRow]
    hosts: list[HostRow]
    moving: list[MigrationRow]


class MigrationRow(msgspec.Struct, frozen=True):
    """A migration; ``state`` is a Step's value; ``frozen_s`` is how long the job stood still."""

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


class SetTaint(Message, frozen=True):
    """Taint a host, so that everything on it moves away; answers None."""

    host: str
    reason: str


class Untaint(Message, frozen=True):
    """Take a host's taint away; running migrations end as they would; answers None."""

    host: str


class Migrate(Message, frozen=True):
    """Move one capsule; ``to`` empty picks a spare; answers Planned, or Named when it began."""

    capsule: str
    to: str
    reason: str
    dry_run: bool


class Planned(Message, frozen=True):
    """What --dry-run prints: (what, found) rows, estimates in bytes."""

    capsule: str
    source: str
    destination: str
    checks: list[tuple[str, str]]
    image_bytes: int
    carried_bytes: int


class GetMigration(Message, frozen=True):
    """Answers Migration."""

    name: str


class Migration(Message, frozen=True):
    row: MigrationRow


class ReadOutput(Message, frozen=True):
    """Output records of a capsule from ``offset`` on; waits up to ``wait`` s; answers Output."""

    capsule: str
    offset: int
    wait: float


class Output(Message, frozen=True):
    """Raw records (criu_glue/output.py); ``code`` is set with the last ones of an ended capsule."""

    data: bytes
    next: int
    code: int | None


class SignalJob(Message, frozen=True):
    """Send a signal to every capsule's command of a job; answers None."""

    job: str
    signum: int


class GetEvents(Message, frozen=True):
    """Answers Events, oldest first; ``subject`` empty for all, else a job, capsule or host."""

    subject: str
    after: int


class Event(msgspec.Struct, frozen=True):
    number: int
    time: float
    subject: str
    kind: str
    text: str
    by: str
    migration: MigrationRow | None


class Events(Message, frozen=True):
    events: list[Event]


ASKS = (
    Start | Signal | End | Forget | Locate | Inspect | Reserve | Precopy | Freeze | Restore
    | Resume | Thaw | Discard | Finish | Progress
    | Hello | Beat | Ended | Relay
    | Run | GetStatus | SetTaint | Untaint | Migrate | GetMigration | ReadOutput | SignalJob
    | GetEvents
)  # fmt: skip
ANSWERS = (
    Inspected | Reserved | Moved | Frozen | Books | Named | Status | Planned | Migration | Output
    | Events
)  # fmt: skip

Ask = Message
Answer = Message | None


class Frame(msgspec.Struct, frozen=True):
    """One decoded frame: exactly one of ``body`` (an ask), ``answer`` and ``error`` counts."""

    id: int
    body: Message | None
    answer: Message | None
    error: tuple[str, str, str | None] | None


def encode_ask(number: int, body: Message) -> bytes:
    return _pack(
        {"v": VERSION, "id": number, "body": msgspec.to_builtins(body, builtin_types=(bytes,))}
    )


def encode_answer(number: int, answer: Message | None) -> bytes:
    ok = msgspec.to_builtins(answer, builtin_types=(bytes,))
    return _pack({"v": VERSION, "id": number, "ok": ok})


def encode_error(number: int, error: tuple[str, str, str | None]) -> bytes:
    return _pack({"v": VERSION, "id": number, "error": list(error)})


def decode(raw: bytes | memoryview) -> Frame:
    """Take a frame apart; raises LiveshiftError naming the value that is wrong."""
    try:
        frame: Any = msgpack.unpackb(raw, strict_map_key=False)
        if frame["v"] != VERSION:
            raise LiveshiftError(
                f"the peer speaks protocol version {frame['v']}, this is version {VERSION}",
                hint="run the same version of liveshift on every host",
            )
        number = int(frame["id"])
        if "body" in frame:
            return Frame(number, msgspec.convert(frame["body"], ASKS), None, None)
        if "error" in frame:
            kind, message, hint = frame["error"]
            return Frame(number, None, None, (str(kind), str(message), hint))
        answer = None if frame["ok"] is None else msgspec.convert(frame["ok"], ANSWERS)
        return Frame(number, None, answer, None)
    except (msgspec.ValidationError, msgpack.UnpackException, KeyError, TypeError, ValueError) as e:
        raise LiveshiftError(f"a peer sent a message that is not understood: {e}") from e


def _pack(frame: dict[str, Any]) -> bytes:
    return bytes(msgpack.packb(frame, use_bin_type=True))
