# SPDX-License-Identifier: Apache-2.0
"""Restore a capsule's tree with CRIU into an empty sandbox, in two steps.

``bring_up`` ends in CRIU's ``post-restore`` hook: tasks and sockets exist, no task runs, sockets
are in repair mode, the network is locked. The hook waits until the agent knows that the tree may
run. ``let_run`` opens the network while CRIU is in that hook. Before that, the kernel would answer
the peers with RST; after it, every first retransmission is lost and costs seconds. Then CRIU lets
the tasks go.

If GPU state must still come, CRIU must release the tree for that, but the tree must not run yet.
Such a tree is brought up *stopped*, and takes these steps:

``stop_at_door``  CRIU leaves; every task is stopped (SIGSTOP); the network stays locked
(a hold)          the hold continues some tasks; of their threads only the spared ones may run
``let_run_held``  opens the network and lets all tasks run, as ``let_run`` does

If any of these processes dies at any point, no task runs without permission: the hook gives up
without its CRIU, a stopped task stays stopped, and a held task is killed. Before held tasks may
outlive the agent, the agent stops them again. A restarted agent lets the tree run if ``resumed`` is
written; otherwise it drops the tree and may begin again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from ... import proc_text
from ...errors import LiveshiftError, StepFailed
from ..capsule.sandboxes import STDERR_FD, STDOUT_FD, Sandbox, enter, hand_over, kill_tree
from ..capsule.tree import children_first, inner_pid, tasks
from ..images import pids, task_states
from ..memory.fill.fill import FillEngine
from ..memory.fill.tree_memory import TreeMemory
from ..memory.prefill.mapped import PrefillLost
from ..network import network_lock
from ..survey import epoll_sets
from ..survey.epoll_sets import EpollEntry
from .early import RESTORE, EarlyCriu
from .explain import Cause, explain
from .held import HeldCriu
from .tool import Criu

STOP_S = 5.0
"""After ``stop`` CRIU has this many seconds to undo what it did in the sandbox. Then we kill the
rest."""


class RestoreHold(Protocol):
    """Keeps the tasks frozen that were continued at the door; if it dies, they die with it."""

    def spare_from_exit(self) -> None:
        """From now on the held tasks survive the hold; raises StepFailed if one was killed."""

    def end(self) -> None:
        """Let the held tasks go on."""


class RestoringTree:
    """A tree that CRIU restores in ``sandbox`` from the image files in ``images``."""

    def __init__(self, sandbox: Sandbox, images: Path) -> None:
        self._sandbox = sandbox
        self._images = images
        self._criu = HeldCriu(images)
        self._memory = TreeMemory(images)

    def bring_up(
        self,
        criu: Criu,
        pipes: dict[int, int],
        deadline_s: float,
        *,
        stopped: bool = False,
        fill: FillEngine | None = None,
        early: EarlyCriu | None = None,
        epoll: Sequence[EpollEntry] = (),
    ) -> None:
        """Restore up to where the tasks would run; ``stopped``: for :meth:`stop_at_door`.

        ``pipes`` maps the dumped tree's pipe inodes (stdout, stderr) to STDOUT_FD or STDERR_FD.
        ``fill``, a fresh one, gives the tree the memory that is not in CRIU's images; this method
        closes it. ``early`` is a prepared early CRIU, whose plan the fill has. ``epoll`` are the
        entries that CRIU could not dump; this method puts them back. Raises StepFailed: then no
        task is left here, and the sandbox is empty and locked as before.
        """
        for mark in ("resumed", "at-door"):
            (self._images / mark).unlink(missing_ok=True)
        options = [*RESTORE]
        options += ["--leave-stopped"] if stopped else []
        mark = "at-door" if stopped else "resumed"
        try:
            options += self._memory.begin(fill)
            if early is not None:
                self._criu = early.held
                early.go(pipes, mark, stopped=stopped)
            else:
                self._start(criu, options, pipes, mark)
        except BaseException as error:
            if early is not None:
                early.drop()
                self.drop()
            self._memory.end()
            if isinstance(error, FileNotFoundError):
                raise self._failed("its sandbox has ended") from error
            if isinstance(error, PrefillLost) or (early is not None and isinstance(error, OSError)):
                raise self._failed(str(error)) from error
            raise
        until = time.monotonic() + deadline_s
        try:
            if not self._criu.wait_held(until, self._memory.check):
                raise self._failed(self._cause())
            self._memory.wait(until, early.check if early is not None else lambda: None)
            if early is not None:
                early.close()
            self._put_in(epoll)
        except TimeoutError:
            self.drop()
            raise self._failed(f"CRIU did not finish within {deadline_s:g} s") from None
        except BaseException:
            self.drop()
            raise

    def _put_in(self, entries: Sequence[EpollEntry]) -> None:
        try:
            epoll_sets.put_in(entries, self._criu.tree())
        except OSError as error:
            raise self._failed(f"an epoll set lacks a file: {error}") from error

    def _start(self, criu: Criu, options: list[str], pipes: dict[int, int], mark: str) -> None:
        ends: dict[int, int] = {}
        last = pids.place(pids.of_image(self._images), pids.limit())
        if last is None:
            raise self._failed("its tasks leave CRIU too few ids in a row")
        pids.set_last(self._sandbox, last)  # earlier attempts have used some ids
        try:
            for fd in (STDOUT_FD, STDERR_FD):
                ends[fd] = os.open(f"/proc/{self._sandbox.init}/fd/{fd}", os.O_WRONLY)
            for inode, fd in pipes.items():
                options += ["--inherit-fd", f"fd[{ends[fd]}]:pipe:[{inode}]"]
            self._criu.start(
                enter(self._sandbox),
                criu.command(*options),
                "post-restore",
                mark=("post-resume", mark),
                pass_fds=tuple(ends.values()),
            )
        finally:
            for write_end in ends.values():
                os.close(write_end)

    def let_run(self, deadline_s: float) -> None:
        """Open the network and let the tasks run; raises StepFailed if none of them ran."""
        self._need_memory()
        if self._criu.alive():  # else there are no sockets, and the kernel would reset the peers
            try:
                self._open_network()
            except (LiveshiftError, OSError) as error:
                self.drop()
                raise self._failed(str(error)) from error
        self._let_go("resumed", deadline_s)
        self._memory.end()
        self._criu.close()
        hand_over(self._sandbox)

    def stop_at_door(self, deadline_s: float) -> None:
        """Let CRIU release the tasks while every one of them stays stopped.

        Raises StepFailed if that fails; then no task is left."""
        self._need_memory()
        self._let_go("at-door", deadline_s)
        if moving := self._moving(STOP_S):
            self.drop()
            raise self._failed(f"{moving} was not left stopped")
        self._memory.end()
        self._criu.close()

    def let_run_held(self, hold: RestoreHold) -> None:
        """Open the network, end the hold and let all tasks run; raises StepFailed if none ran.

        ``hold`` keeps the tasks frozen that were continued at the door.
        """
        self._need_memory()
        try:
            # If the hold ends from here on, the tasks still do not run.
            _send(self._tree(), signal.SIGSTOP)
            hold.spare_from_exit()
            go_on = self._to_go_on()
            self._open_network()
            (self._images / "resumed").touch()
        except (LiveshiftError, OSError) as error:
            self.drop()
            raise self._failed(str(error)) from error
        try:
            hold.end()
        finally:  # ``resumed`` is written, so the tree runs even if the hold failed
            self._open_door(go_on)
            self._memory.end()
            hand_over(self._sandbox)

    def take_up(self) -> None:
        """Take over the restore of an earlier agent; let the tree run if that agent decided so."""
        self._criu.take_up()
        if self.resumed() and (self._images / "at-door").exists():
            self._open_door(self._to_go_on())

    def resumed(self) -> bool:
        """True once the tasks were let go."""
        return (self._images / "resumed").exists()

    def drop(self) -> None:
        """Kill all tasks of the tree; the sandbox stays if it still exists.

        CRIU gets ``stop`` first, so that it removes what it put into the sandbox, such as ghost
        files.
        """
        self._criu.tell("stop", STOP_S)
        kill_tree(self._sandbox)
        self._memory.end()  # only after the kill: tasks would read unfilled memory as zeros
        if (self._images / "unlocked").exists():
            self._lock_again()
        self._criu.close()

    @functools.cached_property
    def ids(self) -> set[int]:
        """The ids that the tree has in its capsule. Its processes are children of CRIU, and not yet
        of the capsule's process 1, until they go on (capsule/tree.py does not find them)."""
        return pids.of_image(self._images)

    def _let_go(self, mark: str, deadline_s: float) -> None:
        """Send ``go``, after which the hook makes the file ``mark``. Raises StepFailed if it does
        not; then no task is left.

        New ids then start above the tree's, as at its source: those below are CRIU's."""
        go = f"go {pids.highest(self.ids)}"
        ended = self._criu.tell(go, deadline_s)
        if not (self._images / mark).exists():
            self.drop()
            raise self._failed(self._cause() if ended else "CRIU did not finish")

    def _open_network(self) -> None:
        (self._images / "unlocked").touch()  # empty: it takes no room where memory is full
        network_lock.unlock(self._sandbox.init)

    def _need_memory(self) -> None:
        """Drop the tree and raise StepFailed if some of its memory is missing."""
        if why := self._memory.lacking():
            self.drop()
            raise self._failed(why)

    def _open_door(self, pids: list[int]) -> None:
        # Children first: a parent such as script(1) stops itself when it sees a stopped child.
        _send(children_first(pids), signal.SIGCONT)
        (self._images / "at-door").unlink()

    def _tree(self) -> dict[int, int]:
        """The host's pid → the capsule's pid, of the tree's processes."""
        found = {}
        for task in tasks(self._sandbox) if self._sandbox.alive() else []:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found[task.pid] = inner_pid(task.pid)
        return found

    def _to_go_on(self) -> list[int]:
        """The host's pids of all processes but those that were already stopped before the dump."""
        return [pid for pid, inner in self._tree().items() if not self._stood(inner)]

    def _stood(self, inner: int) -> bool:
        image = self._images / f"core-{inner}.img"
        # A spared thread may have started this process after the restore.
        return image.exists() and task_states.was_stopped(image)

    def _moving(self, seconds: float) -> str:
        """Wait until every thread is stopped; "" then, else the name of a thread that is not.

        Returns "its tree" if no stopped thread was found."""
        until = time.monotonic() + seconds
        while True:
            states = {
                (pid, tid): state for pid in self._tree() for tid, state in _threads(pid).items()
            }
            if set(states.values()) <= {"T", "Z", "X"} and "T" in states.values():
                return ""
            if time.monotonic() > until:
                break
            time.sleep(0.001)
        for (pid, tid), state in states.items():
            if state not in "TZX":
                return f"thread {tid} of process {pid}, in state {state},"
        return "its tree"

    def _lock_again(self) -> None:
        """Close the network again: without the tree's sockets the kernel would reset the peers."""
        try:
            network_lock.lock(self._sandbox.init)
        except LiveshiftError:
            if not self._ends():
                raise
        (self._images / "unlocked").unlink()

    def _ends(self) -> bool:
        """True if the sandbox ends within STOP_S, as a sandbox does after its tree once
        :func:`hand_over` was called."""
        until = time.monotonic() + STOP_S
        while self._sandbox.alive() and time.monotonic() < until:
            time.sleep(0.01)
        return not self._sandbox.alive()

    def _cause(self) -> Cause:
        return explain(self._images / "restore.log")

    def _failed(self, why: str | Cause) -> StepFailed:
        kind, words = StepFailed, why
        if isinstance(why, Cause):
            kind, words = why.of_restore(), why.words
        return kind("restore", f"CRIU could not restore {self._sandbox.plan.hostname}: {words}")


def _send(pids: Iterable[int], signum: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def _threads(pid: int) -> dict[int, str]:
    """Thread id → state (proc(5)) of a process; {} if it has ended."""
    found = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for tid in os.listdir(f"/proc/{pid}/task"):
            stat = proc_text.read(f"/proc/{pid}/task/{tid}/stat")
            found[int(tid)] = stat.rpartition(")")[2].split()[0]
    return found
