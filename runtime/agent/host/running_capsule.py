# SPDX-License-Identifier: Apache-2.0
"""A capsule as the agent of its host knows it: its sandbox, its output, its state."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from .... import units
from ....criu_glue.capsule import output, sandboxes
from ....criu_glue.capsule.mounts import Placement
from ....criu_glue.capsule.sandboxes import Sandbox, SandboxPlan
from ....criu_glue.capsule.tree import inner_pid, tasks
from ....criu_glue.images import pids
from ....criu_glue.network import fence, network, network_lock
from ....criu_glue.network.fence import Surroundings
from ....criu_glue.network.overlay import Overlay
from ....criu_glue.survey import last_bytes
from ....errors import LiveshiftError, NotFound, Refused
from ....interposer.page import PageError, PageFile, open_page
from ...config.cluster import Cluster
from ...messages import Book, CapsuleSpec, CapsuleState, Reserve
from ...model.snapshots import is_restore_name
from . import host_facts, run_time, sandbox_owner
from .finished_operations import finished_by_pid, pages_of
from .mapped_pages import maps
from .peer_links import PeerLinks
from .rank_deaths import RankDeaths
from .run_time import RunTime
from .usual_rate import UsualRate

ROOT_PID = sandboxes.PID_FLOOR + 1
"""The pid of a capsule's root task inside the capsule: the first one above the floor."""

READ_LIMIT = 4 << 20


class CapsuleNote(msgspec.Struct, frozen=True):
    """A running capsule on disk; ``init_started`` distinguishes its process 1 from a later one with
    that pid. ``boot``: as in host_facts.boot; "" if an earlier version has written this."""

    spec: CapsuleSpec
    epoch: int
    vni: int
    subnet: str
    init: int
    init_started: int
    rewinds: int = 0
    boot: str = ""


NOTE = "resident"


@dataclass
class RunningCapsule:
    """A capsule that runs, is frozen or has ended on this host."""

    spec: CapsuleSpec
    epoch: int
    overlay: Overlay
    sandbox: Sandbox
    leaving: bool = False  # a move, not the job, ends it here
    still: bool = False  # frozen for a move, or about to be: a signal may be lost with this copy
    code: int | None = None
    found_dead: bool = False  # nothing of it was left when this agent started
    rebooted: bool = False  # it was started before the last boot of this host
    removed: bool = False  # its network and directory are gone, or a later sandbox's
    finished: dict[int, int] = field(default_factory=dict)  # by pid, at the last restore
    rate: UsualRate = field(default_factory=UsualRate)  # of collectives
    computes: UsualRate = field(default_factory=UsualRate)  # of run time, without collectives

    def __post_init__(self) -> None:
        self.run_time = RunTime(lambda: [task.pid for task in tasks(self.sandbox)])
        self.deaths = RankDeaths(ROOT_PID, lambda: self.exit_code() is not None)
        self.links = PeerLinks()

    @property
    def netns(self) -> str:
        return netns_name(self.spec.name)

    def root_task(self) -> int:
        """The command's pid as the host sees it; raises NotFound if the command has ended."""
        for task in tasks(self.sandbox):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # that one has ended
                if inner_pid(task.pid) == ROOT_PID:
                    return int(task.pid)
        raise NotFound(f"{self.spec.name} has no running command any more")

    def send_signal(self, signum: int) -> None:
        """Send a signal to the command; the command passes signals on to its children as usual.

        SIGTERM after the end of the command ends at once what the command has left behind. Raises
        NotFound for any other signal then.
        """
        try:
            command = self.root_task()
        except NotFound:
            lingers = self.sandbox.alive() and self.exit_code() is not None
            if not lingers or signum != signal.SIGTERM:
                raise
            sandboxes.end(self.sandbox)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(command, signal.Signals(signum))

    def state(self, gpus_of: Callable[[set[int]], dict[str, int]]) -> CapsuleState:
        """The state that a heartbeat reports; also measures the collective rate since the last
        heartbeat.

        ``gpus_of``: returns the GPUs on which any of these processes (pids of the host) computes,
        and the bytes that they have there.
        """
        found = tasks(self.sandbox)
        resident = 0
        for task in found:
            with contextlib.suppress(Exception):  # the task has ended meanwhile
                resident += task.memory_info().rss
        seen = pages_of(self.sandbox, found)
        self.deaths.find([task.pid for task in found], seen, self._open_page)
        collectives = max((page.finished for page in seen), default=0)
        self.rate.heartbeat(time.monotonic(), collectives)
        if not collectives:
            self.computes.heartbeat(time.monotonic(), self.run_time.progress())
        gpus = gpus_of({task.pid for task in found})
        cut = self.links.heartbeat(self.sandbox.init, self.overlay.subnet, locked=self.still)
        return CapsuleState(
            name=self.spec.name,
            epoch=self.epoch,
            pids=len(found),
            resident=resident,
            collectives=collectives,
            rate=self.rate.now,
            ranks=sorted({page.rank for page in seen if page.rank is not None}),
            command=" ".join(self.spec.argv)[:200],
            gpus=list(gpus),
            output_trouble=self.output_trouble(),
            rewinds=self.overlay.rewinds,
            device_memory=sum(gpus.values()),
            unanswered=cut,
        )

    def _open_page(self, pid: int, inner: int) -> PageFile:
        path = self.sandbox.root / sandboxes.PAGES.lstrip("/") / str(inner)
        page = open_page(path)
        try:
            if maps(pid, page):
                return page
        except BaseException:
            page.close()
            raise
        page.close()
        raise PageError(f"{path} is the page of a process that has ended")

    def ran_s(self) -> float:
        """Seconds on a core, summed over all threads that the capsule has now."""
        return run_time.ran_s(task.pid for task in tasks(self.sandbox))

    def collectives(self) -> int:
        """The finished collectives of the living rank that has made the most."""
        return max(finished_by_pid(self.sandbox).values(), default=0)

    def read_output(self, offset: int) -> tuple[int, bytes]:
        """Whole records from ``offset`` on, and the offset where they begin: see output.read."""
        return output.read(self.sandbox.plan.log, offset, READ_LIMIT)

    def output_trouble(self) -> str:
        """Which part of the output this host could not write, as text; "" if it wrote all."""
        try:
            written = output.written(self.sandbox)
        except LiveshiftError:
            return ""  # the capsule has ended
        if not written.lost:
            return ""
        text = f"{units.size(written.lost)} of its output were lost"
        if not written.error:
            return f"{text}: {self.sandbox.plan.log} could not be written to for a time"
        return f"{text}: {self.sandbox.plan.log} cannot be written to: {os.strerror(written.error)}"

    def exit_code(self) -> int | None:
        """The command's exit code, or 128 + signal, once the command has ended. Its sandbox may
        go on for two seconds then (:func:`sandboxes.start`)."""
        with contextlib.suppress(FileNotFoundError, ValueError):  # ValueError: the file is empty
            word, number = self.sandbox.plan.status.read_text().split()[:2]
            return int(number) if word == "exit" else 128 + int(number)
        return None

    def note(self) -> None:
        """Write down what a restarted agent needs to know of the capsule."""
        note = CapsuleNote(
            self.spec,
            self.epoch,
            self.overlay.vni,
            self.overlay.subnet,
            self.sandbox.init,
            self.sandbox.started,
            self.overlay.rewinds,
            host_facts.boot(),
        )
        path = self.sandbox.plan.directory / NOTE
        path.with_suffix(".new").write_bytes(msgspec.msgpack.encode(note))
        path.with_suffix(".new").rename(path)

    def noted(self) -> bool:
        return (self.sandbox.plan.directory / NOTE).exists()

    def unnote(self) -> None:
        """Delete the note: the capsule does not run here, or not yet."""
        (self.sandbox.plan.directory / NOTE).unlink(missing_ok=True)

    def end_silently(self) -> None:
        """End the sandbox with its network locked, so that no peer sees a connection close.

        No task of it is left then. Raises Refused if one is left after 10 s.
        """
        sandbox = self.sandbox
        if not sandbox.alive():
            return
        with contextlib.suppress(LiveshiftError):  # it has just ended; else its end matters more
            network_lock.lock(sandbox.init)
        sandboxes.end(sandbox)
        if sandbox.alive():
            raise Refused(
                f"{self.spec.name} cannot be ended: its process 1 (pid {sandbox.init}) still runs",
                hint="`ps` shows which of its tasks the kernel holds in state D;"
                " a restart of the host ends them",
            )

    def delivers(self) -> bool:
        """Whether a peer of a command that has ended has yet to get what it had sent. False once a
        later sandbox has the capsule's network."""
        with contextlib.suppress(OSError):
            if not self.removed and sandbox_owner.owns(self.sandbox):
                return last_bytes.under_way(self.sandbox.plan.netns)
        return False

    def unplug(self) -> None:
        """Remove the capsule's network, unless a later sandbox has it. May be repeated."""
        self.links.end()
        if not self.removed and sandbox_owner.owns(self.sandbox):
            network.unplug(self.overlay, self.netns, self.spec.index)

    def remove(self) -> None:
        """End the sandbox, and remove its network and directory, unless a later sandbox of the
        capsule has them. A second call does no harm."""
        if self.code is None:  # else its process 1 has ended, and its pid may be in use again
            sandboxes.end(self.sandbox)
        self.links.end()
        if not self.removed and sandbox_owner.owns(self.sandbox):
            network.unplug(self.overlay, self.netns, self.spec.index)
            shutil.rmtree(self.sandbox.plan.directory, ignore_errors=True)
        self.removed = True


@dataclass(frozen=True)
class CapsuleFactory:
    """Makes capsules on this host; it knows where their directories lie, and the cluster file."""

    cluster: Cluster
    host: str

    @property
    def placement(self) -> Placement:
        files = self.cluster.files
        return Placement(tuple(map(str, files.shared)), tuple(map(str, files.carried)))

    def images(self, migration: str) -> Path:
        """The directory of a migration's image, on the destination, and of CRIU's hooks, on both
        hosts."""
        return self.cluster.paths.run / "images" / migration

    def resident(self, reserve: Reserve, sandbox: Sandbox) -> RunningCapsule:
        """The capsule for which a sandbox is reserved."""
        return RunningCapsule(reserve.spec, reserve.epoch, overlay_of(reserve.book), sandbox)

    def plan(self, spec: CapsuleSpec) -> SandboxPlan:
        paths = self.cluster.paths
        return SandboxPlan(
            directory=paths.state / "capsules" / spec.name.replace("/", "."),
            netns=Path("/run/netns") / netns_name(spec.name),
            hostname=spec.name.replace("/", "-"),
            hosts_file=spec.hosts_file,
            uid=spec.uid,
            gid=spec.gid,
            groups=tuple(spec.groups),
            shared=tuple(map(str, self.cluster.files.shared)),
            hidden=tuple(map(str, (paths.run, paths.state, paths.keys))),
            log_max=self.cluster.logs.max,
            log_keep=self.cluster.logs.keep,
        )

    def clear_unfinished(self, keep: set[str]) -> None:
        """End sandboxes that an earlier agent built for moves that it did not finish.

        ``keep``: directories of capsules that are still arriving. A restored capsule has its note
        before it runs. A capsule without a note runs, or will run, on its source. One whose note
        is empty went down with this host, soon after the note was written: the kernel writes a
        file's data later than its name.
        """
        for directory in (self.cluster.paths.state / "capsules").glob("*"):
            note = directory / NOTE
            written = note.exists() and note.stat().st_size > 0
            if not written and directory.name not in keep:
                network.end_namespace(netns_name(directory.name))
                shutil.rmtree(directory, ignore_errors=True)

    def returning(self) -> list[RunningCapsule]:
        """Capsules that an earlier agent left here; some may have ended since."""
        found = []
        for path in sorted((self.cluster.paths.state / "capsules").glob(f"*/{NOTE}")):
            try:
                note = msgspec.msgpack.decode(path.read_bytes(), type=CapsuleNote)
            except msgspec.DecodeError as error:
                raise LiveshiftError(
                    f"cannot read what {path} says of a capsule that ran here: {error}",
                    hint="another version of liveshift may have written it; if the capsule does not"
                    f" run any more (`ps`), remove {path.parent}",
                ) from None
            sandbox = Sandbox(self.plan(note.spec), note.init, note.init_started)
            overlay = Overlay(note.vni, note.subnet, note.rewinds)
            here = RunningCapsule(note.spec, note.epoch, overlay, sandbox)
            here.rebooted = note.boot not in ("", host_facts.boot())
            found.append(here)  # if it has ended without a code, it went down with this host
        return found

    def start(self, spec: CapsuleSpec, book: Book, epoch: int) -> RunningCapsule:
        """Start a capsule afresh; raises LiveshiftError or OSError, and then leaves nothing."""
        self._need_interposer(spec)
        with self._sandbox_plan(spec, book, locked=False) as plan:
            sandbox = sandboxes.start(plan, spec.argv, spec.env, spec.cwd, spec.umask)
            sandbox_owner.mark(sandbox)
        resident = RunningCapsule(spec, epoch, overlay_of(book), sandbox)
        resident.note()
        return resident

    def _need_interposer(self, spec: CapsuleSpec) -> None:
        """Raises Refused if the file is missing: the dynamic linker only warns and goes on."""
        path = spec.env.get("LD_PRELOAD", "").partition(":")[0]
        if path and not os.path.isfile(path):
            raise Refused(
                f"{self.host} has no {path}, which the orchestrator names for every rank:"
                " ranks would run without gates, and could not move",
                hint="install liveshift at the same path on all machines, under the same minor"
                " version of Python, which is part of that path",
            )

    def build_sandbox(self, reserve: Reserve) -> RunningCapsule:
        """Build an empty, locked sandbox for the tree that a Reserve announces.

        Raises LiveshiftError or OSError, and leaves nothing behind then.
        """
        with self._sandbox_plan(reserve.spec, reserve.book, locked=True) as plan:
            last = pids.place(reserve.survey.ids, pids.limit())
            assert last is not None  # the preflight has checked this
            if is_restore_name(reserve.migration):
                output.begin_after_rewind(plan.log, reserve.book.rewinds)
            sandbox = sandboxes.build_empty(plan, ROOT_PID, last)
            sandbox_owner.mark(sandbox)
        return self.resident(reserve, sandbox)

    @contextlib.contextmanager
    def _sandbox_plan(
        self, spec: CapsuleSpec, book: Book, *, locked: bool
    ) -> Iterator[SandboxPlan]:
        """Make the capsule's directory and network for the sandbox that the context makes; an error
        in it removes both. The files of an earlier stay on this host are removed."""
        overlay, plan, netns = self.raise_overlay(book), self.plan(spec), netns_name(spec.name)
        shutil.rmtree(plan.directory, ignore_errors=True)
        plan.directory.parent.mkdir(parents=True, exist_ok=True)
        plan.directory.mkdir(mode=0o700)  # only root may read the job's environment
        relayed = [host.address for host in self.cluster.hosts] if self.cluster.relay else None
        try:
            network.plug_in(overlay, netns, spec.index, book.where, locked, spec.uid, relayed)
            yield plan
        except BaseException:
            network.unplug(overlay, netns, spec.index)
            shutil.rmtree(plan.directory, ignore_errors=True)
            raise

    def raise_overlay(self, book: Book, *, lay_again: bool = False) -> Overlay:
        overlay, address = overlay_of(book), self.cluster.host(self.host).address
        network.raise_overlay(overlay, address, self._surroundings(), lay_again=lay_again)
        return overlay

    def hold_fence(self) -> None:
        """Put the firewall rules of this host in force: see fence.hold."""
        fence.hold(self._surroundings())

    def _surroundings(self) -> Surroundings:
        cluster = self.cluster
        return Surroundings(
            [host.address for host in cluster.hosts],
            str(cluster.overlay),
            control=[cluster.orchestrator],
            agents=[end for host in cluster.hosts for end in (host.data, host.pages)],
            relay=cluster.relay.address if cluster.relay else "",
        )


def overlay_of(book: Book) -> Overlay:
    """The overlay that an address book is about."""
    return Overlay(book.vni, book.subnet, book.rewinds)


def netns_name(capsule: str) -> str:
    return "ls-" + capsule.replace("/", ".")


def watch(resident: RunningCapsule, ended: Callable[[], None]) -> None:
    """Call ``ended`` in this thread's event loop once the sandbox's process 1 has ended."""
    loop = asyncio.get_running_loop()
    try:
        pidfd = os.pidfd_open(resident.sandbox.init)
    except ProcessLookupError:
        loop.call_soon(ended)
        return

    def gone() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        ended()

    loop.add_reader(pidfd, gone)
