# SPDX-License-Identifier: Apache-2.0
"""Early CRIU: a CRIU that starts before the image is complete, and gets cold memory in advance.

While the job still runs at its source, its memory comes into the store. A thread here puts the
cold part of it into a CRIU that waits in the sandbox (memory/prefill/prefill.py). Once the image is
complete, ``go`` lets that CRIU restore it. If there is no early CRIU, or something is wrong with
it, a fresh CRIU restores the tree and the fill copies all of the memory. If the host has no memory
for two copies, the store drops what is in place; then only the early CRIU can restore the tree.
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
from ..capsule.sandboxes import STDERR_FD, STDOUT_FD, Sandbox, enter
from ..memory import prefill as prefill_package
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
"""The file that the hook makes when the tasks go on. It is a link to the real mark, because the
real mark is known only after the image has come."""

NAP_S, STILL_NAP_S = 0.05, 0.02
IDLE_S = 0.3
"""If the store got no page for this many seconds, the newest pages count as cold as well."""

LOOK_AT_MEMORY = 64
"""The prefill checks the host's free memory each time it has put this many blocks in place."""

MISSES = 16
"""A pass ends after more than this many blocks in a row that got no huge page."""

LAST_BLOCK_S = 1.0
"""The frozen tree waits at most this many seconds for the block that is just being copied."""

AT_LAST_S = 0.1
"""After all pages have come, the prefill copies changed blocks again for at most this many seconds.
The fill, which has several threads, copies the rest."""

END_S = 1.0


class EarlyCriu:
    """One early CRIU; ``images`` is the hidden directory into which the image comes."""

    def __init__(self, criu: Criu, sandbox: Sandbox, images: Path, store: MemoryStore) -> None:
        self._command, self._sandbox, self._images, self._store = criu, sandbox, images, store
        self.held = HeldCriu(images)
        self._prefill: Prefill | None = None
        self._ends: dict[int, int] = {}
        self._stop = threading.Event()
        self._wanted = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="prefill", daemon=True)
        self.why = ""
        """A sentence that says why this CRIU cannot restore the tree. It is empty while it can."""
        self._settled = False

    def begin(self) -> None:
        """Start the thread that puts memory in place as it comes."""
        self._thread.start()

    def halt(self) -> None:
        """Put no more memory in place, because the tree is frozen at its source.

        The thread still keeps up to date what is in place already. Does not wait."""
        self._stop.set()

    @property
    def placing(self) -> bool:
        """True if the last pass still found memory to put in place."""
        return self._thread.is_alive() and not self._settled and not self._stop.is_set()

    @property
    def bytes(self) -> int:
        """Bytes of memory in place so far; after :meth:`prepare`, only those that are current."""
        return self._prefill.bytes if self._prefill is not None else 0

    @property
    def lost(self) -> str:
        """A sentence that says why memory which only this CRIU had is lost. Else it is empty."""
        if self._prefill is None or not self._prefill.evicted:
            return ""
        return self.why if self.held.alive() else "it has ended"

    @property
    def plan(self) -> mmap.mmap | None:
        """The plan that the fill needs; valid once :meth:`prepare` has returned True."""
        return self._prefill.plan if self._prefill is not None else None

    def prepare(self) -> bool:
        """Return True if this CRIU can restore the complete image and holds memory of it.

        Otherwise this CRIU has been ended."""
        only_here = self._prefill is not None and self._prefill.evicted
        self._join(ANSWER_S if only_here else LAST_BLOCK_S)
        try:
            if not self.why and self._prefill is None:
                self.why = "nothing was put in place"
            elif not self.why and not self.held.alive():
                self.why = "it has ended"
            if not self.why and self._prefill is not None:
                search, until = self._prefill.search(), time.monotonic() + AT_LAST_S
                while time.monotonic() < until and self._prefill.copy_outdated(search):
                    pass
                if self._prefill.plan_restore(self._images):
                    return True
            self.why = self.why or "nothing of what was put in place is still there"
        except (PrefillLost, LiveshiftError, OSError) as error:
            self.why = str(error)
        log.warning("%s: no early restore: %s", self._images.name, self.why)
        self._write_back()
        self.drop()
        return False

    def go(self, pipes: dict[int, int], mark: str, *, stopped: bool) -> None:
        """Let CRIU restore the image; see RestoringTree.bring_up.

        The hook makes the file ``mark`` when the tasks go on. Raises PrefillLost, OSError."""
        assert self._prefill is not None
        options = ["leave-stopped"] if stopped else []
        options += [
            f"inherit-fd fd[{self._ends[fd]}]:pipe:[{inode}]" for inode, fd in pipes.items()
        ]
        (self._images / CONFIG).write_text("".join(f"{option}\n" for option in options))
        (self._images / MARK).unlink(missing_ok=True)
        (self._images / MARK).symlink_to(mark)
        self._prefill.begin_restore()

    def check(self) -> None:
        """Raise StepFailed if a restored process lacks memory that the prefill put in place."""
        assert self._prefill is not None
        self._prefill.check(self.held.tree())

    def drop(self) -> None:
        """End this CRIU; after ``go`` the caller must also end its tree. May be called again."""
        self._join(LAST_BLOCK_S)
        if self._prefill is not None:
            self._prefill.close()  # the library in CRIU then ends CRIU
            self._prefill = None
            self.held.end(END_S)

    def close(self) -> None:
        """Release what a restored tree no longer needs; its CRIU stays in :attr:`held`."""
        if self._prefill is not None:
            self._prefill.close()

    def _write_back(self) -> None:
        """Move memory that only this CRIU holds back into the store, as far as CRIU answers.

        The fill reports later what stays lost."""
        if self._prefill is not None and self.held.alive():
            try:
                self._prefill.write_back()
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
                    self._copy_outdated(self._prefill)
                    seen = written
        except Exception as error:  # a broken prefill must not make the restore fail
            self.why = str(error) or type(error).__name__

    def _round(self) -> None:
        """Pass once through all memory that has come, and put the cold blocks in place."""
        prefill = self._prefill or self._start()
        search, blocks, misses = prefill.search(), 0, 0
        while not self._stop.is_set():
            if blocks % LOOK_AT_MEMORY == 0:
                left = memory_left() - LOOK_AT_MEMORY * BLOCK
                if left < SPARE:
                    prefill.discard_outdated()
                    prefill.evict(SPARE - left)
                if left < LEAST:
                    self._settled = True  # the host has no memory for more
                    return
            idle = time.monotonic() - self._store.written > IDLE_S
            try:
                if not prefill.step(search, idle):
                    self._settled = blocks == 0
                    return
            except NoHugePage as none:  # the next block may get one
                misses += 1
                if misses > MISSES:
                    log.info("%s: %s", self._images.name, none)
                    self._settled = True
                    return
                continue
            self._settled, misses = False, 0
            blocks += 1

    def _copy_outdated(self, prefill: Prefill) -> None:
        """Copy once again all blocks that changed since the freeze, as far as there is time."""
        search, blocks, more = prefill.search(), 0, True
        while more:
            for _ in range(LOOK_AT_MEMORY):
                if self._wanted.is_set():
                    return
                if not (more := prefill.copy_outdated(search)):
                    break
                blocks += 1
            # Pages that come need memory: blocks held twice, then outdated blocks, make room.
            if (left := memory_left()) < SPARE:
                prefill.evict(SPARE - left)
                if not blocks and memory_left() < SPARE:
                    prefill.discard_outdated()

    def _start(self) -> Prefill:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        prefill = Prefill(self._store, ours)
        pages = self._store.pages_file()
        library = Path(str(files(prefill_package) / "prefill_shim.so"))
        try:
            for fd in (STDOUT_FD, STDERR_FD):
                self._ends[fd] = os.open(f"/proc/{self._sandbox.init}/fd/{fd}", os.O_WRONLY)
            said = f"{theirs.fileno()}:{pages}:{prefill.plan_fd}"
            self.held.start(
                enter(self._sandbox),
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
