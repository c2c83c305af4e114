# SPDX-License-Identifier: Apache-2.0
"""The agent's end of the GPU helper: blocking calls, for any number of threads.

Every call has a connection of its own while it lasts, so that a question is answered while an
operation runs. One is kept for as long as the client lives, which keeps the helper there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from ...errors import LiveshiftError, NotPermitted, StepFailed, Unreachable
from ..checkpoint import ProcessState
from .calls import (
    LOG,
    PROTOCOL,
    SOCKET,
    Ask,
    Checkpoint,
    Checkpointed,
    Hello,
    Holds,
    HoldThreads,
    Host,
    HostGpus,
    Leave,
    Lock,
    Release,
    Restore,
    RestoreThread,
    SpareFromExit,
    State,
    Unlock,
    Used,
    Welcome,
)
from .channel import Channel, connect
from .line import QUESTION_S, Closing, Line
from .memory_client import DeviceMemoryCalls
from .starting import starting

IDLE_S = 60.0
TURN_S = 120.0
"""How long an operation waits for those before it on its host, by default."""
OPERATION_S = 600.0
"""After which a caller no longer waits for a checkpoint, restore or unlock. Where the driver copies
slowly, it copies 2 GB/s: 139 GiB take 75 s."""
HOLD_S = 5.0
"""A thread inside a system call of the driver may take its time."""
DRAIN_S = 30.0
"""Over a lock's own time limit, which the driver counts where the process can run."""

T = TypeVar("T")


class GpuHelper(Closing, DeviceMemoryCalls):
    """A host's helper; use :meth:`start`. pids are as this process sees them.

    Every method raises Unreachable where the helper does not answer (it is started anew by the next
    one where it has gone), and NotPermitted for who is not root.
    """

    def __init__(self, directory: Path, libraries: Path | None, idle_s: float = IDLE_S) -> None:
        self._directory, self._libraries, self._idle_s = directory, libraries, idle_s
        self._mutex = threading.Lock()
        self._idle: list[Line] = []
        self._closed = False

    @classmethod
    def start(
        cls, directory: Path, libraries: Path | None = None, *, idle_s: float = IDLE_S
    ) -> GpuHelper:
        """Connect to the helper of this directory; start it if nobody listens. ``libraries`` is a
        folder where the driver's libraries are looked for first. Raises LiveshiftError saying why
        there is none: no driver, no GPU, one that is too old. One that is started leaves when
        nobody was connected for ``idle_s`` seconds and it holds nothing."""
        helper = cls(directory, libraries, idle_s)
        with helper.line():
            pass
        return helper

    def close(self) -> None:
        """The helper stays, for a while."""
        with self._mutex:
            self._closed = True
            idle, self._idle = self._idle, []
        for line in idle:
            line.channel.close()

    # ---- questions -----------------------------------------------------------------------------

    def host(self) -> HostGpus:
        """The driver and GPUs, as NVML sees them now; takes some milliseconds, or NVML's deadline
        of 20 s where a GPU hangs."""
        return self._question(Host(), HostGpus)

    def state(self, pid: int) -> ProcessState | None:
        """None: it is no CUDA process, or there is none."""
        return self._question(State(pid), ProcessState | None)

    def restore_thread(self, pid: int) -> int:
        """The thread that must be able to run in every operation. Raises StepFailed."""
        return self._question(RestoreThread(pid), int)

    def used(self, pid: int) -> dict[str, int]:
        """Device memory in bytes by GPU UUID, by NVML; {} where it can't tell."""
        return self._question(Used(pid), dict[str, int])

    # ---- operations ----------------------------------------------------------------------------
    # They raise StepFailed, whose words say in which state the process was left. Who gives up
    # waiting leaves an operation to its end: no process that the driver works for is killed.

    def lock(self, pid: int, timeout_s: float, *, turn_s: float = TURN_S) -> None:
        """RUNNING to LOCKED: the process's CUDA calls wait at their entry, submitted work is done.
        Where that takes longer than ``timeout_s`` it is RUNNING again."""
        self._operation(Lock(pid, turn_s, timeout_s), "lock", timeout_s + DRAIN_S)

    def checkpoint(self, pid: int, *, turn_s: float = TURN_S) -> Checkpointed:
        """LOCKED to CHECKPOINTED; afterwards the process holds nothing on any GPU. What it held is
        in the answer, for whoever restores it elsewhere."""
        answer = self._operation(Checkpoint(pid, turn_s), "checkpoint", returns=Checkpointed)
        return cast(Checkpointed, answer)

    def restore(
        self,
        pid: int,
        gpus: Sequence[tuple[str, str]] = (),
        *,
        needed: Mapping[str, int] | None = None,
        turn_s: float = TURN_S,
    ) -> None:
        """CHECKPOINTED to LOCKED. ``gpus`` (old UUID, new UUID) name every GPU that the process
        could see; none: the same ones. ``needed`` says how many bytes must be free on which new
        GPU; by default what this helper saw at the process's checkpoint."""
        pairs = [(old, new) for old, new in gpus]
        needs = None if needed is None else dict(needed)
        self._operation(Restore(pid, turn_s, pairs, needs), "restore")

    def unlock(self, pid: int, *, turn_s: float = TURN_S) -> None:
        """LOCKED to RUNNING."""
        self._operation(Unlock(pid, turn_s), "unlock")

    # ---- threads -------------------------------------------------------------------------------

    def hold(self, pid: int, *, kill_on_exit: bool = False, timeout_s: float = HOLD_S) -> None:
        """Keep its threads still, but for the driver's and liveshift's service thread; the helper
        does so until :meth:`release`, also after this client's end. Raises StepFailed, with none
        held, naming a thread that does not stop in time."""
        self._change(HoldThreads(pid, kill_on_exit, timeout_s), timeout_s)

    def holds(self, pid: int) -> bool:
        """Whether it is held."""
        return self._question(Holds(pid), bool)

    def spare_from_exit(self, pid: int) -> None:
        """What was held with ``kill_on_exit`` does not end with the helper any more. Raises
        StepFailed where it is not held: it has ended with an earlier helper, say."""
        self._change(SpareFromExit(pid))

    def release(self, pid: int) -> None:
        """Let its threads go on, if they are held: a helper that has gone holds nobody."""
        self._question(Release(pid), None)

    def _change(self, ask: HoldThreads | SpareFromExit, within_s: float = 0.0) -> None:
        with self.line() as line:
            line.ask(ask, None, QUESTION_S + within_s)

    # ---- connections ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def line(self) -> Iterator[Line]:
        """A connection for a while: an idle one, or one made anew. What goes wrong with it is
        raised as Unreachable; one with an answer outstanding is closed."""
        line = self._take()
        try:
            yield line
        except (EOFError, OSError) as error:
            line.usable = False
            raise self._unreachable(error) from error
        finally:
            with self._mutex:
                keep = line.usable and not self._closed
                if keep:
                    self._idle.append(line)
            if not keep:
                line.channel.close()

    @contextlib.contextmanager
    def apart(self) -> Iterator[Line]:
        """A connection that is the caller's from then on; closed here only on an error."""
        line = self._take()
        line.channel.socket.settimeout(None)
        try:
            yield line
        except (EOFError, OSError) as error:
            line.channel.close()
            raise self._unreachable(error) from error
        except BaseException:
            line.channel.close()
            raise

    def leave(self) -> None:
        """Ask the helper to end now. Raises Refused while it holds device memory."""
        with self.line() as line:
            line.ask(Leave(), None)
            line.usable = False

    def _take(self) -> Line:
        while True:
            with self._mutex:
                if self._closed:
                    raise Unreachable("this client of the GPU helper has been closed")
                line = self._idle.pop() if self._idle else None
            if line is None:
                return self._connect()
            if not line.channel.peer_gone():
                return line
            line.channel.close()

    def _connect(self) -> Line:
        line = self._greeted()
        if line is not None:
            return line
        try:
            with starting(self._directory, self._libraries, self._idle_s) as launch:
                # Who waited for the lock file finds a helper that another has started meanwhile.
                line = self._greeted()
                if line is None:
                    launch()
                    line = self._greeted()
        except OSError as error:
            raise Unreachable(
                f"no GPU helper can be started in {self._directory}: {error}"
            ) from error
        if line is None:
            raise Unreachable(f"the GPU helper in {self._directory} went away when it had started")
        return line

    def _greeted(self) -> Line | None:
        """A connection to a helper that speaks our protocol, or None where there is none."""
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
        line = Line(channel)
        try:
            welcome = line.ask(Hello(), Welcome)
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
        return line

    def _unreachable(self, error: BaseException) -> LiveshiftError:
        said = "no answer in time" if isinstance(error, TimeoutError) else str(error)
        return Unreachable(
            f"the GPU helper in {self._directory} does not answer: {said}",
            hint=f"its log is {self._directory / LOG}",
        )

    def _question(self, ask: Ask, returns: type[T] | Any) -> T:
        """Asked once more where the helper left meanwhile, which changes no answer."""
        try:
            with self.line() as line:
                return cast(T, line.ask(ask, returns))
        except Unreachable as error:
            if not isinstance(error.__cause__, EOFError | ConnectionError):
                raise
        with self.line() as line:
            return cast(T, line.ask(ask, returns))

    def _operation(
        self,
        ask: Lock | Checkpoint | Restore | Unlock,
        what: str,
        within_s: float = OPERATION_S,
        returns: Any = None,
    ) -> Any:
        with self.line() as line:
            try:
                return line.ask(ask, returns, ask.turn_s + within_s)
            except TimeoutError:
                raise StepFailed(
                    f"gpu {what}",
                    f"process {ask.pid}: not done within {within_s:g} s; the driver is still at it",
                    hint="a process that is stopped, or a GPU that hangs, keeps the driver waiting",
                ) from None
