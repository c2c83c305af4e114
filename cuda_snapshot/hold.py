# SPDX-License-Identifier: Apache-2.0
"""Stop all threads of a process except some, and later let them go on as if nothing had happened.

A signal must not stop a CUDA process while its GPU is saved or restored: the driver's restore
thread and the interposer's service thread must run in it. So ptrace seizes and traps every other
thread. A process that is stopped (SIGSTOP) may be held, too. On SIGCONT only its spared threads go
on, since the kernel leaves seized threads in their trap.

A thread notices as much as of a signal that it ignores: the kernel restarts system calls, but those
that it never restarts (signal(7): epoll_wait, sigtimedwait …) return EINTR. CRIU does the same to a
thread. Signals that are sent during the hold wait until its end, unless a spared thread takes them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import re
import threading
import time
from collections.abc import Callable, Container, Iterable
from concurrent.futures import Future
from functools import partial

from .. import ptrace
from ..errors import StepFailed
from . import threads
from .whereabouts import Whereabouts

SERVICE = "liveshift"
"""The name of the interposer's service thread (interposer/service/service.c)."""

REAP_S = 0.02
"""Seconds between two looks whether a held process was killed. A traced thread stays a zombie until
its tracer has noted its end."""

PAUSE_S = (0.0005, 0.004)
"""Seconds for which a thread that is inside the driver runs on before it is looked at again. They
are random, so that the looks do not keep pace with what the thread does."""

TOGETHER_S = 0.3
"""For at most this many seconds some threads are held while others have to come out of the
driver."""

IDLE_S = 1.0
"""A thread that seems to be inside, and has not run for this many seconds, is taken for one that is
outside."""

DRIVERS = re.compile(r"cuda-EvtHandlr|cuda[0-9a-f]{8,}")
"""The names of the CUDA driver's own threads. A call of the service thread may wait for one of
them: for a lock of the driver that it holds, or for its answer. Without a hold these threads run
all through a checkpoint. Of the application they run only host functions, and the first lock waits
until these have run."""

Spared = Callable[[int], Container[int]]
"""A function of a pid: the threads of that process that must not be held (the host's numbers)."""


def spared_threads(pid: int, restore_thread: int) -> set[int]:
    """Return the threads of a CUDA process that must run while it is held (the host's numbers).

    ``restore_thread`` is the number that cuCheckpointProcessGetRestoreThreadId gives. No document
    says in which pid namespace it counts. CRIU's CUDA plugin takes it for a number of CRIU's own
    namespace, also for processes in containers (criu PR 2416). So does this function. Only if the
    process has no such thread, it looks for threads with this number in their own namespace: if
    both fitted, one of them would be the application's and would run on. Raises ProcessLookupError
    if the process has ended.
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


class ThreadHold:
    """Holds all threads of a process but the spared ones.

    ``pid`` is the host's number. With ``kill_on_exit`` the kernel kills the process if this process
    ends before :meth:`spare_from_exit` or :meth:`end`. Methods may be called from any thread.

    The held process must not be a child of this process: the hold would take note of its end in its
    place.
    """

    def __init__(
        self, pid: int, spared: Spared = lambda _: (), *, kill_on_exit: bool = False
    ) -> None:
        self._pid, self._spared, self._kill_on_exit = pid, spared, kill_on_exit
        self._seized: set[int] = set()
        self._still: set[int] = set()
        self._lost = False
        self._asked: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None]
        self._asked = queue.SimpleQueue()
        self._tracer: threading.Thread | None = None

    def begin(self, timeout_s: float) -> None:
        """Stop the threads, and return when all have stopped; at once if the process has ended.

        Raises StepFailed, after it has let all threads go on, if a thread does not stop within
        ``timeout_s`` seconds or cannot be traced, and RuntimeError if the hold has begun already.
        May be called again after :meth:`end`.
        """
        if self._tracer is not None:
            raise RuntimeError("it is held already")
        self._lost = False
        self._tracer = threading.Thread(target=self._trace, name="hold", daemon=True)
        self._tracer.start()
        until = time.monotonic() + timeout_s
        try:
            self._ask(lambda: self._stop_all(until, timeout_s))
        except BaseException:
            self.end()
            raise

    def begin_outside(self, timeout_s: float, outside_s: float) -> None:
        """Hold each thread at a moment at which it is outside of the CUDA driver's calls.

        Threads that are inside run on, a little at a time, until they are outside. Raises
        StepFailed as :meth:`begin`, and if that takes longer than ``outside_s`` seconds; then all
        threads go on.
        """
        where, looks, until = Whereabouts(self._pid), 0, time.monotonic() + outside_s
        idle: set[int] = set()
        while True:
            self.begin(timeout_s)
            try:
                # One that is inside may wait for another that is held, such as one that has a lock
                # of malloc: then all go on, and it is tried again.
                together = min(until, time.monotonic() + TOGETHER_S)
                while inside := where.inside(self.held - idle):
                    looks += 1
                    if time.monotonic() > together:
                        break
                    self._ask(partial(self._resume, inside))
                    time.sleep(random.uniform(*PAUSE_S))  # noqa: S311 (no secret)
                    self._ask(partial(self._stop_again, inside, timeout_s))
            except BaseException:
                self.end()
                raise
            if not inside:
                return
            self.end()
            if time.monotonic() > until:
                raise self._always_inside(inside[0], looks, outside_s)
            # A word on the stack may be left over from an earlier call. Most calls end when the GPU
            # has done its work, so a thread that has slept for IDLE_S is probably in no call. If it
            # is in one, the driver's lock fails before any memory has left the process.
            idle = threads.asleep({*inside, *idle}, IDLE_S)

    def spare_from_exit(self) -> None:
        """From now on, if this process ends, the threads go on as at the end of the hold.

        Raises StepFailed if the process was killed while it was held.
        """
        if self.lost():
            raise StepFailed("hold", f"process {self._pid} was killed while it was held")
        if self._tracer is not None:
            self._ask(lambda: self._set_options(0))

    def end(self) -> None:
        """Let the threads go on; a process that was stopped (SIGSTOP) stays stopped. May be called
        again."""
        tracer, self._tracer = self._tracer, None
        if tracer is None:
            return
        self._asked.put(None)
        tracer.join()
        # join may return before the kernel has ended the thread. Only that end releases the tracees
        # that _let_go could not detach.
        while os.path.exists(f"/proc/self/task/{tracer.native_id}"):
            time.sleep(0.0002)

    @property
    def held(self) -> frozenset[int]:
        """The threads that are held now, as the host numbers them."""
        return frozenset(self._still)

    def lost(self) -> bool:
        """Whether the process was killed while the current hold, or the last one, held it."""
        if self._tracer is not None:
            self._ask(self._collect)
        return self._lost

    # ---- in the tracer, the only thread that may make requests about its tracees ----------------

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
        new = True
        while new:  # threads that still ran may have started others
            new = self._seize_new()
            while moving := self._moving():
                if time.monotonic() > until:
                    raise self._failed(moving, timeout_s)
                time.sleep(0.0005)
            if time.monotonic() > until:
                raise StepFailed("hold", f"threads come and go for more than {timeout_s:g} s")
        if self._kill_on_exit:
            self._set_options(ptrace.EXITKILL)

    def _resume(self, tids: Iterable[int]) -> None:
        for tid in tids:
            with contextlib.suppress(ProcessLookupError):
                ptrace.resume(tid, 0)
                self._still.discard(tid)

    def _stop_again(self, tids: Iterable[int], timeout_s: float) -> None:
        """Stop threads that were resumed, and those that they have started."""
        for tid in tids:
            with contextlib.suppress(ProcessLookupError):
                ptrace.interrupt(tid)
        self._stop_all(time.monotonic() + timeout_s, timeout_s)

    def _seize_new(self) -> bool:
        """Seize the threads that are not seized yet. Returns whether there were any."""
        found = False
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            spared = self._spared(self._pid)
            for tid in threads.of(self._pid):
                if tid not in spared and tid not in self._seized:
                    found |= self._seize(tid)
        return found

    def _seize(self, tid: int) -> bool:
        try:
            ptrace.seize(tid)
            self._seized.add(tid)
            ptrace.interrupt(tid)
        except ProcessLookupError:
            return False
        except PermissionError as refused:
            if threads.ended(tid):
                return False
            raise self._refused(tid) from refused
        return True

    def _moving(self) -> list[int]:
        """The seized threads that have not stopped yet and could still do something."""
        self._collect()
        return [tid for tid in self._seized - self._still if not threads.ended(tid)]

    def _collect(self) -> None:
        """Note what has happened to the tracees."""
        while event := ptrace.next_event():
            tid, what = event
            with contextlib.suppress(ProcessLookupError):  # killed meanwhile
                if isinstance(what, ptrace.TraceeEnded):
                    self._seized.discard(tid)
                    if tid in self._still:
                        self._still.discard(tid)
                        self._lost = True
                elif isinstance(what, ptrace.Delivery):
                    # At once, not at the end: if the tracer dies, an undelivered signal is lost.
                    # The trap that was asked for still comes.
                    ptrace.resume(tid, what.signum)
                else:
                    self._seized.add(tid)  # after exec a thread has its leader's number
                    self._still.add(tid)

    def _set_options(self, options: int) -> None:
        """Set options of the trapped threads. Options of others could not be taken back."""
        for tid in self._still:
            with contextlib.suppress(ProcessLookupError):  # killed; its end is noted later
                ptrace.set_options(tid, options)

    def _let_go(self) -> None:
        """Detach the trapped threads. The kernel releases the others when this thread ends."""
        self._collect()
        for tid in self._still:
            with contextlib.suppress(ProcessLookupError):
                ptrace.detach(tid)
        self._seized.clear()
        self._still.clear()

    def _refused(self, tid: int) -> StepFailed:
        who, tracer = threads.who(self._pid, tid), threads.tracer(tid)
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

    def _always_inside(self, tid: int, looks: int, seconds: float) -> StepFailed:
        return StepFailed(
            "hold",
            f"{threads.who(self._pid, tid)} was inside a call of the CUDA driver each time that it"
            f" was looked at, {looks} times in {seconds:g} s",
            hint="try again; for a program that does hardly anything but wait for its GPU, set"
            ' gpu.fast_path = "off" and gpu.verify = "off" in the cluster file, and start the job'
            " again",
        )

    def _failed(self, moving: list[int], timeout_s: float) -> StepFailed:
        said = []
        for tid in moving:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                said.append(f"{threads.who(self._pid, tid)}, {threads.doing(tid)}")
        more = f" and {len(said) - 1} more" if len(said) > 1 else ""
        first = said[0] if said else "a thread"
        return StepFailed("hold", f"{first}{more}, did not stop within {timeout_s:g} s")
