# SPDX-License-Identifier: Apache-2.0
"""The agent's end of the GPU helper: blocking calls that any number of threads may make.

Every call has a connection of its own while it lasts, so the helper can answer a question while an
operation runs. The client keeps connections open, so the helper does not end while a client lives.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from ...errors import LiveshiftError, NotPermitted, StepFailed, Unreachable
from ..checkpoint import CudaState
from .calls import (
    LOG,
    PROTOCOL,
    SOCKET,
    Checkpointed,
    CheckpointProcess,
    GetHost,
    HelloHelper,
    HelperRequest,
    Holds,
    HoldThreads,
    HostGpus,
    Leave,
    Lock,
    Operation,
    Release,
    RestoreProcess,
    RestoreThread,
    SpareFromExit,
    State,
    Unlock,
    Used,
    Welcome,
)
from .channel import Channel, connect
from .connection import QUESTION_S, Closing, HelperConnection
from .memory_client import DeviceMemoryCalls
from .starting import starting

IDLE_S = 60.0
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

T = TypeVar("T")


class GpuHelper(Closing, DeviceMemoryCalls):
    """A host's helper; use :meth:`start`. pids are as this process sees them.

    Every method raises Unreachable if the helper does not answer (if the helper has gone, the next
    call starts another one), and NotPermitted if the caller is not root.
    """

    def __init__(self, directory: Path, libraries: Path | None, idle_s: float = IDLE_S) -> None:
        self._directory, self._libraries, self._idle_s = directory, libraries, idle_s
        self._mutex = threading.Lock()
        self._idle: list[HelperConnection] = []
        self._closed = False

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

    def close(self) -> None:
        """Close the client's connections. The helper stays for a while."""
        with self._mutex:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.channel.close()

    # ---- questions -----------------------------------------------------------------------------

    def host(self) -> HostGpus:
        """The driver and GPUs, as NVML sees them now. Takes some milliseconds, or NVML's deadline
        of 20 s if a GPU hangs."""
        return self._question(GetHost(), HostGpus)

    def state(self, pid: int) -> CudaState | None:
        """The driver's state of the process. None: it does not use CUDA, or does not exist."""
        return self._question(State(pid), CudaState | None)

    def restore_thread(self, pid: int) -> int:
        """The process's thread that must be able to run in every operation. Raises StepFailed."""
        return self._question(RestoreThread(pid), int)

    def used(self, pid: int) -> dict[str, int]:
        """The process's device memory in bytes by GPU UUID; {} if NVML can't report it."""
        return self._question(Used(pid), dict[str, int])

    # ---- operations ----------------------------------------------------------------------------
    # Operations raise StepFailed, whose text says in which state the process is now. If a caller
    # stops waiting, the operation still runs to its end: a caller of the driver is never killed.

    def lock(self, pid: int, timeout_s: float, *, turn_s: float = TURN_S) -> None:
        """RUNNING to LOCKED: the process's CUDA calls wait at their entry, and its submitted work
        is done. If that takes longer than ``timeout_s``, the process is RUNNING again."""
        self._operation(Lock(pid, turn_s, timeout_s), timeout_s + DRAIN_S)

    def checkpoint(self, pid: int) -> Checkpointed:
        """LOCKED to CHECKPOINTED; afterwards the process holds nothing on any GPU. The answer says
        what it held, which a restore on another host needs."""
        answer = self._operation(CheckpointProcess(pid, TURN_S), returns=Checkpointed)
        return cast(Checkpointed, answer)

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
        pairs = [(old, new) for old, new in gpus]
        needs = None if needed is None else dict(needed)
        self._operation(RestoreProcess(pid, TURN_S, pairs, needs))

    def unlock(self, pid: int, *, turn_s: float = TURN_S) -> None:
        """LOCKED to RUNNING."""
        self._operation(Unlock(pid, turn_s))

    # ---- threads -------------------------------------------------------------------------------

    def hold(self, pid: int, *, kill_on_exit: bool = False) -> None:
        """Stop the process's threads, except the driver's and liveshift's service thread. The
        helper holds them until :meth:`release`, also after this client's end. Raises StepFailed,
        which names a thread that does not stop in time; then no thread is held."""
        self._change(HoldThreads(pid, kill_on_exit, HOLD_S), HOLD_S)

    def holds(self, pid: int) -> bool:
        """Whether the helper holds the process."""
        return self._question(Holds(pid), bool)

    def spare_from_exit(self, pid: int) -> None:
        """A process that was held with ``kill_on_exit`` is no longer killed if the helper ends.
        Raises StepFailed if it is not held: for example, it has ended with an earlier helper."""
        self._change(SpareFromExit(pid))

    def release(self, pid: int) -> None:
        """Let the process's threads go on, if they are held. A helper that has gone holds none."""
        self._question(Release(pid), None)

    def _change(self, request: HoldThreads | SpareFromExit, within_s: float = 0.0) -> None:
        with self.connection() as connection:
            connection.ask(request, None, QUESTION_S + within_s)

    # ---- connections ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def connection(self) -> Iterator[HelperConnection]:
        """A connection while the context lasts: an idle one or a new one. Its errors are raised as
        Unreachable. A connection whose answer has not come is closed."""
        connection = self._take()
        try:
            yield connection
        except (EOFError, OSError) as error:
            connection.usable = False
            raise self._unreachable(error) from error
        finally:
            with self._mutex:
                keep = connection.usable and not self._closed
                if keep:
                    self._idle.append(connection)
            if not keep:
                connection.channel.close()

    @contextlib.contextmanager
    def apart(self) -> Iterator[HelperConnection]:
        """A connection that the caller keeps and must close; this closes it only on an error."""
        connection = self._take()
        connection.channel.socket.settimeout(None)
        try:
            yield connection
        except (EOFError, OSError) as error:
            connection.channel.close()
            raise self._unreachable(error) from error
        except BaseException:
            connection.channel.close()
            raise

    def leave(self) -> None:
        """Ask the helper to end now. Raises Refused while it holds device memory."""
        with self.connection() as connection:
            connection.ask(Leave(), None)
            connection.usable = False

    def _take(self) -> HelperConnection:
        while True:
            with self._mutex:
                if self._closed:
                    raise Unreachable("this client of the GPU helper has been closed")
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._connect()
            if not connection.channel.peer_gone():
                return connection
            connection.channel.close()

    def _connect(self) -> HelperConnection:
        connection = self._greeted()
        if connection is not None:
            return connection
        try:
            with starting(self._directory, self._libraries, self._idle_s) as launch:
                # While we waited for the lock file, another client may have started a helper.
                connection = self._greeted()
                if connection is None:
                    launch()
                    connection = self._greeted()
        except OSError as error:
            raise Unreachable(
                f"no GPU helper can be started in {self._directory}: {error}"
            ) from error
        if connection is None:
            raise Unreachable(f"the GPU helper in {self._directory} ended right after its start")
        return connection

    def _greeted(self) -> HelperConnection | None:
        """A connection to a helper that speaks our protocol; None if no helper listens."""
        try:
            channel = Channel(connect(self._directory, SOCKET))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except PermissionError as error:
            raise NotPermitted(
                f"the GPU helper in {self._directory} is for root only", hint="run this as root"
            ) from error
        except OSError as error:
            raise self._unreachable(error) from error
        connection = HelperConnection(channel)
        try:
            welcome = connection.ask(HelloHelper(), Welcome)
        except (EOFError, ConnectionError):
            channel.close()  # it was leaving
            return None
        except OSError as error:
            channel.close()
            raise self._unreachable(error) from error
        if welcome.protocol != PROTOCOL:
            channel.close()
            raise Unreachable(
                f"the GPU helper {welcome.pid} speaks protocol {welcome.protocol}, this is"
                f" {PROTOCOL}: another version of liveshift has started it",
                hint=f"kill {welcome.pid} (SIGTERM): it ends when it holds nothing more, and the"
                " next one is started",
            )
        return connection

    def _unreachable(self, error: BaseException) -> LiveshiftError:
        said = "no answer in time" if isinstance(error, TimeoutError) else str(error)
        return Unreachable(
            f"the GPU helper in {self._directory} does not answer: {said}",
            hint=f"its log is {self._directory / LOG}",
        )

    def _question(self, request: HelperRequest, returns: type[T] | Any) -> T:
        """Ask a question; if the helper ended meanwhile, ask the next one, whose answer is as
        good."""
        try:
            with self.connection() as connection:
                return cast(T, connection.ask(request, returns))
        except Unreachable as error:
            if not isinstance(error.__cause__, EOFError | ConnectionError):
                raise
        with self.connection() as connection:
            return cast(T, connection.ask(request, returns))

    def _operation(
        self, request: Operation, within_s: float = OPERATION_S, returns: Any = None
    ) -> Any:
        with self.connection() as connection:
            try:
                return connection.ask(request, returns, request.turn_s + within_s)
            except TimeoutError:
                raise StepFailed(
                    f"gpu {request.what}",
                    f"process {request.pid}: not done within {within_s:g} s; the driver has not"
                    " finished",
                    hint="a process that is stopped, or a GPU that hangs, keeps the driver waiting",
                ) from None
