# SPDX-License-Identifier: Apache-2.0
"""Messages between the command line and a daemon: over its local socket, or with an operator's key
to the orchestrator itself."""

from __future__ import annotations

import msgspec

from ...interposer.inspection import ProcessState
from .base import Answer, Message
from .predictions import Prediction
from .records import Event, HostRow, JobRow, MigrationRow, UnknownRow


class Run(Message, frozen=True):
    """Start a job of ``nnodes`` capsules; answers Named. An empty name asks for one.

    ``collective``: after how many seconds its ranks give up waiting for each other; 0 for the
    cluster file's ``timeouts.collective``. ``env_ranks``: a single capsule gets RANK and its like
    too, which several always get.
    """

    name: str
    nnodes: int
    argv: list[str]
    env: dict[str, str]
    cwd: str
    gid: int
    groups: list[int]
    collective: float = 0.0
    env_ranks: bool = False


class Named(Answer, frozen=True):
    name: str


class GetStatus(Message, frozen=True):
    """Answers Status."""


class Status(Answer, frozen=True):
    """``trouble``: why the journal cannot be written just now, or what it waits for, else empty;
    ``unknown``: what hosts run that the journal does not have."""

    cluster: str
    time: float
    jobs: list[JobRow]
    hosts: list[HostRow]
    moving: list[MigrationRow]
    trouble: str = ""
    unknown: list[UnknownRow] = msgspec.field(default_factory=list)


class SetTaint(Message, frozen=True):
    """Taint a host, so that everything on it moves away.

    ``within``: seconds until the host must be empty. If it is 0, the cluster file says so for the
    ``severity`` (config_choices.Severity). Where either gives a deadline the answer is Evacuating,
    else None.
    """

    host: str
    reason: str
    within: float = 0.0
    severity: str = ""


class Departing(msgspec.Struct, frozen=True):
    """What is expected of a capsule that must leave a host.

    It is gone after ``empty_s`` seconds, and its job loses ``lost_s`` seconds of training.
    ``late``: it will not be gone in time. ``error``: why it cannot leave, else empty.
    """

    capsule: str
    empty_s: float
    late: bool
    lost_s: float = 0.0
    error: str = ""


class Evacuating(Answer, frozen=True):
    """How a host becomes empty that has ``within`` seconds for it.

    ``empty_s``: it is expected to be empty after so many seconds. ``together``: all ``capsules``
    leave at once; else they leave one by one, in this order.
    """

    host: str
    within: float
    empty_s: float
    together: bool
    capsules: list[Departing]


class Untaint(Message, frozen=True):
    """Take a host's taint away, if it has one; running migrations end as they would; answers
    None."""

    host: str


class Cordon(Message, frozen=True):
    """Let no new work come to a host; what runs there stays; answers None."""

    host: str


class Uncordon(Message, frozen=True):
    """Take a host's cordon away, and its taint; answers None."""

    host: str


class Migrate(Message, frozen=True):
    """Move one capsule; ``to`` empty picks a spare; answers Planned, or Named when it began.

    ``to_gpu`` given: to that GPU of ``HOST/GPU``, or with just ``GPU`` of the host that it is on;
    an index or the beginning of a UUID. ``from_gpu``: which one to leave, if it uses several.
    ``verify``: compare every byte of device memory after it, whatever the cluster file says.
    ``way``: instead of the cluster file's precopy.way. ``within``: seconds until the capsule must
    have left its host; 0: it has no deadline.
    """

    capsule: str
    to: str
    reason: str
    dry_run: bool
    to_gpu: str = ""
    from_gpu: str = ""
    verify: bool = False
    way: str = ""
    within: float = 0.0


class Planned(Answer, frozen=True):
    """What --dry-run prints: (what, found) rows, estimates in bytes; those of an image are 0 where
    a move makes none, and so is ``prediction`` None where nothing is known of its pause."""

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


class Cancel(Message, frozen=True):
    """Cancel a migration that is under way: its capsule stays where it is. Answers None; the
    migration is over a little later."""

    name: str


class ReadOutput(Message, frozen=True):
    """Output records of a capsule from ``offset`` on; waits up to ``wait`` s; answers Output."""

    capsule: str
    offset: int
    wait: float


class Output(Answer, frozen=True):
    """Raw records (criu_glue/capsule/output.py).

    ``code`` is set with the last ones of an ended capsule. ``dropped`` bytes of records before them
    are not there any more."""

    data: bytes
    next: int
    code: int | None
    dropped: int = 0


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


class EndUnknown(Message, frozen=True):
    """End what a host runs of a job that the journal does not know; answers None."""

    host: str
    job: str


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
    for none; ``may``: what all that allows, in words. ``shared``: the cluster file's files.shared.
    """

    name: str
    role: str
    why: str
    uid: int | None
    through: str
    cluster: str
    may: list[str]
    shared: list[str]


class Here(Message, frozen=True):
    """First word on every connection over TCP; answers There. ``life``: which run of a program
    speaks; asks on their way are sent again to the same one, and are lost with another."""

    life: int


class There(Answer, frozen=True):
    life: int
