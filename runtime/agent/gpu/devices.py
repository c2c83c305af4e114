# SPDX-License-Identifier: Apache-2.0
"""The CUDA processes of a capsule: their device state leaves the GPUs, and is brought back.

For each process, one after the other, at the source (:meth:`DeviceTree.save`):

1. hold: ptrace stops every thread except those of the driver and of liveshift, each while it is
   outside of the driver's calls (cuda_snapshot/whereabouts.py says why). Then the driver locks the
   process, which waits until all of its work on GPUs has ended, and unlocks it.
2. session: the service thread takes checksums, and hands the memory of the interposer's own
   allocations to the helper; their addresses stay reserved (the fast path).
3. lock, checkpoint: the rest goes into the process's host memory.
4. stop (SIGSTOP), release: the threads run no instruction until their memory is back.

And back (:meth:`DeviceTree.bring_back`): hold, continue (SIGCONT), restore, unlock, session (map
memory at its old addresses, compare checksums), release. A process without a service thread is only
locked and checkpointed.

After an interruption, bring_back asks the driver and the helper how far the work had come. The
helper outlives its agent: it keeps threads held, and memory, for the restarted agent.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field

from ....criu_glue.capsule.tree import inner_pid, tasks
from ....cuda_snapshot import threads
from ....cuda_snapshot.checkpoint import CudaState
from ....cuda_snapshot.helper.client import GpuHelper
from ....cuda_snapshot.helper.session_client import DeviceSession
from ....errors import LiveshiftError, StepFailed
from ....interposer.layout import MemoryKind
from ....interposer.orders import OrderedPage
from ...config.cluster import Cluster, FastPathChoice, Verify
from ...model.stopwatch import Stopwatch
from ..host.rank_pages import lives, ordered_pages
from ..host.running_capsule import RunningCapsule
from .cuda_processes import CudaProcess, device_session, maps_driver, served
from .device_state import (
    DeviceLost,
    SavedDevices,
    compare,
    left_to_driver,
    words_of_return,
    words_of_save,
)
from .stopped_processes import StoppedProcesses, continue_parents, running_parents
from .watch import OFF, GpuWatch

log = logging.getLogger("liveshift.devices")

SAMPLES = 4
"""A sampled checksum reads this many blocks of 4 KiB of each allocation."""

OUTSIDE_S = 5.0
"""A hold waits at most this many seconds until every thread is outside of the driver's calls."""

STOP_S = 5.0
"""A process must stop within this many seconds after SIGSTOP."""


@dataclass(frozen=True)
class Devices:
    """The GPUs of a host, as its migrations use them."""

    gpus: GpuWatch
    cluster: Cluster

    def tree(
        self,
        migration: str,
        resident: RunningCapsule,
        *,
        full: bool = False,
        plain: str = "",
        only: Collection[int] = (),
    ) -> DeviceTree | None:
        """The CUDA processes for one migration of a capsule. ``full``: take checksums over every
        byte; ``plain``: why the other host cannot take memory from the helper; ``only``: pids
        inside, if only some processes go. Returns None if no GPU here can be used. Blocks."""
        helper = self.gpus.helper()
        if helper is None:
            return None
        gpu = self.cluster.gpu
        samples = 0 if full else {Verify.OFF: None, Verify.FULL: 0}.get(gpu.verify, SAMPLES)
        here = helper.host()
        if gpu.fast_path is FastPathChoice.OFF:
            why = OFF
        else:
            why = here.fast_path or (f"at the destination: {plain}" if plain else "")
        if here.sessions and samples is not None:
            log.warning("%s: no checksums of device memory: %s", migration, here.sessions)
            samples = None
        limit = self.cluster.timeouts.gpu_lock
        return DeviceTree(resident, helper, migration, limit, samples, why, only, not here.sessions)

    def left(self, migration: str, resident: RunningCapsule) -> DeviceTree | None:
        """The same for a move that an earlier agent began; it is only ended, not continued."""
        return self.tree(migration, resident, plain="an earlier agent has begun it")

    def drop_all_but(self, known: Callable[[], Collection[str]]) -> bool:
        """Make the helper drop the memory of migrations that are not in ``known``. Returns False
        if the helper cannot be asked now. Blocks."""
        if not self.gpus.present():
            return True
        try:
            helper = self.gpus.helper()
            if helper is None:
                return False
            held = helper.held()
            keep = known()  # after held(): a migration is known before the helper holds its memory
            for key in [k for k in held if k.partition("/")[0] not in keep]:
                log.warning("device memory of %s, which no migration needs, is dropped", key)
                helper.drop(key)
        except LiveshiftError as error:
            log.warning("%s", error)
            return False
        return True


@dataclass
class DeviceTree:
    """The CUDA processes of one capsule, for one migration.

    ``samples``: blocks of 4 KiB per allocation and checksum, 0 for every byte, None for no
    checksums. ``plain``: why the helper may not take memory, "" if it may. ``only``: pids inside
    the capsule; empty means all processes. ``sessions``: whether this driver allows sessions. Every
    method blocks.
    """

    resident: RunningCapsule
    helper: GpuHelper
    migration: str
    lock_s: float
    samples: int | None = SAMPLES
    plain: str = ""
    only: Collection[int] = ()
    sessions: bool = True
    saved: list[SavedDevices] = field(default_factory=list)
    _held: list[int] = field(default_factory=list)  # pids that arrive() holds

    def warm(self, gpus: Sequence[str]) -> str:
        """While the job trains, prepare the helper to take memory of these GPUs. Returns why it
        cannot, and then the driver's own checkpoint takes all. drop and bring_back undo this."""
        if self.plain or not gpus:
            return ""
        try:
            self.helper.warm(f"{self.migration}/warm", gpus)  # a key that no process has
        except LiveshiftError as error:
            log.warning("%s: the fast path is not taken: %s", self.migration, error)
            self.plain = str(error)
        return self.plain

    # ---- at the source -------------------------------------------------------------------------

    def save(self, watch: Stopwatch) -> list[SavedDevices]:
        """Take the device state off the GPUs. Raises StepFailed; bring_back then undoes what was
        done."""
        with self._processes(self.only) as found:
            if not found:
                return []
            for process in found:
                process.check_runs("gpu save")
            with watch.phase("gpu save", frozen=True) as lap:
                for process in found:
                    self.saved.append(self._save(process))
                lap.bytes = sum(sum(saved.used.values()) for saved in self.saved) or None
                lap.detail = words_of_save(self.saved, self.plain)
        return self.saved

    def _save(self, process: CudaProcess) -> SavedDevices:
        helper, pid = self.helper, process.pid
        used = helper.used(pid)
        if process.page is None or not self._needs_session(process.page):
            helper.lock(pid, self.lock_s)
            helper.checkpoint(pid)
            return SavedDevices(process.inner, used=used)
        helper.hold(pid, outside_s=OUTSIDE_S)
        helper.lock(pid, self.lock_s)
        helper.unlock(pid)
        with self._session(process) as session:
            sums = {} if self.samples is None else session.checksums(self.samples)
            blocks = [] if self.plain else session.give_up(self.key(process.inner))
            if self.plain:
                session.own()
        helper.lock(pid, self.lock_s)
        parents = self._running_parents(pid)
        self._stopped.add(process.inner, parents)
        helper.checkpoint(pid)
        threads.stop(pid, STOP_S)
        helper.release(pid)
        return SavedDevices(process.inner, blocks, used, sums, self.samples, True, parents)

    def _needs_session(self, page: OrderedPage) -> bool:
        """A session moves the memory and takes checksums. It also makes memory that once came from
        a helper the process's own, as otherwise its checkpoint may fail."""
        arena = any(row.kind == MemoryKind.ARENA for row in page.allocations())
        return self.sessions and (not self.plain or self.samples is not None or arena)

    def drop(self) -> None:
        """Make the helper drop the memory: it lives on elsewhere."""
        for key in [k for k in self.helper.held() if k.startswith(self.migration + "/")]:
            self.helper.drop(key)

    # ---- back on a GPU -------------------------------------------------------------------------

    def bring_back(self, watch: Stopwatch, gpus: Sequence[tuple[str, str]] = ()) -> None:
        """Put the device state onto GPUs again, and let the processes go on. ``gpus``: the full map
        of (old, new) UUIDs; empty: onto the same GPUs.

        May be called again, also for state that never left its GPU. Raises DeviceLost, or
        StepFailed if another attempt is possible."""
        self._continue_stopped()
        with self._processes(self.only) as found, watch.phase("gpu restore", frozen=True) as lap:
            ours = {saved.pid for saved in self.saved}
            for process in found:
                if threads.stopped(process.pid):  # by a user
                    if process.inner in ours or self.key(process.inner) in self.helper.held():
                        process.check_runs("gpu restore")
                    continue  # its state has not left its GPU
                self._bring_back(process, gpus)
                self.helper.release(process.pid)
            lap.detail = words_of_return(self.saved)
        self.continue_parents({parent for ours in self._noted().values() for parent in ours})
        self._stopped.forget(self.only)
        self.drop()  # the rest belongs to processes that have ended meanwhile

    def continue_parents(self, parents: Collection[int] = ()) -> None:
        """Let parents go on that have stopped themselves because their child was stopped.
        ``parents``: their pids inside; by default those that :meth:`save` noted at the source."""
        of = set(parents) or {parent for saved in self.saved for parent in saved.parents}
        if of:
            continue_parents(lambda: self._pids(of))

    def off_gpus(self) -> bool:
        """Whether some device state is on no GPU now, and could be brought back to any."""
        with self._processes(self.only) as found:
            return any(
                threads.stopped(process.pid)
                or self.helper.state(process.pid) is CudaState.CHECKPOINTED
                for process in found
            )

    def arrive(self, watch: Stopwatch, gpus: Sequence[tuple[str, str]]) -> None:
        """Put the device state of a stopped tree, which waits for its grant, onto this host's GPUs.
        Until :meth:`end`, only the threads of the driver and of liveshift run in its processes, and
        the processes end if their helper ends."""
        of = {saved.pid for saved in self.saved}
        with self._processes(of) as found, watch.phase("gpu restore", frozen=True) as lap:
            missing = of - {process.inner for process in found}
            if missing:
                raise StepFailed("gpu restore", f"no CUDA process {sorted(missing)[0]} is here")
            for process in found:
                self.helper.hold(process.pid, kill_on_exit=True)
                self._held.append(process.pid)
                os.kill(process.pid, signal.SIGCONT)
                self._bring_back(process, gpus)
            lap.detail = words_of_return(self.saved)

    def recover_held(self, *, some: bool = False) -> None:
        """Find the processes that :meth:`arrive` held in an earlier agent. Raises StepFailed if
        some are missing, unless ``some`` is set."""
        of = {saved.pid for saved in self.saved}
        with self._processes(of) as found:
            self._held = [process.pid for process in found if self.helper.holds(process.pid)]
        if len(self._held) < len(of) and not some:
            raise StepFailed(
                "gpu restore", f"only {len(self._held)} of {len(of)} processes are held"
            )

    def spare_from_exit(self) -> None:
        """The processes that :meth:`arrive` holds were granted: they no longer end with their
        helper. Raises StepFailed if one has ended that way already."""
        for pid in self._held:
            self.helper.spare_from_exit(pid)

    def end(self) -> None:
        """Release all processes that :meth:`arrive` holds; then raise the last error, if any."""
        failed: LiveshiftError | None = None
        while self._held:
            try:
                self.helper.release(self._held.pop())
            except LiveshiftError as error:
                failed = error
        if failed is not None:
            raise failed

    def _bring_back(self, process: CudaProcess, gpus: Sequence[tuple[str, str]]) -> None:
        helper, pid, key = self.helper, process.pid, self.key(process.inner)
        state, holds = helper.state(pid), helper.holds(pid)
        ours = key in helper.held()
        if state is CudaState.RUNNING and not ours and not holds:
            return
        saved = next((s for s in self.saved if s.pid == process.inner), SavedDevices(process.inner))
        verify = saved.samples is not None and bool(saved.sums)
        if state is None:
            raise StepFailed("gpu restore", f"process {process.inner}: the driver does not know it")
        if state is CudaState.CHECKPOINTED and saved.blocks and not ours:
            raise DeviceLost(
                "gpu restore",
                f"process {process.inner}: the GPU helper had its memory, and has it no more",
                hint="the helper's log says why it ended: gpu-helper.log in the run directory",
            )
        if process.page is None and ours:
            raise DeviceLost("gpu restore", f"process {process.inner} has no page any more")
        if not holds and (ours or verify):
            helper.hold(pid)
        if state is CudaState.FAILED:
            raise DeviceLost("gpu restore", f"process {process.inner}: its CUDA state has failed")
        if state is CudaState.CHECKPOINTED:
            # Without a table, the helper knows what the process held at its checkpoint.
            needed = left_to_driver(saved, gpus) if saved.used else None
            helper.restore(pid, gpus, needed=needed)
        if state is not CudaState.RUNNING:
            helper.unlock(pid)
        if process.page is not None and (ours or verify):
            with self._session(process) as session:
                if ours:
                    # ``keep``: a restore that fails later is repeated from the same memory.
                    arrived = pid in self._held  # its memory is already on this host's GPUs
                    session.take_back(key, keep=arrived, gpus=() if arrived else gpus)
                if verify:
                    compare(saved, session.checksums(saved.samples or 0))

    def _continue_stopped(self) -> None:
        """Let the driver's threads run in the processes that :meth:`save` has stopped, while all
        others are held. A driver's request to a stopped process would wait for its SIGCONT."""
        for pid in self._pids(self._noted()):
            with suppress(ProcessLookupError):
                self.helper.hold(pid)
                os.kill(pid, signal.SIGCONT)

    def _noted(self) -> dict[int, list[int]]:
        """Those of this tree that :meth:`save` has stopped, with their parents; pids inside."""
        noted = self._stopped.read().items()
        return {pid: parents for pid, parents in noted if not self.only or pid in self.only}

    def _running_parents(self, pid: int) -> list[int]:
        return running_parents(self.resident.sandbox, pid)

    # ---- both ----------------------------------------------------------------------------------

    @property
    def _stopped(self) -> StoppedProcesses:
        return StoppedProcesses(self.resident.sandbox.plan.directory)

    def key(self, inner: int) -> str:
        """The helper's name for a process's memory."""
        return f"{self.migration}/{inner}"

    @contextmanager
    def _processes(self, of: Collection[int] = ()) -> Iterator[list[CudaProcess]]:
        """The processes by pid: those in ``of``, or else those that the driver knows or whose
        memory the helper holds. Their pages are open meanwhile."""
        pages = {page_pid: page for page, page_pid in ordered_pages(self.resident)}
        try:
            found, living = [], [task for task in tasks(self.resident.sandbox) if lives(task.pid)]
            for task in living:
                with suppress(FileNotFoundError, ProcessLookupError):
                    inner = inner_pid(task.pid)
                    if inner in of or (not of and self._is_cuda(task.pid, inner)):
                        found.append(CudaProcess(task.pid, inner, served(pages.get(task.pid))))
            yield sorted(found, key=lambda process: process.inner)
        finally:
            for page in pages.values():
                page.close()

    def _pids(self, of: Collection[int]) -> list[int]:
        """The host's pids of processes of the capsule, given by their pids inside."""
        found = list[int]()
        for task in tasks(self.resident.sandbox) if of else ():
            with suppress(FileNotFoundError, ProcessLookupError):
                if inner_pid(task.pid) in of:
                    found.append(task.pid)
        return found

    def _is_cuda(self, pid: int, inner: int) -> bool:
        if not maps_driver(pid):
            return False
        if threads.stopped(pid):
            return True  # it may be one; the driver would not answer before it goes on
        return self.helper.state(pid) is not None or self.key(inner) in self.helper.held()

    def _session(self, process: CudaProcess) -> AbstractContextManager[DeviceSession]:
        return device_session(self.helper, self.resident, process)


FindDevices = Callable[[], DeviceTree | None]
"""Finds the CUDA processes of a migration that an earlier agent began; None if there is no GPU
helper. It is called once they are needed, and again at the next attempt."""


def no_devices() -> None:
    """The FindDevices of a migration that this agent began: it has them from the beginning."""
