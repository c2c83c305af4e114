# SPDX-License-Identifier: Apache-2.0
"""The helper's part of the trial: it starts the trial, watches it, and remembers the result.

The result is valid for one boot, driver and version of the trial. The helper writes it into a file
beside its socket. It does not remember a trial that could not be made.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from ..devices import Inventory, Nvml
from ..environment import environment
from ..lines import Lines
from . import trial

log = logging.getLogger("liveshift.gpu")

VERSION = 5
FILE = "gpu-fast-path.json"
PROBING = "being probed"

STEP_S = 30.0
START_S = 120.0
"""The first step must end within this many seconds: without persistence mode cuInit takes seconds
for each GPU."""
DYING_S = 10.0
"""After the helper has killed the trial's rank, it waits this many seconds: the driver may still
come back from the step."""


class _Known(msgspec.Struct, frozen=True):
    boot: str
    driver: str
    version: int
    why: str


class FastPath:
    """Whether the fast path works on this host: ``why`` is "" if it does, else the reason."""

    def __init__(self, directory: Path, libraries: Path | None) -> None:
        self.why = PROBING
        self.pids: set[int] = set()
        """The trial's processes while it lasts. They hold GPU memory that belongs to no job."""
        self._file, self._libraries = directory / FILE, libraries

    @property
    def sessions(self) -> str:
        """ "" if, as far as is known, a process's service thread can call CUDA while its other
        threads are held; else why not, in words."""
        return self.why if trial.HELD in self.why else ""

    def find_out(self, nvml: Nvml, turn: AbstractContextManager[None]) -> None:
        """Remember the result, or make the trial in its ``turn`` among the operations. Raises
        nothing."""
        try:
            host = nvml.inventory()
            known = self._remembered(host)
            if known is None:
                with turn:
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
    lock_ms: int = trial.LOCK_MS,
) -> tuple[str, bool]:
    """Make the trial on that GPU. Returns "" or why the fast path does not work, and whether the
    next trial would give the same result. Takes seconds: at most ``step_s`` for each step, and
    ``lock_ms`` for a lock. ``pids`` always holds the pids of the processes that take part."""
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
    threading.Thread(target=child.wait, daemon=True).start()  # it may run longer than we wait
    assert child.stdout is not None
    said = Lines(child.stdout.fileno())
    step, wait_s, rank = "starting", START_S, -1
    try:
        while True:
            line = said.next(wait_s)
            if line is None and rank >= 0:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(rank, signal.SIGKILL)
                _read_to_end(said)
            if line is None:
                return f"{step} did not end within {wait_s:g} s", True
            word, _, rest = line.strip().partition(" ")
            match word:
                case "rank":
                    pids.add(int(rest))
                    with contextlib.suppress(OSError):  # it has ended already
                        rank = os.pidfd_open(int(rest))
                case "step":
                    wait_s = step_s if step != "starting" else START_S
                    step = rest
                case "works" | "fails" | "unable":
                    _read_to_end(said)  # until both have given back what they held
                    return rest, word != "unable"
                case _:
                    return f"{step}: the trial ended without a result", False
    finally:
        child.stdout.close()
        if rank >= 0:
            os.close(rank)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(DYING_S)
        pids.clear()


def _read_to_end(said: Lines) -> None:
    """Wait at most DYING_S for each line."""
    while said.next(DYING_S):
        pass


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
