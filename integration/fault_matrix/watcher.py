# SPDX-License-Identifier: Apache-2.0
"""What really runs where, sampled throughout a cell: never two, never zero, never an old one.

Every few milliseconds this machine's /proc says which lab hosts have tasks of the capsule, and
what those are:

running  at least one task is neither held by a tracer nor killed, and the sandbox may run
frozen   every task is held by a tracer (CRIU's dump) or stopped
coming   CRIU is bringing the tree up: its root is not yet a child of the sandbox's process 1, or
         the sandbox's network is still locked; only in a sandbox that was built for a restore,
         until the tree there was first seen running

A complete image (its ``manifest``) in a host's memory is no copy, but the capsule is not lost.
A copy that was frozen while another one ran is old, and must never run again.

A sample is not one instant. So what it seems to show, two running copies or nothing at all, is
looked at once more, and counts if it is still so.

What is not looked at is not seen: :attr:`Watcher.starved` says whether the machine was too busy for
the samples to show anything. The watcher's thread goes before all others, so that this is rare.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from whereabouts import GONE, spaces

from liveshift.criu_glue.network.network_lock import locked
from liveshift.errors import LiveshiftError
from liveshift.launcher.lab import Lab

RUNNING, FROZEN, COMING = "running", "frozen", "coming"
OLD = "running, though old"
IMAGE = "image"

PERIOD_S = 0.008
MEAN_GAP = 5
"""Periods between samples, on an average, at most; else a cell has shown nothing."""

_SIGKILL, _SIGSTOP = (1 << signum - 1 for signum in (signal.SIGKILL, signal.SIGSTOP))
_PF_EXITING, _PF_SIGNALED = 0x4, 0x400  # include/linux/sched.h; proc(5), stat field 9


@dataclass
class Sandbox:
    """A sandbox of the capsule on a host; ``restored`` if it was built to restore into."""

    host: str
    init: int
    restored: bool
    ran: bool = False
    old: bool = False  # another copy has run since this one was frozen
    tasks: dict[int, int] = field(default_factory=dict)  # pid inside → pid here


Sight = tuple[tuple[str, str], ...]
"""(host, state of the copy there, or IMAGE), sorted."""


@dataclass(frozen=True)
class Change:
    """From ``time`` on (seconds since the watch began) this was to be seen."""

    time: float
    sight: Sight

    def __str__(self) -> str:
        return f"{self.time:8.3f} s  {', '.join(' '.join(at) for at in self.sight) or 'nothing'}"


@dataclass(frozen=True)
class Mark:
    """Something that was done at ``time``."""

    time: float
    text: str

    def __str__(self) -> str:
        return f"{self.time:8.3f} s  -- {self.text}"


class Watcher(threading.Thread):
    """Watches one capsule of a lab for as long as the ``with`` block lasts.

    ``pids`` are those of the capsule's tree, as the capsule sees them. ``broken`` then says where
    an invariant did not hold; :meth:`may_vanish` is told when the capsule is about to be killed.
    ``longest_gap_s``: for how long it may not look; nothing that is wrong may be over sooner.
    """

    period_s = PERIOD_S

    def __init__(
        self,
        find_lab: Callable[[], Lab],
        capsule: str,
        pids: Collection[int],
        longest_gap_s: float = 1.0,
    ) -> None:
        super().__init__(name="watcher", daemon=True)
        self.changes: list[Change] = []
        self.marks: list[Mark] = []
        self.broken: list[str] = []
        self.samples = 0
        self.longest_gap = 0.0
        self._allowed_gap = longest_gap_s
        self._watched = 0.0
        self._find_lab = find_lab
        self._netns = "/run/netns/ls-" + capsule.replace("/", ".")
        self._pids = frozenset(pids)
        self._known: dict[int, tuple[int, int] | None] = {}  # pid here → (its sandbox, pid inside)
        self._sandboxes: dict[int, Sandbox | None] = {}  # by pid namespace; None: of no concern
        self._hosts: dict[int, str] = {}  # pid namespace of process 1 → host
        self._inits: dict[str, int] = {}
        self._record = (0, 0)
        self._directory = find_lab().directory
        self._may_vanish = False
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        self._look()  # what must be seen before anything happens
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self.join()
        if self._failure is not None and error is None:
            raise self._failure

    def may_vanish(self) -> None:
        """From now on there may be no copy and no image: the cell kills the capsule for good."""
        self._may_vanish = True

    def mark(self, text: str) -> None:
        """Add to the story what is being done."""
        self.marks.append(Mark(time.monotonic() - self._began, text))

    @property
    def starved(self) -> str:
        """Why the samples show nothing, once the watch is over; "" if they do."""
        enough = int(self._watched / (MEAN_GAP * self.period_s))
        if self.samples >= enough and self.longest_gap <= self._allowed_gap:
            return ""
        return (
            f"the watcher was starved: {self.samples} samples in {self._watched:.1f} s, once none"
            f" for {self.longest_gap:.3f} s; at least {enough} are needed, at most"
            f" {self._allowed_gap:g} s apart"
        )

    @property
    def now(self) -> Sight:
        """What was seen last."""
        return self.changes[-1].sight

    def running(self) -> list[str]:
        """The hosts on which a copy was seen running last."""
        return [host for host, what in self.now if what == RUNNING]

    def open_networks(self) -> list[str]:
        """The hosts on which a sandbox of the capsule now has a network that lets something
        through, and "no sandbox" where it has none at all."""
        found = {
            sandbox.host: sandbox.init
            for sandbox in list(self._sandboxes.values())
            if sandbox is not None
        }
        if not found:
            return ["no sandbox"]
        return [host for host, init in found.items() if not locked(init)]

    def story(self) -> str:
        """All that changed, a line each, and what was wrong."""
        lines: list[Change | Mark] = [*self.changes, *self.marks]
        lines.sort(key=lambda each: each.time)
        return "\n".join([*map(str, lines), *self.broken])

    def run(self) -> None:
        began = last = time.monotonic()
        _go_first()
        try:
            over = False
            while not over:
                over = self._over.wait(self.period_s)  # and looks a last time
                self._look()
                now = time.monotonic()
                self.longest_gap = max(self.longest_gap, now - last)
                last, self._watched = now, now - began
        except BaseException as failure:
            self._failure = failure

    # ---- one sample ----

    def _look(self) -> None:
        sight = self._sight()
        if self._wrong(sight):
            sight = self._sight()
        change = Change(time.monotonic() - self._began, sight)
        if not self.changes or self.changes[-1].sight != sight:
            self.changes.append(change)
            if wrong := self._wrong(sight):
                self.broken.append(f"{wrong}: {change}")
        self.samples += 1

    def _wrong(self, sight: Sight) -> str:
        if sum(what == RUNNING for _, what in sight) > 1:
            return "TWO RUN"
        if any(what == OLD for _, what in sight):
            return "AN OLD COPY RUNS"
        return "" if sight or self._may_vanish else "NOTHING IS LEFT"

    def _sight(self) -> Sight:
        self._take_over_hosts()
        images = [(host, IMAGE) for host in self._inits if self._has_image(host)]
        self._take_over_tasks()
        seen = [
            (sandbox, self._state(sandbox))
            for sandbox in self._sandboxes.values()
            if sandbox is not None
        ]
        if any(state == RUNNING for _, state in seen):
            for sandbox, state in seen:
                sandbox.old |= state == FROZEN
        copies = [
            (sandbox.host, OLD if sandbox.old and state == RUNNING else state)
            for sandbox, state in seen
            if state is not None
        ]
        return tuple(sorted([*copies, *images]))

    def _has_image(self, host: str) -> bool:
        directory = f"/proc/{self._inits[host]}/root/run/liveshift/images"
        with suppress(OSError):
            return any(os.path.exists(f"{directory}/{n}/manifest") for n in os.listdir(directory))
        return False

    def _state(self, sandbox: Sandbox) -> str | None:
        held = free = 0
        parent = 0
        for inner, pid in list(sandbox.tasks.items()):
            with suppress(*GONE):
                status = _status(pid)
                if status["State"][0] in "ZX":
                    continue
                if int(status["TracerPid"]) or _is_stopped(status):
                    held += 1
                elif not _is_dying(pid, status):
                    free += 1
                if inner == min(self._pids):
                    parent = int(status["PPid"])
        if not held and not free:
            return None
        if sandbox.restored and not sandbox.ran:
            # A sandbox that has just gone, or whose tasks have: what is left of it does not run.
            with suppress(OSError):
                if free and parent == sandbox.init and not locked(sandbox.init):
                    sandbox.ran = True
                    return RUNNING
            return COMING
        return RUNNING if free else FROZEN

    # ---- what there is to look at ----

    def _take_over_hosts(self) -> None:
        """Hosts are killed and booted; lab.json says which process 1 each has."""
        with suppress(LiveshiftError, FileNotFoundError):
            found = os.stat(self._directory / "lab.json")
            if (found.st_ino, found.st_mtime_ns) == self._record:
                return
            lab = self._find_lab()
            self._record = (found.st_ino, found.st_mtime_ns)
            self._inits = {m.name: m.init.pid for m in lab.machines if m.init is not None}
            self._hosts = {}
            for name, init in self._inits.items():
                with suppress(*GONE):
                    self._hosts[os.stat(f"/proc/{init}/ns/pid").st_ino] = name

    def _take_over_tasks(self) -> None:
        there = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        for pid in self._known.keys() - there:
            self._forget(pid)
        for pid in sorted(there - self._known.keys()):
            with suppress(*GONE):
                numbers = _status(pid)["NSpid"].split()
                if len(numbers) < 3:  # the machine's, the host's, the sandbox's
                    self._known[pid] = None
                else:
                    self._meet(pid, int(numbers[-1]))

    def _meet(self, pid: int, inner: int) -> None:
        space = os.stat(f"/proc/{pid}/ns/pid").st_ino
        if inner == 1:
            self._sandboxes[space] = self._sandbox(pid)
        if space not in self._sandboxes:  # its process 1 is met in the next sample
            return
        sandbox = self._sandboxes[space]
        if sandbox is not None and inner in self._pids:
            sandbox.tasks[inner] = pid
        mine = sandbox is not None and (inner == 1 or inner in self._pids)
        self._known[pid] = (space, inner) if mine else None

    def _sandbox(self, init: int) -> Sandbox | None:
        words = Path(f"/proc/{init}/cmdline").read_bytes().decode(errors="replace").split("\0")
        outer = spaces(init)
        host = next((self._hosts[space] for space in outer if space in self._hosts), None)
        if host is None or self._netns not in words:
            return None
        return Sandbox(host, init, "--restore" in words)

    def _forget(self, pid: int) -> None:
        known = self._known.pop(pid)
        if known is None:
            return
        space, inner = known
        if inner == 1:
            self._sandboxes.pop(space, None)
        elif sandbox := self._sandboxes.get(space):
            sandbox.tasks.pop(inner, None)


def _go_first() -> None:
    """Let this thread run whenever it wants to (sched(7)); as it was where the kernel refuses."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def _is_stopped(status: dict[str, str]) -> bool:
    """Whether a task is stopped, or will be before it runs another line of its program: one whose
    tracer died still has to take the SIGSTOP that was left pending."""
    return status["State"][0] in "Tt" or bool(_pending(status) & _SIGSTOP)


def _is_dying(pid: int, status: dict[str, str]) -> bool:
    """Whether a task will never run a line of its program again, though it is still listed.

    When a sandbox is ended its tracer may die first and let go of what was killed with it.
    """
    if _pending(status) & _SIGKILL:
        return True
    flags = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[6])
    return bool(flags & (_PF_EXITING | _PF_SIGNALED))


def _pending(status: dict[str, str]) -> int:
    """The mask of signals that wait for a task."""
    return int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
