# SPDX-License-Identifier: Apache-2.0
"""Keep the threads of processes still, all but some, and let them go on as if nothing had been.

A CUDA process cannot be stopped by a signal while its GPU is dealt with: the driver's restore
thread and the interposer's service thread have to run in it. So every other thread is seized by
ptrace and trapped. A process that is stopped (SIGSTOP) may be held too; on SIGCONT only the spared
threads go on, as the kernel leaves seized ones in their trap.

What a thread notices is what it would of a signal that it ignores: system calls are restarted, but
those that never are (signal(7): epoll_wait, sigtimedwait …) return EINTR. CRIU does the same to it.
Signals sent meanwhile wait until the end of the hold, unless a spared thread takes them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Container, Iterable
from concurrent.futures import Future

from .. import ptrace
from ..errors import StepFailed
from . import threads

SERVICE = "liveshift"
"""The interposer's service thread (interposer/service/service.c)."""

REAP_S = 0.02
"""How often a hold looks whether somebody has killed what it holds: a traced thread stays a zombie
until its tracer has taken note."""

DRIVERS = re.compile(r"cuda-EvtHandlr|cuda[0-9a-f]{8,}")
"""The CUDA driver's own threads: what one of them holds of the driver, or is to tell it, a call of
the service thread may wait for. Without a hold they run all through a checkpoint; they run nothing
of the application's but host functions, of which a lock has seen the last."""

Spared = Callable[[int], Container[int]]
"""The threads (as the host sees them) of a process that are not to be held."""


def spared_threads(pid: int, restore_thread: int) -> set[int]:
    """The threads of a CUDA process that must run while it is held, as the host sees them.

    ``restore_thread`` is what cuCheckpointProcessGetRestoreThreadId says. In which pid namespace it
    counts is documented nowhere; CRIU's CUDA plugin takes it for its own, also of processes in
    containers (criu PR 2416). Only where the process has no such thread it is looked for by the
    numbers that its threads have themselves: of two that it fits, the other is the application's,
    and would run on. Raises ProcessLookupError when the process has gone.
    """
    found, by_own_number = set(), set()
    there = threads.of(pid)
    for tid in there:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            name = threads.name(tid) if tid != pid else ""
            if tid == restore_thread or name == SERVICE or DRIVERS.fullmatch(name):
                found.add(tid)
            if threads.innermost(tid) == restore_thread:
                by_own_number.add(tid)
    if restore_thread not in there:
        found |= by_own_number
    if not found and not os.path.exists(f"/proc/{pid}"):
        raise ProcessLookupError(f"process {pid} has ended")
    return found


class Hold:
    """All threads of some processes, held still but for the spared ones.

    ``pids`` are the host's. With ``kill_on_exit`` the processes are killed when this one ends
    before :meth:`spare_from_exit` or :meth:`end`. Methods may be called from any thread.

    Not for children of this process: the hold would take note of their end in its stead.
    """

    def __init__(
        self,
        pids: Iterable[int],
        spared: Spared | Container[int] = (),
        *,
        kill_on_exit: bool = False,
    ) -> None:
        self._pids = tuple(pids)
        self._spared: Spared = spared if callable(spared) else lambda _: spared
        self._kill_on_exit = kill_on_exit
        self._seized: dict[int, int] = {}  # thread: its process
        self._still: set[int] = set()
        self._lost: set[int] = set()
        self._asked: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None]
        self._asked = queue.SimpleQueue()
        self._tracer: threading.Thread | None = None

    def begin(self, timeout_s: float) -> None:
        """Hold them; raises StepFailed, with all of them let go, when one does not stop in time.

        A process that has ended needs no holding. May be called again after :meth:`end`.
        """
        if self._tracer is not None:
            raise RuntimeError("it is held already")
        self._lost.clear()
        self._tracer = threading.Thread(target=self._trace, name="hold", daemon=True)
        self._tracer.start()
        until = time.monotonic() + timeout_s
        try:
            self._ask(lambda: self._stop_all(until, timeout_s))
        except BaseException:
            self.end()
            raise

    def spare_from_exit(self) -> None:
        """From now on they go on, as at the end of the hold, should this process end.

        Raises StepFailed when one of them was killed meanwhile: the others are not all there is.
        """
        if lost := self.lost():
            raise StepFailed("hold", f"process {min(lost)} was killed while it was held")
        if self._tracer is not None:
            self._ask(lambda: self._set_options(0))

    def end(self) -> None:
        """Let all go on; those that were stopped (SIGSTOP) stay so. May be called again."""
        tracer, self._tracer = self._tracer, None
        if tracer is None:
            return
        self._asked.put(None)
        tracer.join()
        # The thread has said its last word; the kernel lets go of what it could not (see _let_go)
        # when it is really gone.
        while os.path.exists(f"/proc/self/task/{tracer.native_id}"):
            time.sleep(0.0002)

    @property
    def held(self) -> frozenset[int]:
        """The threads that stand still, as the host sees them."""
        return frozenset(self._still)

    def lost(self) -> frozenset[int]:
        """The processes that somebody has killed since they were held, by the last hold."""
        if self._tracer is not None:
            self._ask(self._collect)
        return frozenset(self._lost)

    # ---- in the tracer, the only thread that may ask about its tracees --------------------------

    def _ask(self, what: Callable[[], None]) -> None:
        answer: Future[None] = Future()
        self._asked.put((what, answer))
        answer.result()

    def _trace(self) -> None:
        while True:
            try:
                asked = self._asked.get(timeout=REAP_S)
            except queue.Empty:
                self._collect()
                continue
            if asked is None:
                self._let_go()
                return
            what, answer = asked
            try:
                what()
                answer.set_result(None)
            except BaseException as error:
                answer.set_exception(error)

    def _stop_all(self, until: float, timeout_s: float) -> None:
        while self._seize_new():  # those that were not yet held may have started others
            while moving := self._moving():
                if time.monotonic() > until:
                    raise self._failed(moving, timeout_s)
                time.sleep(0.0005)
            if time.monotonic() > until:
                raise StepFailed("hold", f"threads come and go for more than {timeout_s:g} s")
        if self._kill_on_exit:
            self._set_options(ptrace.EXITKILL)

    def _seize_new(self) -> bool:
        """Seize the threads that are not yet; whether there were any."""
        found = False
        for pid in self._pids:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                spared = self._spared(pid)
                for tid in threads.of(pid):
                    if tid not in spared and tid not in self._seized:
                        found |= self._seize(pid, tid)
        return found

    def _seize(self, pid: int, tid: int) -> bool:
        try:
            ptrace.seize(tid)
            self._seized[tid] = pid
            ptrace.interrupt(tid)
        except ProcessLookupError:
            return False
        except PermissionError as refused:
            if threads.ended(tid):
                return False
            raise self._refused(pid, tid) from refused
        return True

    def _moving(self) -> list[int]:
        """The seized threads that have not yet stopped, but could still do something."""
        self._collect()
        moving = [tid for tid in self._seized.keys() - self._still if not threads.ended(tid)]
        return [tid for tid in moving if not self._waits_for_held_child(tid)]

    def _waits_for_held_child(self, tid: int) -> bool:
        """Whether it waits in vfork for a process that is held: it traps when that goes on."""
        if not threads.in_vfork(tid):
            return False
        return not self._seized.keys().isdisjoint(threads.children(tid))

    def _collect(self) -> None:
        """Take note of what has happened to tracees."""
        while event := ptrace.next_event():
            tid, what = event
            with contextlib.suppress(ProcessLookupError):  # killed meanwhile
                if isinstance(what, ptrace.Ended):
                    pid = self._seized.pop(tid, tid)
                    if tid in self._still:
                        self._still.discard(tid)
                        self._lost.add(pid)
                elif isinstance(what, ptrace.Delivery):
                    # At once, not at the end: a tracer that dies takes an undelivered one along.
                    # The trap that was asked for is still to come.
                    ptrace.resume(tid, what.signum)
                else:
                    self._seized.setdefault(tid, tid)  # by exec a thread takes its leader's number
                    self._still.add(tid)

    def _set_options(self, options: int) -> None:
        """Only of those that have trapped: of no other could they be taken back."""
        for tid in self._still:
            with contextlib.suppress(ProcessLookupError):  # killed; its end is noted later
                ptrace.set_options(tid, options)

    def _let_go(self) -> None:
        """Those that have not trapped cannot be let go so; the end of this thread does it."""
        self._collect()
        for tid in self._still:
            with contextlib.suppress(ProcessLookupError):
                ptrace.detach(tid)
        self._seized.clear()
        self._still.clear()

    def _refused(self, pid: int, tid: int) -> StepFailed:
        who, tracer = threads.who(pid, tid), threads.tracer(tid)
        if tracer:
            return StepFailed(
                "hold",
                f"{who} is traced already, by process {tracer} ({threads.name(tracer)})",
                hint="end the debugger or tracer and try again",
            )
        return StepFailed(
            "hold",
            f"{who} can't be traced: the kernel does not permit it",
            hint="the agent needs CAP_SYS_PTRACE; `liveshift doctor` checks its privileges",
        )

    def _failed(self, moving: list[int], timeout_s: float) -> StepFailed:
        said = []
        for tid in moving:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                said.append(f"{threads.who(self._seized[tid], tid)}, {threads.doing(tid)}")
        more = f" and {len(said) - 1} more" if len(said) > 1 else ""
        first = said[0] if said else "a thread"
        return StepFailed("hold", f"{first}{more}, did not stop within {timeout_s:g} s")
