# SPDX-License-Identifier: Apache-2.0
"""The agent's end of the GPU helper: blocking calls that any number of threads may make.

Every call has a connection of its own while it lasts, so the helper can answer a question while an
operation runs. The client keeps connections open, so the helper does not end while a client lives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from ...errors import StepFailed, Unreachable
from ..checkpoint import CudaState
from . import calls
from .blocks import Block
from .calls import HelperRequest, HostGpus
from .connection import IDLE_S, QUESTION_S, HelperConnections
from .ring_client import Drain, Filler
from .session_client import DeviceSession

TURN_S = 120.0
"""By default an operation waits at most this many seconds for earlier operations on its host."""
OPERATION_S = 600.0
"""A caller waits at most this many seconds for a checkpoint, restore or unlock. A slow driver
copies 2 GB/s: 139 GiB take 75 s."""
HOLD_S = 5.0
"""A hold waits at most this many seconds for threads to stop: one inside a system call of the
driver needs time."""
DRAIN_S = 30.0
"""The caller waits this many seconds longer than a lock's own time limit: the driver counts that
limit only while the process can run."""
CREATE_S = 300.0
"""A client waits at most this many seconds until memory, and contexts on several GPUs, are made.
The driver clears the memory first."""

T = TypeVar("T")


class GpuHelper(HelperConnections):
    """A host's helper; use :meth:`start`. pids are as this process sees them.

    Every method raises Unreachable if the helper does not answer (if the helper has gone, the next
    call starts another one), and NotPermitted if the caller is not root.
    """

    @classmethod
    def start(
        cls, directory: Path, libraries: Path | None = None, *, idle_s: float = IDLE_S
    ) -> GpuHelper:
        """Connect to the helper of this directory; start one if none listens. ``libraries`` is the
        folder where the helper looks for the driver's libraries first. A started helper ends when
        it had no connection for ``idle_s`` seconds and holds nothing. Raises LiveshiftError with
        the reason if there can be no helper: no driver, no GPU, or a driver that is too old."""
        helper = cls(directory, libraries, idle_s)
        with helper.connection():
            pass
        return helper

    # ---- questions -----------------------------------------------------------------------------

    def host(self) -> HostGpus:
        """The driver and GPUs, as NVML sees them now. Takes some milliseconds, or NVML's deadline
        of 20 s if a GPU hangs."""
        return self._question(calls.GetHost(), HostGpus)

    def state(self, pid: int) -> CudaState | None:
        """The driver's state of the process. None: it does not use CUDA, or does not exist."""
        return self._question(calls.State(pid), CudaState | None)

    def used(self, pid: int) -> dict[str, int]:
        """The process's device memory in bytes by GPU UUID; {} if NVML can't report it."""
        return self._question(calls.Used(pid), dict[str, int])

    # ---- operations ----------------------------------------------------------------------------
    # Operations raise StepFailed, whose text says in which state the process is now. If a caller
    # stops waiting, the operation still runs to its end: a caller of the driver is never killed.

    def lock(self, pid: int, timeout_s: float, *, turn_s: float = TURN_S) -> None:
        """RUNNING to LOCKED: the process's CUDA calls wait at their entry, and its submitted work
        is done. If that takes longer than ``timeout_s``, the process is RUNNING again."""
        self._operation(calls.Lock(pid, turn_s, timeout_s), timeout_s + DRAIN_S)

    def checkpoint(self, pid: int) -> None:
        """LOCKED to CHECKPOINTED; afterwards the process holds nothing on any GPU."""
        self._operation(calls.CheckpointProcess(pid, TURN_S))

    def restore(
        self,
        pid: int,
        gpus: Sequence[tuple[str, str]] = (),
        *,
        needed: Mapping[str, int] | None = None,
    ) -> None:
        """CHECKPOINTED to LOCKED. ``gpus`` (old UUID, new UUID) name every GPU that the process
        could see; no pairs: the same GPUs. ``needed`` says how many bytes must be free on which new
        GPU; the default is what this helper saw at the process's checkpoint."""
        needs = None if needed is None else dict(needed)
        self._operation(calls.RestoreProcess(pid, TURN_S, list(gpus), needs))

    def unlock(self, pid: int, *, turn_s: float = TURN_S) -> None:
        """LOCKED to RUNNING."""
        self._operation(calls.Unlock(pid, turn_s))

    # ---- threads -------------------------------------------------------------------------------

    def hold(self, pid: int, *, kill_on_exit: bool = False, outside_s: float = 0.0) -> None:
        """Stop the process's threads, except the driver's and liveshift's service thread. The
        helper holds them until :meth:`release`, also after this client's end. Raises StepFailed,
        which names a thread that does not stop in time; then no thread is held.

        ``outside_s``: wait at most so long until each thread is outside of the CUDA driver's calls;
        0: hold them wherever they are."""
        request = calls.HoldThreads(pid, kill_on_exit, HOLD_S, outside_s)
        self._ask(request, None, QUESTION_S + HOLD_S + outside_s)

    def holds(self, pid: int) -> bool:
        """Whether the helper holds the process."""
        return self._question(calls.Holds(pid), bool)

    def spare_from_exit(self, pid: int) -> None:
        """A process that was held with ``kill_on_exit`` is no longer killed if the helper ends.
        Raises StepFailed if it is not held: for example, it has ended with an earlier helper."""
        self._ask(calls.SpareFromExit(pid), None)

    def release(self, pid: int) -> None:
        """Let the process's threads go on, if they are held. A helper that has gone holds none."""
        self._question(calls.Release(pid), None)

    # ---- device memory -------------------------------------------------------------------------
    # ``key`` is "<migration>/<inner pid>". The helper keeps its memory until it is dropped or taken
    # back, even if the agent that asked for it has ended.

    def warm(self, key: str, gpus: Sequence[str]) -> None:
        """Prepare the helper for memory of these GPUs until the key is dropped: it makes contexts
        and a pinned ring, which takes a second. Raises LiveshiftError if a GPU has no room for a
        context; then no memory there can be given up or created."""
        self._ask(calls.Warm(key, list(gpus)), None, CREATE_S)

    def create(self, key: str, blocks: Sequence[Block]) -> None:
        """Make physical memory for the blocks on their GPUs; all or nothing. Raises Refused if the
        key has memory already, LiveshiftError if a GPU hasn't the room."""
        self._ask(calls.Create(key, list(blocks)), None, CREATE_S)

    def drop(self, key: str) -> None:
        """Free the key's memory and end its copies. Does nothing if there is none."""
        self._ask(calls.Drop(key), None)

    def held(self) -> dict[str, int]:
        """Bytes by key; a key that was only warmed has 0."""
        return self._ask(calls.GetHeldMemory(), dict[str, int])

    def drain(self, key: str) -> Drain:
        """Read all bytes of the key's blocks, in their order; the memory stays. The caller must
        close the Drain or read it to its end. At most two copies run on a host at once and a third
        waits, so a thread that has a copy must not wait for another thread's copy."""
        with self.apart() as connection:
            connection.channel.send(msgspec.msgpack.encode(calls.CopyOut(key)))
            return Drain(connection.channel)

    def filler(self, key: str) -> Filler:
        """Write all bytes of the key's blocks, in their order; each call begins again at the
        first byte."""
        with self.apart() as connection:
            connection.channel.send(msgspec.msgpack.encode(calls.CopyIn(key)))
            return Filler(connection.channel)

    def session(self, pid: int, directory: Path, inner_pid: int) -> DeviceSession:
        """From now on the helper listens for the process's service thread in its directory of
        pages. The caller must then write the order DEVICES into the page. Raises StepFailed."""
        with self.apart() as connection:
            connection.ask(calls.BeginSession(pid, str(directory.absolute()), inner_pid), None)
            return DeviceSession(connection)

    # ---- all of them ---------------------------------------------------------------------------

    def _ask(
        self, request: HelperRequest, returns: type[T] | Any, within_s: float = QUESTION_S
    ) -> T:
        with self.connection() as connection:
            return cast(T, connection.ask(request, returns, within_s))

    def _question(self, request: HelperRequest, returns: type[T] | Any) -> T:
        """Ask a question; if the helper ended meanwhile, ask the next one, whose answer is as
        good."""
        try:
            return cast(T, self._ask(request, returns))
        except Unreachable as error:
            if not isinstance(error.__cause__, EOFError | ConnectionError):
                raise
        return cast(T, self._ask(request, returns))

    def _operation(self, request: calls.Operation, within_s: float = OPERATION_S) -> None:
        with self.connection() as connection:
            try:
                connection.ask(request, None, request.turn_s + within_s)
            except TimeoutError:
                raise StepFailed(
                    f"gpu {request.what}",
                    f"process {request.pid}: not done within {within_s:g} s; the driver has not"
                    " finished",
                    hint="a process that is stopped, or a GPU that hangs, keeps the driver waiting",
                ) from None
