# SPDX-License-Identifier: Apache-2.0
"""Jobs and their capsules, with names, addresses and environments, made from one request."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ... import units
from ...criu_glue.capsule.sandboxes import PAGES
from ...criu_glue.network.overlay import JOB_PREFIX, Overlay
from ...errors import LiveshiftError, Refused, WrongUsage, no_such
from ...interposer.library import library_path
from ...texts import shortened
from ..config.choices import RewindOn
from ..config.cluster import Cluster
from ..config.environment import CapsuleIdentity, environment
from ..config.timeouts import Timeouts
from ..config.values import LEAST_INTERVAL_S
from ..messages import SNAPSHOTS_AUTO, Book, CapsuleSpec, CapsuleState, RunJob
from .deadlines import for_job
from .failures import NOTHING_SEEN, FailuresSeen, mean_time_to_failure
from .interval import SnapshotCost, expected_cost, interval
from .ownership import Owner
from .snapshots import Generation

MOST_CAPSULES = 250
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
LONGEST_ARGUMENT, MOST_ARGUMENTS, POINTER = 128 << 10, 2 << 20, 8
"""Bytes. The kernel starts no program with an argument or a variable of more, the NUL at its end
included, nor with more in all, each with a pointer: a quarter of the stack's limit, which is 8 MiB
for an agent (execve(2), "Limits on size of arguments and environment")."""

KILLED = 137
"""The exit code of a capsule that SIGKILL ended, or whose exit code no agent has seen."""


@dataclass
class Capsule:
    """A capsule as the orchestrator knows it. The journal holds its host, epoch and granted.

    ``seen``: what its host has last reported of it, and ``reported`` when. ``steady``: since when
    its reports have had no long gap. ``progressed``: when a report last showed that it had finished
    another collective. ``gpus_used``: by GPU (UUID), when a report last said that it uses it. All
    in monotonic seconds, 0 for never.
    """

    name: str
    index: int
    host: str
    epoch: int
    code: int | None = None
    granted: bool = True
    started: bool = False  # its host has had it: if it is not there now, it is lost
    seen: CapsuleState | None = None
    reported: float = 0.0
    steady: float = 0.0
    progressed: float = 0.0
    gpus_used: dict[str, float] = field(default_factory=dict)
    migration: str | None = None
    failed: str = ""  # why a dump or a restore failed in its last move

    @property
    def owner(self) -> Owner:
        return Owner(self.host, self.epoch, self.granted)

    def gpus_since(self, since: float) -> set[str]:
        """The GPUs that it was last said to use after this moment, in monotonic seconds."""
        return {gpu for gpu, last in self.gpus_used.items() if last > since}

    def note_report(self, now: float, gap: float) -> None:
        """Its host reports it. A gap is long if it lasts ``gap`` seconds or more."""
        if now - self.reported >= gap:
            self.steady = now
        self.reported = now


@dataclass(frozen=True)
class LastRewind:
    """Where a job's last rewind led. ``boundary``: the time of the snapshot, in seconds since 1970
    (time.time()). ``repeated_s``: the seconds of training from there on that were repeated.
    ``ended``: when the job ran again, in seconds since 1970."""

    boundary: float
    repeated_s: float
    ended: float


@dataclass
class Job:
    """A job. ``state``: running, rewinding, suspended, ending or ended.

    ``rewinds``: how often it was rewound. ``newest``: its newest complete snapshot. ``taking``: the
    number of the snapshot that is being taken, 0 for none. ``pause_s``: how long the newest one
    paused it; 0 if that is not known. ``snapshot_cost``: what one costs; None before the first.
    ``rewind_s``: how long the last rewind took, from the last sign of the lost host on; 0 if there
    was none. ``last_rewind``: None if there was none. ``unprotected``: why there is no later
    snapshot, as text, or "". ``silent``: what a person must know while no host of it is heard, as
    text, or "". ``rewinding``: how far its rewind is, or why it is not taken back yet, as text; ""
    if nothing of it is lost.
    ``ran_on``: capsules that are known to have run since ``newest``, to which the job went back.
    ``copying_to``: for each image of a suspended job that is being copied, the host that gets it.
    ``end_asked``: when a person last sent a signal that asks for an end, in monotonic seconds; 0 if
    none did since the boundary of ``newest``. ``since``: the number of the first event of its
    history; earlier ones are of an earlier job of that name.
    ``ended``: the larger, the later it has ended; no time, as clocks are set. 0 before its end.
    """

    name: str
    overlay: Overlay
    request: RunJob
    uid: int
    started: float
    capsules: dict[str, Capsule]
    state: str = "running"
    code: int | None = None
    rewinds: int = 0
    newest: Generation | None = None
    taking: int = 0
    pause_s: float = 0.0
    snapshot_cost: SnapshotCost | None = None
    rewind_s: float = 0.0
    last_rewind: LastRewind | None = None
    unprotected: str = ""
    silent: str = ""
    rewinding: str = ""
    ran_on: set[str] = field(default_factory=set)
    copying_to: dict[str, str] = field(default_factory=dict)
    end_asked: float = 0.0
    since: int = 0
    ended: int = 0
    forgetting: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False, compare=False)
    _book: tuple[tuple[int, int], Book] | None = field(default=None, repr=False, compare=False)

    def enter(self, owners: Mapping[str, tuple[str, int]], rewinds: int, state: str) -> None:
        """Note what the journal says since a rewind, a suspension or a resumption was written:
        no capsule is granted, and each has a new host and epoch."""
        self.rewinds, self.state = rewinds, state
        for name, (host, epoch) in owners.items():
            capsule = self.capsules[name]
            capsule.host, capsule.epoch, capsule.granted, capsule.seen = host, epoch, False, None

    def goes_on_from(self, boundary: float) -> None:
        """Note that ``newest`` was taken at this boundary (monotonic seconds): the job has borne
        what was asked before it."""
        if self.end_asked <= boundary:
            self.end_asked = 0.0

    def book(self) -> Book:
        """The job's address book; the same object until a capsule has another owner."""
        key = self.rewinds, sum(c.epoch for c in self.capsules.values())  # both only grow
        if self._book is None or self._book[0] != key:
            self._book = key, self._new_book()
        return self._book[1]

    def _new_book(self) -> Book:
        where = {self.overlay.address(c.index): (c.host, c.epoch) for c in self.capsules.values()}
        return Book(self.name, self.overlay.vni, self.overlay.subnet, where, self.rewinds)

    def capsule(self, name: str) -> Capsule:
        """The capsule of that name; the job's own name will do if it has only one. Raises
        NotFound."""
        if name == self.name and len(self.capsules) == 1:
            name = f"{self.name}/0"
        if name not in self.capsules:
            text = f'job {self.name} has no capsule "{name}"'
            raise no_such(text, name, self.capsules, "its capsules are")
        return self.capsules[name]

    @property
    def owners(self) -> dict[str, str]:
        """The host of each capsule, by its name."""
        return {capsule.name: capsule.host for capsule in self.capsules.values()}

    def indices(self) -> dict[str, int]:
        """The index of each capsule, by its name."""
        return {capsule.name: capsule.index for capsule in self.capsules.values()}

    def snapshot_every(self, cluster: Cluster, failures: FailuresSeen = NOTHING_SEEN) -> float:
        """Seconds between two snapshots of the job; 0 if none are taken. What one costs and how
        often hosts fail decides if the orchestrator chooses (interval.py, failures.py)."""
        own, settings = self.request.snapshot_every, cluster.snapshots
        if not self.snapshots_auto(cluster):
            if own:
                return max(0.0, own)
            return 0.0 if settings.every is None or settings.every == "auto" else settings.every
        running = [c for c in self.capsules.values() if c.code is None]
        seen = [c.seen for c in running if c.seen is not None]
        largest = max((s.resident for s in seen), default=0)
        devices = max((s.device_memory for s in seen), default=0)
        cost = self.snapshot_cost or expected_cost(largest, devices)
        mttf = self.mean_time_to_failure(cluster, failures)
        return interval(cost, mttf, settings.cost, LEAST_INTERVAL_S)

    def mean_time_to_failure(self, cluster: Cluster, failures: FailuresSeen) -> float:
        """Seconds until one of the job's hosts fails, on average."""
        running = [c for c in self.capsules.values() if c.code is None]
        hosts = len({c.host for c in running})
        gpus = sum(len(c.seen.gpus) for c in running if c.seen is not None)
        return mean_time_to_failure(max(1, hosts), gpus, cluster.snapshots.mttf, failures)

    def snapshots_auto(self, cluster: Cluster) -> bool:
        """Whether the orchestrator chooses how often a snapshot of the job is taken."""
        own = self.request.snapshot_every
        return own == SNAPSHOTS_AUTO or (own == 0 and cluster.snapshots.every == "auto")

    def snapshots_asked(self, cluster: Cluster) -> bool:
        """Whether a person wants snapshots of the job: they are not only the default."""
        return bool(self.request.snapshot_every) or cluster.snapshots.every != "auto"

    def rewind_on(self, cluster: Cluster) -> RewindOn:
        """The ends of a command after which the job is taken back."""
        own = self.request.rewind_on
        return RewindOn(own) if own else cluster.snapshots.rewind_on

    def max_rewinds(self, cluster: Cluster) -> int:
        """How often in an hour the job is taken back after such an end."""
        own = self.request.max_rewinds
        return own if own >= 0 else cluster.snapshots.max_rewinds

    def timeouts(self, cluster: Cluster) -> Timeouts:
        """The deadlines for moves of this job. Raises Refused when the cluster file has changed and
        they no longer fit into the job's collective timeout."""
        try:
            return for_job(cluster, self.request.collective)
        except WrongUsage as unfit:  # they fitted when the job began
            raise Refused(unfit.message, hint=unfit.hint) from None

    def spec(self, capsule: Capsule, cluster: Cluster) -> CapsuleSpec:
        """All that a host needs to run the capsule; the same on every host."""
        run = self.request
        return CapsuleSpec(
            name=capsule.name,
            job=self.name,
            index=capsule.index,
            argv=list(run.argv),
            env=environment(self._place(capsule), cluster.env, run.env, library_path(), PAGES),
            cwd=run.cwd,
            uid=self.uid,
            gid=run.gid,
            groups=list(run.groups),
            hosts_file=self._hosts_file(),
            umask=run.umask,
        )

    def _place(self, capsule: Capsule) -> CapsuleIdentity:
        address, master = self.overlay.address(capsule.index), self.overlay.address(0)
        count = len(self.capsules)
        ranks = count > 1 or self.request.env_ranks
        return CapsuleIdentity(self.name, capsule.index, count, address, master, ranks)

    def _hosts_file(self) -> str:
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for capsule in self.capsules.values():
            address, name = self.overlay.address(capsule.index), f"{self.name}-{capsule.index}"
            # A dual-stack listener (torch's TCPStore) looks up the mapped form.
            lines += [f"{address} {name}", f"::ffff:{address} {name}"]
        return "\n".join(lines) + "\n"


def check_request(run: RunJob, taken: set[str], cluster: Cluster, number: int) -> str:
    """Check a request and return the new job's name. ``number`` makes the name if it has none.

    Raises WrongUsage for a request that cannot become a job, Refused for a name that is in use.
    """
    if not run.argv:
        raise WrongUsage("no command given", hint="liveshift run -- torchrun train.py")
    if not 1 <= run.nnodes <= MOST_CAPSULES:
        raise WrongUsage(f"--nnodes {run.nnodes}: a job has 1 to {MOST_CAPSULES} capsules")
    _check_size(run)
    for_job(cluster, run.collective)
    if 0 < run.snapshot_every < LEAST_INTERVAL_S:
        raise WrongUsage(
            f"a snapshot every {run.snapshot_every:g} s: the shortest interval is"
            f" {LEAST_INTERVAL_S:g} s"
        )
    if run.rewind_on not in ("", *RewindOn):
        raise WrongUsage(f'--rewind-on "{run.rewind_on}": expected {" or ".join(RewindOn)}')
    if run.name:
        if not NAME.fullmatch(run.name):
            raise WrongUsage(
                f'invalid job name "{run.name}"',
                hint="use 1 to 32 lower-case letters, digits and dashes",
            )
        if run.name in taken:
            raise Refused(f'a job "{run.name}" is running already', hint="choose another --name")
        return run.name
    return f"job{number}"


def _check_size(run: RunJob) -> None:
    """Raise WrongUsage if no host's kernel would start the command: it would end with code 126, and
    every host would have been sent it."""
    words = [("an argument of the command", argument) for argument in run.argv]
    words += [(f"the variable {shortened(k, 40)}", f"{k}={v}") for k, v in run.env.items()]
    total = 0
    for what, word in words:
        size = len(word.encode(errors="replace")) + 1  # each byte that is no UTF-8 counts as one
        total += size + POINTER
        if size > LONGEST_ARGUMENT:
            raise WrongUsage(
                f"{what} has {units.size(size)}, and the kernel takes at most"
                f" {units.size(LONGEST_ARGUMENT)}",
                hint="put it into a file, and pass the file's name",
            )
    if total > MOST_ARGUMENTS:
        raise WrongUsage(
            f"the command and its environment have {units.size(total)}, and the kernel takes at"
            f" most {units.size(MOST_ARGUMENTS)}",
            hint="put long arguments into a file, and pass the file's name",
        )


def overlay_for(cluster: Cluster, taken: set[int]) -> Overlay:
    """The first free /24 of the cluster's overlay; its number is also the VXLAN id."""
    subnets = ipaddress.ip_network(str(cluster.overlay)).subnets(new_prefix=JOB_PREFIX)
    for vni, subnet in enumerate(subnets, start=1):
        if vni not in taken:
            return Overlay(vni, str(subnet))
    raise LiveshiftError(
        f"all subnets of {cluster.overlay} are taken by jobs",
        hint="give cluster.overlay a larger network",
    )
