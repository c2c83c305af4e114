# SPDX-License-Identifier: Apache-2.0
"""A CRIU that is started to restore a tree before the tree has come, and takes its memory along.

While the job still runs at its source its memory comes into the store; this puts what is cold of
it into a CRIU that waits in the room (memory/prefill.py), in a thread. Once the image is complete
``go`` lets that CRIU restore it. Without one, or when anything is wrong with it, the tree is
restored by a fresh CRIU and all of its memory is filled in. Where the host has no memory for both,
the store does not keep what was put in place: then there is no restore without this CRIU.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import socket
import threading
import time
from importlib.resources import files
from pathlib import Path

from ...errors import LiveshiftError
from ..capsule.room import STDERR_FD, STDOUT_FD, Room, enter
from ..memory import prefill as prefill_room
from ..memory.prefill.mapped import PrefillLost
from ..memory.prefill.prefill import ANSWER_S, BLOCK, LEAST, SPARE, NoHugePage, Prefill, memory_left
from ..memory.store.store import MemoryStore
from .dump import COMMON
from .held import HeldCriu
from .tool import Criu

log = logging.getLogger("liveshift.early")

RESTORE = ("restore", "--log-file", "restore.log", "-v2", "--restore-detached", *COMMON)

CONFIG = "early.conf"
MARK = "early-mark"
"""What the hook makes when the tasks go on: a link to the mark that is due, which nobody knows
before the image has come."""

NAP_S, STILL_NAP_S = 0.05, 0.02
IDLE_S = 0.3
"""When nothing has come for so long, what came last is taken to be cold as well."""

LOOK_AT_MEMORY = 64
"""Blocks that are put in place between two looks at how much memory the host has left."""

MISSES = 16
"""Blocks in a row for which there was no huge page; then there are none for now."""

LAST_BLOCK_S = 1.0
"""How long the tree, which stands still, waits at most for the block that is just being copied."""

AT_LAST_S = 0.1
"""And for what is copied again once all has come, block by block; the fill, which has several
threads, does the rest."""

END_S = 1.0


class EarlyCriu:
    """One of them; ``images`` is the directory that the image comes into, and is hidden."""

    def __init__(self, criu: Criu, room: Room, images: Path, store: MemoryStore) -> None:
        self._command, self._room, self._images, self._store = criu, room, images, store
        self.held = HeldCriu(images)
        self._prefill: Prefill | None = None
        self._ends: dict[int, int] = {}
        self._stop = threading.Event()
        self._wanted = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="prefill", daemon=True)
        self.why = ""
        """Why it is of no use, in words."""
        self._settled = False

    def begin(self) -> None:
        """Start to put memory in place, as it comes."""
        self._thread.start()

    def halt(self) -> None:
        """The tree stands still at its source: nothing more is put in place, only what is there
        already is kept up to date. Does not wait."""
        self._stop.set()

    @property
    def placing(self) -> bool:
        """Whether there was more to put in place when it was looked at last."""
        return self._thread.is_alive() and not self._settled and not self._stop.is_set()

    @property
    def bytes(self) -> int:
        """Of memory that was put in place so far; once it is prepared, of it what is right."""
        return self._prefill.bytes if self._prefill is not None else 0

    @property
    def lost(self) -> str:
        """Why what was kept only here is lost, in words; "" while nothing is."""
        if self._prefill is None or not self._prefill.moved:
            return ""
        return self.why if self.held.alive() else "it has ended"

    @property
    def plan(self) -> mmap.mmap | None:
        """For the fill; once :meth:`prepare` has returned True."""
        return self._prefill.plan if self._prefill is not None else None

    def prepare(self) -> bool:
        """The image is complete: whether this CRIU can restore it, and it is worth it. When not,
        it has been ended."""
        only_here = self._prefill is not None and self._prefill.moved
        self._join(ANSWER_S if only_here else LAST_BLOCK_S)
        try:
            if not self.why and self._prefill is None:
                self.why = "nothing was put in place"
            elif not self.why and not self.held.alive():
                self.why = "it has ended"
            if not self.why and self._prefill is not None:
                search, until = self._prefill.search(), time.monotonic() + AT_LAST_S
                while time.monotonic() < until and self._prefill.freshen(search):
                    pass
                if self._prefill.settle(self._images):
                    return True
            self.why = self.why or "nothing of what was put in place is still there"
        except (PrefillLost, LiveshiftError, OSError) as error:
            self.why = str(error)
        log.warning("%s: no early restore: %s", self._images.name, self.why)
        self._bring_back()
        self.drop()
        return False

    def go(self, pipes: dict[int, int], mark: str, *, stopped: bool) -> None:
        """Restore; see RestoringTree.bring_up. Its hook makes the file ``mark`` when the tasks go
        on. Raises PrefillLost, OSError."""
        assert self._prefill is not None
        options = ["leave-stopped"] if stopped else []
        options += [
            f"inherit-fd fd[{self._ends[fd]}]:pipe:[{inode}]" for inode, fd in pipes.items()
        ]
        (self._images / CONFIG).write_text("".join(f"{option}\n" for option in options))
        (self._images / MARK).unlink(missing_ok=True)
        (self._images / MARK).symlink_to(mark)
        self._prefill.go()

    def check(self) -> None:
        """Look whether the restored processes have what they should; raises StepFailed."""
        assert self._prefill is not None
        self._prefill.check(self.held.tree())

    def drop(self) -> None:
        """End it, unless it was told to go: then its tree is. May be called again."""
        self._join(LAST_BLOCK_S)
        if self._prefill is not None:
            self._prefill.close()  # its library ends it
            self._prefill = None
            self.held.end(END_S)

    def close(self) -> None:
        """Let go of what a tree that is there does not need any more; its CRIU is :attr:`held`."""
        if self._prefill is not None:
            self._prefill.close()

    def _bring_back(self) -> None:
        """As far as it answers: what stays lost is missed when the tree is to be filled."""
        if self._prefill is not None and self.held.alive():
            try:
                self._prefill.bring_back()
            except (PrefillLost, LiveshiftError, OSError) as error:
                log.error("%s: what was kept only there is lost: %s", self._images.name, error)

    def _join(self, seconds: float) -> None:
        self.halt()
        self._wanted.set()
        if self._thread.ident is None:
            return
        self._thread.join(seconds)
        if self._thread.is_alive() and self._prefill is not None:
            self._prefill.abandon()
        self._thread.join()

    def _follow(self) -> None:
        try:
            while not self._stop.wait(NAP_S):
                self._round()
            seen = 0.0
            while self._prefill is not None and not self._wanted.wait(STILL_NAP_S):
                if (written := self._store.written) != seen:
                    self._freshen(self._prefill)
                    seen = written
        except Exception as error:  # no restore may fail for it
            self.why = str(error) or type(error).__name__

    def _round(self) -> None:
        """Once through all that has come."""
        prefill = self._prefill or self._start()
        search, blocks, misses = prefill.search(), 0, 0
        while not self._stop.is_set():
            if blocks % LOOK_AT_MEMORY == 0:
                left = memory_left() - LOOK_AT_MEMORY * BLOCK
                if left < SPARE:
                    prefill.let_go_of_outdated()
                    prefill.keep_once(SPARE - left)
                if left < LEAST:
                    self._settled = True  # as far as it goes
                    return
            idle = time.monotonic() - self._store.written > IDLE_S
            try:
                if not prefill.step(search, idle):
                    self._settled = blocks == 0
                    return
            except NoHugePage as none:  # perhaps for the next block, or later
                misses += 1
                if misses > MISSES:
                    log.info("%s: %s", self._images.name, none)
                    self._settled = True
                    return
                continue
            self._settled, misses = False, 0
            blocks += 1

    def _freshen(self, prefill: Prefill) -> None:
        """Once through what has come since the tree stands still, or as far as there is time."""
        search, blocks, more = prefill.search(), 0, True
        while more:
            for _ in range(LOOK_AT_MEMORY):
                if self._wanted.is_set():
                    return
                if not (more := prefill.freshen(search)):
                    break
                blocks += 1
            # What comes needs memory, which what is there twice may have, or what is outdated.
            if (left := memory_left()) < SPARE:
                prefill.keep_once(SPARE - left)
                if not blocks and memory_left() < SPARE:
                    prefill.let_go_of_outdated()

    def _start(self) -> Prefill:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        prefill = Prefill(self._store, ours)
        pages = self._store.pages_file()
        library = Path(str(files(prefill_room) / "prefill_shim.so"))
        try:
            for fd in (STDOUT_FD, STDERR_FD):
                self._ends[fd] = os.open(f"/proc/{self._room.init}/fd/{fd}", os.O_WRONLY)
            said = f"{theirs.fileno()}:{pages}:{prefill.plan_fd}"
            self.held.start(
                enter(self._room),
                self._command.command(*RESTORE, "--lazy-pages", preload=[library]),
                "post-restore",
                mark=("post-resume", MARK),
                pass_fds=(*self._ends.values(), theirs.fileno(), pages, prefill.plan_fd),
                environment=lambda _: {"LIVESHIFT_PREFILL": said},
                config=CONFIG,
            )
        except BaseException:
            prefill.close()
            raise
        finally:
            theirs.close()
            os.close(pages)
            for end in self._ends.values():
                with contextlib.suppress(OSError):
                    os.close(end)
        self._prefill = prefill
        return prefill
