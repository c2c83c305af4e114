# SPDX-License-Identifier: Apache-2.0
"""What the orchestrator knows of hosts, taints, jobs and migrations. Loads it from the journal;
sends no messages."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ...criu_glue.network.overlay import Overlay
from ...errors import ConfigError, Refused
from ..config.cluster import Cluster
from ..journal.journal import Journal
from ..losses.failure_count import FailureCount
from ..losses.left_hosts import LeftHosts
from ..messages import CapsuleState, DataLink, GpuSeat, Register
from ..migration.migration import Migration
from ..model import run_spec
from ..model.jobs import Capsule, Job
from ..model.spares import NO_GPUS, GpuNeed, HostView, choose_destination
from ..model.steps import ENDS
from ..snapshot.snapshot import Snapshot


@dataclass
class HostState:
    """A host as its agent's last message shows it.

    ``heard``: when that message came, in monotonic seconds; 0 for never. ``books_current``: the
    agent has registered with this orchestrator and has missed no address book since. ``digest``:
    the digest of the cluster file that the agent uses. ``lost``: the names of images of newest
    snapshots that the host had and has not any more. ``lacking``: the capsules of jobs that are
    being rewound which the host's last report lacked, though it may run them, with their epochs.
    """

    heard: float = 0.0
    memory_free: int = 0
    memory_left: float = 1.0
    boot_id: str = ""
    books_current: bool = False
    gpus: tuple[GpuSeat, ...] = ()
    link: DataLink | None = None
    digest: str = ""
    lost: frozenset[str] = frozenset()
    lacking: frozenset[tuple[str, int]] = frozenset()


class Fleet:
    """The cluster as the orchestrator knows it now; what must survive is also in the journal.

    ``deadlines``: when a tainted host must be empty, by host, in monotonic seconds.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.journal = Journal(cluster.paths.state / "journal.sqlite")
        self.hosts = {host.name: HostState() for host in cluster.hosts}
        self.taints = self.journal.taints()
        ahead = time.monotonic() - time.time()  # so that a clock that is set later changes none
        self.deadlines = {h: until + ahead for h, until in self.journal.deadlines().items()}
        self.cordons = self.journal.cordons()
        self.jobs = self._load_jobs()
        self.failures = FailureCount(self.journal.failures, lambda: self.jobs.values(), self.is_up)
        self.left_hosts = LeftHosts()
        self.migrations: dict[str, Migration] = {}
        self.snapshots: dict[str, Snapshot] = {}  # by job; only those under way
        self.reports: dict[str, Register] = {}  # by host; only while a restored journal catches up
        self.unknown: dict[str, list[CapsuleState]] = {}  # by host: what the journal does not have
        if why := self.missing(self.hosts):
            raise ConfigError(f"cluster file: {why}", hint="put the host's table back")

    def missing(self, hosts: Iterable[str]) -> str:
        """Return in words why a cluster of these hosts does not fit the running and the suspended
        jobs; "" if it does."""
        there = set(hosts)
        for _, capsule in self.living():
            if capsule.host not in there:
                return (
                    f"{capsule.name} runs on {capsule.host}, which is not in the file any more:"
                    f" drain {capsule.host} before you remove it"
                )
        for job in self.jobs.values():
            newest = job.newest if job.state == "suspended" else None
            for name, holders in newest.holders.items() if newest else ():
                if holders and there.isdisjoint(holders):
                    return (
                        f"{holders[0]}, which is not in the file any more, has the only image of"
                        f" {name}, which is suspended: `liveshift resume {job.name}` before you"
                        f" remove {holders[0]}"
                    )
        return ""

    def living(self) -> list[tuple[Job, Capsule]]:
        """List the capsules whose commands have not ended, each with its job. Those of suspended
        jobs are on no host."""
        jobs = [job for job in self.jobs.values() if job.state not in ("ended", "suspended")]
        return [(job, each) for job in jobs for each in job.capsules.values() if each.code is None]

    def unreported(self) -> list[str]:
        """List the hosts whose report a restored journal still waits for; see catch_up.py."""
        return (
            [h for h in self.hosts if h not in self.reports] if self.journal.file.restored else []
        )

    def refuse_unknown(self) -> None:
        """Raise Refused if a host runs a capsule that the journal does not have. It uses a subnet,
        and the journal does not know which."""
        for host, unknown in self.unknown.items():
            if unknown:
                one = unknown[0].name
                raise Refused(
                    f"{host} runs {one}, which the journal does not know",
                    hint=f"`liveshift stop {one.partition('/')[0]} --unknown {host}` ends it",
                )

    def is_up(self, host: str) -> bool:
        """Return whether the host's agent sent a message within ``timeouts.suspicion``.

        A host where a job has ended, and which was removed from the cluster file since, is not up.
        """
        heard = self.hosts[host].heard if host in self.hosts else 0.0
        return bool(heard) and time.monotonic() - heard < self.cluster.timeouts.suspicion

    def up(self) -> list[str]:
        return [name for name in self.hosts if self.is_up(name)]

    def under_way(self) -> list[Migration]:
        """List the migrations that have not ended, GPU swaps included."""
        return [each for each in self.migrations.values() if each.step not in ENDS]

    def moves_of(self, job: Job) -> list[Migration]:
        """List the migrations of a job that have not ended, GPU swaps included."""
        return [each for each in self.under_way() if each.job is job]

    def heard(self) -> dict[str, float]:
        """Return, by host, when it was last heard, in monotonic seconds; 0 for never."""
        return {name: state.heard for name, state in self.hosts.items()}

    def paused(self, job: Job) -> bool:
        """Whether a move or a snapshot holds the job's ranks at their gates, or cannot open
        them."""
        snapshot = self.snapshots.get(job.name)
        held = snapshot is not None and not snapshot.released.is_set()
        return held or self._moves_hold_gates(job)

    def locked(self, job: Job) -> bool:
        """Whether a move or a snapshot may have locked networks of the job."""
        snapshot = self.snapshots.get(job.name)
        return (snapshot is not None and snapshot.locks) or self._moves_hold_gates(job)

    def _moves_hold_gates(self, job: Job) -> bool:
        return any(each.holds_gates or each.waits for each in self.moves_of(job))

    def forget_migrations(self, keep: int) -> None:
        """Keep only the newest ``keep`` ended migrations in memory."""
        ended = [name for name, each in self.migrations.items() if each.step in ENDS]
        for name in ended[: max(0, len(ended) - keep)]:
            del self.migrations[name]

    def taken(self, rewound: Job | None = None) -> defaultdict[str, set[str]]:
        """Return, by host, the capsules that take a slot: they run there, arrive or leave.
        ``rewound``: a job whose migrations do not count, as a rewind ends them."""
        taken: defaultdict[str, set[str]] = defaultdict(set)
        for _, capsule in self.living():
            taken[capsule.host].add(capsule.name)
        for migration in self.under_way():
            if migration.job is rewound:
                continue
            for host in (migration.source, migration.destination):
                taken[host].add(migration.capsule.name)
        return taken

    def held(self) -> dict[str, list[str]]:
        """Return, by host, the capsules that are there. After its commit a migration still counts
        at its source until it is over, because the frozen copy is there."""
        held = self.taken()
        for migration in self.under_way():
            if migration.capsule.host != migration.destination:
                held[migration.destination].discard(migration.capsule.name)
        return {host: sorted(names) for host, names in held.items()}

    def views(self, rewound: Job | None = None) -> list[HostView]:
        """Return the hosts as the decisions about spares and placement need them. ``rewound``: as
        for :meth:`taken`."""
        taken = self.taken(rewound)
        return [
            HostView(
                h.name,
                h.spare.value,
                h.slots,
                len(taken[h.name]),
                self.is_up(h.name),
                h.name in self.taints,
                self.hosts[h.name].gpus,
                h.name in self.cordons,
                self.hosts[h.name].memory_left,
                self.hosts[h.name].lost,
            )
            for h in self.cluster.hosts
        ]

    def another_host(self, capsule: Capsule, avoid: Collection[str]) -> str:
        """Return a host that is not in ``avoid`` for a capsule of a job that is being rewound.
        Raises NoSpare if none has room."""
        found = self.find(capsule.name)
        newest = found[0].newest if found is not None else None
        need = newest.gpus.get(capsule.name, NO_GPUS) if newest is not None else NO_GPUS
        avoid = set(avoid)
        if found is not None and newest is not None and capsule.name in newest.carried:
            avoid |= {found[0].capsules[name].host for name in newest.carried} - {capsule.host}
        views = [view for view in self.views() if view.name not in avoid]
        last = self.left_hosts.recent()
        return choose_destination(views, capsule.name, capsule.host, "", last, need)[0].name

    def gpu_need(self, capsule: Capsule, source: str) -> GpuNeed:
        """Return what the capsule needs of a destination's GPUs, from its source's heartbeats.
        Device memory may be off its GPU for a snapshot just now."""
        if capsule.seen is None:
            return NO_GPUS
        used = set(capsule.seen.gpus)
        if not used:  # no pause is longer than this
            since = time.monotonic() - self.cluster.timeouts.collective
            there = {seat.uuid for seat in self.hosts[source].gpus}
            used = capsule.gpus_since(since) & there
        return GpuNeed(frozenset(used), self.hosts[source].gpus) if used else NO_GPUS

    def images_lost(self, host: str, held: Collection[str]) -> frozenset[str]:
        """Return the names of the images of newest snapshots that the host has lost, if it has only
        those ``held``."""
        kept = set()
        for job in self.jobs.values():
            if job.newest is not None and job.state != "ended":
                kept |= job.newest.images_of(host, job.indices())
        return frozenset(kept.difference(held))

    def find(self, capsule: str) -> tuple[Job, Capsule] | None:
        job = self.jobs.get(capsule.partition("/")[0])
        found = job.capsules.get(capsule) if job else None
        return (job, found) if job and found else None

    def _load_jobs(self) -> dict[str, Job]:
        jobs: dict[str, Job] = {}
        starts, ends = self.journal.starts(), self.journal.ends()
        for name, vni, subnet, spec, started, state, code in self.journal.jobs():
            run, uid = run_spec.decode(spec)
            capsules = {
                capsule: Capsule(capsule, index, host, epoch, ended, bool(granted), True)
                for capsule, _, index, host, epoch, ended, granted in self.journal.capsules(name)
            }
            jobs[name] = Job(
                name,
                Overlay(vni, subnet),
                run,
                uid,
                started,
                capsules,
                state,
                code,
                self.journal.snapshots.rewinds(name),
                self.journal.snapshots.newest(name),
                ended=ends.get(name, 0) if state == "ended" else 0,
                since=starts.get(name, 0),
                last_rewind=self.journal.snapshots.last_rewind(name),
            )
        return jobs
