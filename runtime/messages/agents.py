# SPDX-License-Identifier: Apache-2.0
"""Messages between the orchestrator and the agents."""

from __future__ import annotations

from ...criu_glue.survey import Survey
from .base import Answer, Message
from .records import Book, CapsuleSpec, CapsuleState, HostFacts, Phase

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


class Inspected(Answer, frozen=True):
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


class Reserved(Answer, frozen=True):
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


class Moved(Answer, frozen=True):
    bytes: int
    phases: list[Phase]


class Frozen(Answer, frozen=True):
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
    """First word of an agent on every connection; answers the books it must enter (Books).

    ``life`` names this run of the agent: with another one, asks to the one before are lost.
    """

    host: str
    facts: HostFacts
    epochs: dict[str, int]
    digest: str
    life: str = ""


class Books(Answer, frozen=True):
    """``arriving``: the migrations under way to this host; a room for another one is left over."""

    books: list[Book]
    arriving: list[str]


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
