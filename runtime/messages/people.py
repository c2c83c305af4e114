# SPDX-License-Identifier: Apache-2.0
"""Messages between the command line and a daemon: over its local socket, or with an operator's key
to the orchestrator itself."""

from __future__ import annotations

from ...interposer.inspection import ProcessState
from .base import Answer, Message
from .predictions import Prediction
from .records import Event, HostRow, JobRow, MigrationRow


class Run(Message, frozen=True):
    """Start a job of ``nnodes`` capsules; answers Named. An empty name asks for one.

    ``collective``: after how many seconds its ranks give up waiting for each other; 0 for the
    cluster file's ``timeouts.collective``.
    """

    name: str
    nnodes: int
    argv: list[str]
    env: dict[str, str]
    cwd: str
    gid: int
    groups: list[int]
    collective: float = 0.0


class Named(Answer, frozen=True):
    name: str


class GetStatus(Message, frozen=True):
    """Answers Status."""


class Status(Answer, frozen=True):
    cluster: str
    time: float
    jobs: list[JobRow]
    hosts: list[HostRow]
    moving: list[MigrationRow]


class SetTaint(Message, frozen=True):
    """Taint a host, so that everything on it moves away; answers None."""

    host: str
    reason: str


class Untaint(Message, frozen=True):
    """Take a host's taint away; running migrations end as they would; answers None."""

    host: str


class Migrate(Message, frozen=True):
    """Move one capsule; ``to`` empty picks a spare; answers Planned, or Named when it began.

    ``to_gpu`` given: to that GPU of ``HOST/GPU``, or with just ``GPU`` of the host that it is on;
    an index or the beginning of a UUID. ``from_gpu``: which one to leave, if it uses several.
    ``verify``: compare every byte of device memory after it, whatever the cluster file says.
    """

    capsule: str
    to: str
    reason: str
    dry_run: bool
    to_gpu: str = ""
    from_gpu: str = ""
    verify: bool = False


class Planned(Answer, frozen=True):
    """What --dry-run prints: (what, found) rows, estimates in bytes; those of an image are 0 where
    a move makes none, and so is ``prediction`` None where nothing is known of its standstill."""

    capsule: str
    source: str
    destination: str
    checks: list[tuple[str, str]]
    image_bytes: int
    carried_bytes: int
    prediction: Prediction | None = None


class GetMigration(Message, frozen=True):
    """Answers Migration."""

    name: str


class Migration(Answer, frozen=True):
    row: MigrationRow


class ReadOutput(Message, frozen=True):
    """Output records of a capsule from ``offset`` on; waits up to ``wait`` s; answers Output."""

    capsule: str
    offset: int
    wait: float


class Output(Answer, frozen=True):
    """Raw records (criu_glue/output.py); ``code`` is set with the last ones of an ended capsule."""

    data: bytes
    next: int
    code: int | None


class GetInspection(Message, frozen=True):
    """What a capsule's processes hold of GPUs and of their peers, now; answers Inspection."""

    capsule: str


class Inspection(Answer, frozen=True):
    """Processes with a page of the interposer that live, by pid."""

    capsule: str
    host: str
    processes: list[ProcessState]


class SignalJob(Message, frozen=True):
    """Send a signal to every capsule's command of a job; answers None."""

    job: str
    signum: int


class GetEvents(Message, frozen=True):
    """Answers Events, oldest first; ``subject`` empty for all, else a job, capsule or host."""

    subject: str
    after: int


class Events(Answer, frozen=True):
    events: list[Event]


class WhoAmI(Message, frozen=True):
    """Answers Me."""


class Me(Answer, frozen=True):
    """Who asks, as the orchestrator sees it; ``uid`` is None for an operator's key.

    ``why``: where the role comes from; ``through``: the host whose agent passed the ask on, empty
    for none; ``may``: what all that allows, in words.
    """

    name: str
    role: str
    why: str
    uid: int | None
    through: str
    cluster: str
    may: list[str]


class Here(Message, frozen=True):
    """First word on every connection over TCP; answers There. ``life``: which run of a program
    speaks; asks on their way are sent again to the same one, and are lost with another."""

    life: int


class There(Answer, frozen=True):
    life: int
