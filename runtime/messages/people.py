# SPDX-License-Identifier: Apache-2.0
"""Messages between the command line and a daemon. They go over the daemon's local socket, or with
an operator's key straight to the orchestrator."""

from __future__ import annotations

import msgspec

from ...interposer.inspection import ProcessState
from .base import Answer, Message
from .predictions import Prediction
from .records import Event, HostRow, JobRow, MigrationRow, UnknownRow

SNAPSHOTS_OFF, SNAPSHOTS_AUTO = -1.0, -2.0
"""Values of RunJob.snapshot_every: there are none; the orchestrator chooses the interval."""


class RunJob(Message, frozen=True):
    """Start a job of ``nnodes`` capsules; answers Named. If the name is empty, the orchestrator
    chooses one.

    ``collective``: the seconds for which its ranks wait for each other; 0: the cluster file's
    ``timeouts.collective``. ``env_ranks``: a lone capsule gets RANK and the like too. Capsules of
    larger jobs always get them. ``snapshot_every``: seconds between two snapshots; 0: the cluster
    file's ``snapshots.every``; or SNAPSHOTS_OFF or SNAPSHOTS_AUTO. ``rewind_on``: the ends after
    which the job is taken back (config/choices.RewindOn). ``max_rewinds``: how often in an hour; ""
    and -1 mean what the cluster file says. ``umask``: the command's file mode creation mask; -1:
    the agent's.
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
    snapshot_every: float = 0.0
    rewind_on: str = ""
    max_rewinds: int = -1
    umask: int = -1


class Named(Answer, frozen=True):
    """The orchestrator answers RunJob and Migrate with it. ``name``: that of the job which has
    started, or of the migration which has begun, such as m7."""

    name: str


class GetStatus(Message, frozen=True):
    """Ask for the state of the cluster; answers Status. ``job``: only this job, its hosts and its
    moves; with no job of that name, none."""

    job: str = ""


class Status(Answer, frozen=True):
    """``trouble``: why the journal cannot be written now, or what it waits for, else empty.
    ``unknown``: capsules that hosts run and the journal does not have."""

    cluster: str
    time: float
    jobs: list[JobRow]
    hosts: list[HostRow]
    moving: list[MigrationRow]
    trouble: str = ""
    unknown: list[UnknownRow] = msgspec.field(default_factory=list)


class SetTaint(Message, frozen=True):
    """Taint a host, so that everything on it moves away.

    ``within``: seconds until the host must be empty; 0: the cluster file's value for the
    ``severity`` (config/choices.py). The answer is Evacuating if there is a deadline, else
    None.
    """

    host: str
    reason: str
    within: float = 0.0
    severity: str = ""


class PlanEvacuation(Message, frozen=True):
    """Plan how a host would become empty; changes nothing. The fields are those of SetTaint.
    Answers Evacuating, also for a host without a deadline."""

    host: str
    within: float = 0.0
    severity: str = ""


class Departing(msgspec.Struct, frozen=True):
    """The expected move of a capsule that must leave a host.

    The capsule is gone after about ``empty_s`` seconds, and after ``at_most_s`` at most; its job
    loses ``lost_s`` seconds of training. ``late``: it may not be gone in time. ``error``: why it
    cannot leave, else empty.
    """

    capsule: str
    empty_s: float
    late: bool
    lost_s: float = 0.0
    error: str = ""
    at_most_s: float = 0.0


class Evacuating(Answer, frozen=True):
    """How a host becomes empty that must be empty within ``within`` seconds; 0: it has no deadline.

    ``empty_s``: seconds until it is expected to be empty. ``together``: all ``capsules`` leave at
    once; otherwise they leave one by one, in this order.
    """

    host: str
    within: float
    empty_s: float
    together: bool
    capsules: list[Departing]


class Untaint(Message, frozen=True):
    """Remove the taint of a host, if it has one; migrations under way go on. Answers None."""

    host: str


class Cordon(Message, frozen=True):
    """Let no new work come to a host; capsules that run there stay. Answers None."""

    host: str


class Uncordon(Message, frozen=True):
    """Remove the cordon and the taint of a host; answers None."""

    host: str


class Migrate(Message, frozen=True):
    """Move one capsule. An empty ``to`` lets the orchestrator choose a spare. Answers Planned, or
    Named once the move has begun.

    ``to_gpu``: the GPU to go to, as ``HOST/GPU``, or as ``GPU`` on the capsule's own host; an index
    or the beginning of a UUID. ``from_gpu``: the GPU to leave, if the capsule uses several.
    ``verify``: compare every byte of device memory afterwards, also if the cluster file says
    otherwise.
    ``way``: replaces the cluster file's precopy.way. ``within``: seconds until the capsule must
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
    """What --dry-run prints. ``checks``: (check, result) rows. Sizes are estimates in bytes; those
    of an image are 0 if the move makes none. ``prediction``: None if the pause is unknown."""

    capsule: str
    source: str
    destination: str
    checks: list[tuple[str, str]]
    image_bytes: int
    carried_bytes: int
    prediction: Prediction | None = None


class GetMigration(Message, frozen=True):
    """Ask for one migration; answers MigrationDetails."""

    name: str


class MigrationDetails(Answer, frozen=True):
    """The orchestrator answers GetMigration with it. ``row``: the record of the migration as it is
    now, or as it ended. The request raises NotFound if there is no such migration, and NotPermitted
    if the caller may not see it."""

    row: MigrationRow


class Cancel(Message, frozen=True):
    """Cancel a migration under way: its capsule stays where it is. Answers None; the migration ends
    a little later."""

    name: str


class ReadOutput(Message, frozen=True):
    """Read output records of a capsule from ``offset`` on; answers Output. Waits ``wait`` s at most
    for new ones."""

    capsule: str
    offset: int
    wait: float


class Output(Answer, frozen=True):
    """Raw records (criu_glue/capsule/output.py).

    ``code``: the exit code, with the last records of an ended capsule. ``dropped``: bytes of
    earlier records that are not kept any more. ``data`` may be empty with ``dropped``: the capsule
    was rewound, and has printed nothing since.
    """

    data: bytes
    next: int
    code: int | None
    dropped: int = 0


class ReadRepeated(Message, frozen=True):
    """Read output that rewinds have cut off: from ``offset`` on, where the capsule's log breaks
    off, and before ``until``, where the log goes on after the last of these rewinds; answers
    Repeated. One answer is about one rewind at most."""

    capsule: str
    offset: int
    until: int


class Repeated(Answer, frozen=True):
    """Raw records, as in Output. The next request begins at ``next``; there is no more once that is
    ``until``. ``dropped``: bytes of earlier records that are not kept. ``host``: where the capsule
    was then. ``gone``: why nothing of what it printed there is left; "" if it is left.
    """

    data: bytes
    next: int
    dropped: int = 0
    host: str = ""
    gone: str = ""


class GetInspection(Message, frozen=True):
    """Ask what a capsule's processes hold of GPUs and of peers now; answers Inspection."""

    capsule: str


class Inspection(Answer, frozen=True):
    """The live processes that have an interposer page, by pid."""

    capsule: str
    host: str
    processes: list[ProcessState]


class SignalJob(Message, frozen=True):
    """Send a signal to every capsule's command of a job; answers None."""

    job: str
    signum: int


class RewindJob(Message, frozen=True):
    """Take a job back to its newest snapshot; answers RewindOrdered. ``lost``: a host that the
    caller knows to be dead, or "". ``dry_run``: only say what would be done."""

    job: str
    lost: str = ""
    dry_run: bool = False


class RewindOrdered(Answer, frozen=True):
    """A rewind that begins now, or would. ``snapshot``: its name, and ``boundary`` where all ranks
    were, ``ago`` seconds ago. ``where``: the host of each capsule afterwards. ``within``: if it has
    not begun after so many seconds, the order is void; 0: it stays."""

    job: str
    snapshot: str
    boundary: str
    ago: float
    where: dict[str, str]
    within: float = 0.0


class SnapshotJob(Message, frozen=True):
    """Take a snapshot of a running job, and save it in the directory ``to``; answers
    SnapshotOrdered at once. ``dry_run``: only say which hosts would hold it meanwhile."""

    job: str
    to: str
    dry_run: bool = False


class SnapshotOrdered(Answer, frozen=True):
    """A snapshot that is taken now, or would be. ``holders``: the host that is to hold the image of
    each capsule until it is saved. ``waits_for``: the moves of the job that go first; then
    ``holders`` is empty, since none are chosen before their end."""

    job: str
    holders: dict[str, str]
    waits_for: list[str] = msgspec.field(default_factory=list)


class SuspendJob(Message, frozen=True):
    """Take a last snapshot of a job, and end it everywhere; answers SuspensionOrdered at once.
    ``to``: a directory in which its images are saved then, or "". A job that is suspended already
    is saved there. ``dry_run``: only say which hosts would hold it."""

    job: str
    to: str = ""
    dry_run: bool = False


class SuspensionOrdered(Answer, frozen=True):
    """A suspension that begins now, or would. ``holders``: the host that is to hold the image of
    each capsule. ``waits_for``: as in SnapshotOrdered."""

    job: str
    holders: dict[str, str]
    waits_for: list[str] = msgspec.field(default_factory=list)


class WithdrawOrder(Message, frozen=True):
    """Take back the caller's order to suspend a job or to save it; answers Withdrawn."""

    job: str


class Withdrawn(Answer, frozen=True):
    """``done``: whether the order is void. It is not if its snapshot had begun already."""

    done: bool


class ResumeJob(Message, frozen=True):
    """Let a suspended job go on; answers ResumptionOrdered at once. ``source``: the directory in
    which its images are, or "" for where they were put. From a directory a job can go on that has
    ended, or that this cluster has never had. ``snapshot``: the name of the one to take there, ""
    for the newest. ``dry_run``: only say where."""

    job: str
    source: str = ""
    dry_run: bool = False
    snapshot: str = ""


class ResumptionOrdered(Answer, frozen=True):
    """A resumption that begins now, or would. ``snapshot``, ``boundary``: the name of the snapshot
    from which the job goes on, and where all its ranks were. ``suspended_s``: for how many seconds
    it has been suspended. ``where``: the host of each capsule."""

    job: str
    snapshot: str
    boundary: str
    suspended_s: float
    where: dict[str, str]


class EndUnknown(Message, frozen=True):
    """End the capsules of a job that a host runs and the journal does not know; answers
    UnknownEnded."""

    host: str
    job: str


class UnknownEnded(Answer, frozen=True):
    """``later``: the host is not up. What it still runs of the job is ended when it is back."""

    later: bool


class GetEvents(Message, frozen=True):
    """Ask for events; answers Events, oldest first. ``subject``: whose events; empty: all."""

    subject: str
    after: int


class Events(Answer, frozen=True):
    """The orchestrator answers GetEvents with it. ``events``: those with a number above
    ``GetEvents.after`` that the caller may see, oldest first. If there are too many for one answer,
    it has only the newest."""

    events: list[Event]


class WhoAmI(Message, frozen=True):
    """Ask who the caller is; answers Me."""


class Me(Answer, frozen=True):
    """The caller, as the orchestrator sees it. ``uid``: None for an operator's key.

    ``why``: where the role comes from. ``through``: the host whose agent passed the request on,
    empty for none. ``may``: all that the role allows, in words. ``shared``: the cluster file's
    files.shared.
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
    """The first message on every connection over TCP; answers There. ``boot_id``: names one run of
    a program. Open requests are sent again to the same run; to another run they are lost."""

    boot_id: int


class There(Answer, frozen=True):
    """The peer answers Here with it. ``boot_id``: a random number that names the present run of the
    program that answers. If it is another one than before, the open requests to that program are
    lost."""

    boot_id: int
