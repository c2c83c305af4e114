# SPDX-License-Identifier: Apache-2.0
"""Freeze and dump a capsule's tree with CRIU, and hold it frozen until the agent decides.

CRIU runs with ``--leave-running`` and calls our hook at ``post-dump``, when every image is
written and the tasks are still stopped. There the hook waits (held.py):

- thaw:   the hook exits 1, and CRIU lets every task go on with its sockets; nothing is lost;
- commit: the hook gets no verdict; the agent kills the sandbox's process 1, which ends the tasks,
  CRIU and the hook at once.

Without ``--leave-running`` an error inside CRIU kills or damages the source (we saw sockets that
stay in repair mode). So only the agent kills the tasks. If CRIU itself is killed while it holds
the tree, the SIGSTOP that ``pin`` left pending stops the tasks, and ``thaw`` takes their sockets
out of repair mode.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

import msgspec
import psutil

from ... import proc_text
from ...errors import StepFailed
from ..capsule.sandboxes import Sandbox, enter
from ..capsule.tree import in_order, inner_pid, tasks
from ..images import link_remaps
from ..survey import epoll_sets
from ..survey.epoll_sets import EpollEntry
from ..survey.lost_names import MOST_DELETED
from . import repair_mode
from .capture import Capture, Sink
from .dead_tasks import DeadTasks
from .explain import explain
from .held import LOST_S, HeldCriu
from .page_filter import PageFilter
from .tool import Criu

COMMON = (
    *("--tcp-established", "--network-lock", "skip", "--file-locks"),
    *("--ghost-limit", str(MOST_DELETED)),
)
"""Options that dump and restore share. CRIU locks no network, because the agent does
(network_lock.py); CRIU carries deleted files in its image."""

INTERRUPTED = Path(str(files(__package__) / "interrupted_shim.so"))
"""Preloaded into CRIU so that a poll(2) without timeout is not interrupted; see its source."""

OUT = "epoll-entries"
"""The file, beside CRIU's, that lists the epoll entries to put back after the dump."""

STOOD = "stood"
"""The file, beside CRIU's, that lists the processes that were stopped already before the dump, by
the host's pids: a thaw leaves them stopped."""

READY_S = 1.0
""":meth:`FrozenTree.start_ahead` waits at most this many seconds until CRIU is ready."""

GIVEN_UP_S = 2.0
"""A CRIU that was started ahead and is not needed is killed if it has not ended by itself after
this many seconds."""

log = logging.getLogger("liveshift.dump")

HINT = "the job runs on at its host; `liveshift events` keeps the log's end"


class FrozenTree:
    """A tree that CRIU dumps and then holds frozen.

    After :meth:`dump` has returned, the tasks are stopped and the sink has every image byte.
    After an error in :meth:`dump`, or after :meth:`thaw`, the tasks run on as before. The caller
    locks the network. :meth:`start_ahead` makes the freeze shorter by the start of CRIU.
    """

    def __init__(self, sandbox: Sandbox, root_pid: int, directory: Path) -> None:
        self._sandbox = sandbox
        self._root_pid = root_pid
        self._directory = directory
        self._criu = HeldCriu(directory)
        self._capture: Capture | None = None
        self._ahead = False  # whether CRIU waits to begin
        self._filter: PageFilter | None = None
        self._begun = False
        self._pinned = False
        self._out: list[EpollEntry] = []
        self._stood: list[int] = []
        self._dead = DeadTasks()
        self.image_bytes = 0

    def start_ahead(self, criu: Criu, page_filter: PageFilter | None) -> None:
        """Start CRIU while the tree runs on. CRIU waits for :meth:`dump`, which must get the same
        ``page_filter``. :meth:`thaw` ends it, and so does the end of this process.

        Raises StepFailed if the sandbox has ended.
        """
        self._start(criu, page_filter)
        self._ahead = True
        # The job pauses soon after this method returns. By then the start of CRIU must be over.
        self._criu.wait_ready(READY_S)

    def dump(
        self,
        criu: Criu,
        sink: Sink,
        deadline_s: float,
        page_filter: PageFilter | None = None,
        look: Callable[[], None] = lambda: None,
        epoll: Sequence[EpollEntry] = (),
    ) -> None:
        """Freeze and dump the tree; calls ``look`` while CRIU works.

        ``epoll``: the entries that CRIU cannot dump, as they were found a moment ago. The image
        lacks the pages of the ranges that another thread gives to ``page_filter`` meanwhile.
        Raises StepFailed, or what the sink or ``look`` raised; then the tasks run again.
        """
        until = time.monotonic() + deadline_s
        if not (self._ahead and self._criu.alive() and self._filter is page_filter):
            if self._ahead:  # A process of the capsule may have killed the first CRIU.
                self._end_ahead()
            self._start(criu, page_filter)
        capture = self._capture
        assert capture is not None
        capture.sink = sink
        self._ahead = False
        try:
            tree = self._tree()
            self._dead = DeadTasks(task.pid for task in tree)
            self._stood = [task.pid for task in tree if _is_stopped(task)]
            self._note(STOOD, self._stood)
            self._take_out(epoll)
            self._criu.let_begin()
            self._wait_held(capture, until, look)
        except BaseException as failed:
            self.thaw()
            if capture.error:  # the reason why CRIU could not write on
                raise capture.error from failed
            raise
        self.image_bytes = capture.bytes

    def _start(self, criu: Criu, page_filter: PageFilter | None) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._begun = True
        self._filter = page_filter
        self._capture = Capture(self._directory)
        preload = [INTERRUPTED, *([page_filter.library] if page_filter else [])]
        try:
            self._criu.start(
                enter(self._sandbox),
                criu.command(*self._options(), preload=preload),
                "post-dump",
                environment=page_filter.environment if page_filter else None,
                begin="pre-dump",
            )
        except BaseException:
            self._end_ahead()
            raise

    def _end_ahead(self) -> None:
        """End the CRIU that waits to begin. This CRIU has not touched the tree yet.

        It ends by itself, its hook first. If it was killed, process 1 of the sandbox would adopt
        its hook for a moment, and a survey of that moment would take the hook for a daemon."""
        if not self._criu.tell("stop", GIVEN_UP_S):
            self._criu.kill()
        self._criu.close()
        if self._capture is not None:
            self._capture.close()
            self._capture = None
        self._ahead = self._begun = False

    def taken_out(self) -> list[EpollEntry]:
        """The entries that the destination must put back into epoll sets after the restore."""
        return epoll_sets.unchanged(self._out, self._pids())

    def _take_out(self, entries: Sequence[EpollEntry]) -> None:
        """Take entries out. The note is written first, so that a restarted agent can put them
        back."""
        if entries:
            self._note(OUT, list(entries))
            self._out = epoll_sets.take_out(entries, self._pids())

    def _note(self, name: str, what: object) -> None:
        """Write a note for a restarted agent. One that dies meanwhile leaves no torn note."""
        part = self._directory / f"{name}.part"
        part.write_bytes(msgspec.json.encode(what))
        part.rename(self._directory / name)

    def _put_in(self) -> None:
        note = self._directory / OUT
        with contextlib.suppress(FileNotFoundError):
            entries = msgspec.json.decode(note.read_bytes(), type=list[EpollEntry])
            pids = self._pids()
            try:
                epoll_sets.put_in(epoll_sets.unchanged(entries, pids), pids)
            except OSError as error:  # the tree must go on nevertheless
                log.error("%s: an epoll set lacks a file: %s", self._sandbox.plan.hostname, error)
            note.unlink()

    def _pids(self) -> dict[int, int]:
        """The capsule's pid → the host's pid, of the tree's processes."""
        return {inner: pid for pid, inner in in_order(self._sandbox, self._root_pid).items()}

    def take_up(self) -> None:
        """Take over the dump of an earlier agent; :meth:`thaw` then ends it at any stage."""
        self._begun = True
        self._dead = DeadTasks(task.pid for task in self._tree())
        with contextlib.suppress(FileNotFoundError):  # no dump had begun, so nothing was pinned
            self._stood = msgspec.json.decode((self._directory / STOOD).read_bytes())
            self._pinned = True
        self._criu.take_up()

    def pin(self) -> None:
        """Make sure that the tasks stay stopped even if CRIU is killed from now on.

        A SIGSTOP to a traced and stopped task stays pending until its tracer is gone. Raises
        StepFailed if CRIU is gone already.
        """
        self._pinned = True
        self._signal(signal.SIGSTOP)
        self.check_held()

    def held(self) -> bool:
        """Whether CRIU holds the dumped tree. Without :meth:`pin` the tasks run if it does not."""
        return self._criu.alive()

    def check_held(self) -> None:
        """Raises StepFailed if CRIU is gone. Without :meth:`pin` the tasks then run, and what was
        read of the tree since :meth:`dump` need not be of one moment."""
        if not self.held():
            raise StepFailed("dump", "CRIU was killed while it held the tree", hint=HINT)

    def thaw(self) -> None:
        """Let the tasks go on at the source. Safe to call at any time, more than once."""
        if not self._begun:
            return
        if self._ahead:
            self._end_ahead()
            return
        if self._capture is not None:
            self._capture.close()  # a CRIU that still writes images gives up and lets the tasks go
        if self._filter is not None:
            with contextlib.suppress(OSError):
                self._filter.hide({})  # CRIU must not wait for ranges that will not come
        self._put_in()
        if self._criu.alive() and self._pinned:
            self._continue()  # takes the pending SIGSTOP back
        elif not self._criu.alive():
            self._undo()
        if not self._criu.tell("stop", LOST_S, self._dead.waited_for):
            name = self._sandbox.plan.hostname
            log.error("%s: CRIU does not let its tasks go, and is killed", name)
            if not self._criu.kill():
                raise StepFailed("thaw", f"CRIU did not release the tasks of {name}")
            self._undo()
        if self._pinned:
            self._continue()  # in case CRIU was killed just now
        self._criu.close()
        self._begun = False

    def release(self) -> None:
        """Clean up after the sandbox was ended, which has ended CRIU and its hook too."""
        if self._capture is not None:
            self._capture.close()
        self._criu.close()
        self._begun = False

    def _undo(self) -> None:
        """Undo what a CRIU that was killed would have undone. Never raises: the tasks must go on
        whatever this comes to."""
        name = self._sandbox.plan.hostname
        try:
            repair_mode.leave(task.pid for task in tasks(self._sandbox))
        except Exception:
            log.exception("%s: a connection may neither send nor receive any more", name)
        try:
            link_remaps.clear(self._sandbox)
        except Exception:
            log.exception("%s: names that CRIU gave to deleted files may be left", name)

    def _continue(self) -> None:
        """Let all go on but those that were stopped before."""
        self._signal(signal.SIGCONT, self._stood)

    def _signal(self, signum: int, spared: Sequence[int] = ()) -> None:
        """Signal the tree, but not the hook of a killed CRIU, which process 1 has adopted."""
        for task in self._tree():
            if task.pid not in spared:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(task.pid, signum)

    def _tree(self) -> list[psutil.Process]:
        for task in tasks(self._sandbox):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
                if inner_pid(task.pid) == self._root_pid:
                    return [task, *task.children(recursive=True)]
        return []

    def _options(self) -> list[str]:
        try:
            pipes = self._sandbox.pipes()
        except FileNotFoundError as gone:
            name = self._sandbox.plan.hostname
            raise StepFailed("dump", f"{name} has ended before CRIU dumped it") from gone
        external = [arg for inode in pipes for arg in ("--external", f"pipe:[{inode}]")]
        return [
            "dump",
            "--tree",
            str(self._root_pid),
            "--log-file",
            "dump.log",
            "-v2",
            "--stream",
            "--leave-running",
            "--link-remap",
            *COMMON,
            *external,
        ]

    def _wait_held(self, capture: Capture, until: float, look: Callable[[], None]) -> None:
        def check() -> None:
            look()
            if self._dead.waited_for():
                name = self._sandbox.plan.hostname
                raise StepFailed("dump", f"a process of {name} was killed while CRIU dumped it")

        try:
            held = self._criu.wait_held(until, check)
            if held:
                capture.wait_idle(max(0.0, until - time.monotonic()))
        except TimeoutError as error:
            raise StepFailed(
                "dump",
                f"{error} within its deadline (timeouts.freeze)",
                hint="memory that pre-copy does not carry goes over the link now: `liveshift"
                " migrate --dry-run` says how much that is",
            ) from None
        if not held:
            cause = explain(self._directory / "dump.log")
            raise cause.of_dump()(
                "dump",
                f"CRIU could not dump {self._sandbox.plan.hostname}: {cause.words}",
                hint=HINT,
            )


def _is_stopped(task: psutil.Process) -> bool:
    """Whether a thread of the process is stopped by a signal. The first one may have ended."""
    states = list[str]()
    for thread in Path(f"/proc/{task.pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            states.append(proc_text.read(thread).rpartition(")")[2].split()[0])
    return "T" in states
