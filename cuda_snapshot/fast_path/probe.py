# SPDX-License-Identifier: Apache-2.0
"""The helper's part of the trial: begins it, watches it, and remembers how it went.

The answer holds for a boot, a driver and a version of the trial; so it is kept beside the helper's
socket. A trial that could not be made is not remembered.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from ...waiting import readable
from ..devices import Inventory
from ..environment import environment
from . import trial

log = logging.getLogger("liveshift.gpu")

VERSION = 2
FILE = "gpu-fast-path.json"
PROBING = "being probed"

STEP_S = 30.0
START_S = 120.0
"""For the first step: cuInit takes seconds for each GPU where persistence mode is off."""
DYING_S = 10.0
"""After its process was killed the driver may come back from a step at last."""


class _Known(msgspec.Struct, frozen=True):
    boot: str
    driver: str
    version: int
    why: str


class FastPath:
    """``why`` is "" where the fast path works, else why not, in words."""

    def __init__(self, directory: Path, libraries: Path | None) -> None:
        self.why = PROBING
        self.pids: set[int] = set()
        """Of the trial's processes, while it lasts: they hold memory of a GPU, and no job does."""
        self._file, self._libraries = directory / FILE, libraries

    @property
    def sessions(self) -> str:
        """ "" where a process's service thread may call CUDA while others are held, as far as is
        known; else why not, in words."""
        return self.why if trial.HELD in self.why else ""

    def begin(
        self,
        told: Callable[[], Inventory],
        turn: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """In the background: with NVML's answer, and in a turn of its own among the operations."""
        threading.Thread(target=self._find_out, args=(told, turn), daemon=True).start()

    def _find_out(
        self,
        told: Callable[[], Inventory],
        turn: Callable[[], AbstractContextManager[None]],
    ) -> None:
        try:
            host = told()
            known = self._remembered(host)
            if known is None:
                with turn():
                    known = self._try(host)
        except Exception as error:
            log.exception("the fast path's trial")
            known = f"not tried: {error}"
        self.why = known
        log.info("fast path: %s", known or "works")

    def _remembered(self, host: Inventory) -> str | None:
        try:
            known = msgspec.json.decode(self._file.read_bytes(), type=_Known)
        except (OSError, msgspec.DecodeError):
            return None
        same = known == _Known(_boot(), host.driver or "", VERSION, known.why)
        return known.why if same else None

    def _try(self, host: Inventory) -> str:
        fit = [gpu for gpu in host.devices if not gpu.mig and not gpu.mps]
        if not fit:
            why = host.why_none or "every GPU is partitioned by MIG or shared by MPS"
            return f"not tried: {why}"
        gpu = max(fit, key=lambda gpu: gpu.free_bytes)
        why, lasting = watched(gpu.uuid, self._libraries, self.pids)
        if lasting and host.driver:
            known = _Known(_boot(), host.driver, VERSION, why)
            part = self._file.with_suffix(".part")
            part.write_bytes(msgspec.json.encode(known))
            part.rename(self._file)
        return why


def watched(
    uuid: str,
    libraries: Path | None = None,
    pids: set[int] | None = None,
    *,
    step_s: float = STEP_S,
    start_s: float = START_S,
    lock_ms: int = trial.LOCK_MS,
) -> tuple[str, bool]:
    """Makes the trial on that GPU; "" or why the fast path does not work, and whether the next
    trial would say so too. Takes seconds; at most ``step_s`` for each step, and ``lock_ms`` for a
    lock. ``pids`` are kept to those of the processes that take part."""
    pids = set() if pids is None else pids
    child = subprocess.Popen(
        [sys.executable, "-m", trial.__spec__.name, uuid, str(lock_ms)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(libraries),
        cwd="/",
        start_new_session=True,
    )
    pids.add(child.pid)
    threading.Thread(target=child.wait, daemon=True).start()  # it may outlast our patience
    assert child.stdout is not None
    said = _Lines(child.stdout.fileno())
    step, wait_s, rank = "starting", start_s, -1
    try:
        while True:
            line = said.next(wait_s)
            if line is None and rank >= 0:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(rank, signal.SIGKILL)
                said.rest(DYING_S)
            if line is None:
                return f"{step} did not come to an end within {wait_s:g} s", True
            word, _, rest = line.partition(" ")
            match word:
                case "rank":
                    pids.add(int(rest))
                    with contextlib.suppress(OSError):  # it has ended already
                        rank = os.pidfd_open(int(rest))
                case "step":
                    wait_s = step_s if step != "starting" else start_s
                    step = rest
                case "works" | "fails" | "unable":
                    said.rest(DYING_S)  # until both have given back what they held
                    return rest, word != "unable"
                case _:
                    return f"{step}: the trial ended without a word", False
    finally:
        child.stdout.close()
        if rank >= 0:
            os.close(rank)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(DYING_S)
        pids.clear()


class _Lines:
    """Lines of a pipe, with a deadline each."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._read = descriptor, b""

    def next(self, within_s: float) -> str | None:
        """None after so many seconds; "" at the end."""
        until = time.monotonic() + within_s
        while b"\n" not in self._read:
            left = max(0.0, until - time.monotonic())
            if not readable(left, self._descriptor):
                return None
            part = os.read(self._descriptor, 4096)
            if not part:
                return ""
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return line.decode(errors="replace")

    def rest(self, within_s: float) -> None:
        """Reads up to the end, or for so long."""
        while self.next(within_s):
            pass


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
