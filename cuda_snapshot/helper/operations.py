# SPDX-License-Identifier: Apache-2.0
"""The helper's operations on processes: lock, checkpoint, restore, unlock, one at a time on a host.

Operations never overlap, because NVIDIA's own driver for clusters found that parallel ones can
deadlock. Questions may be asked at any time. Errors are StepFailed with the state of the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from ... import proc_text, units
from ...errors import StepFailed
from .. import threads
from ..assignment import MARGIN
from ..checkpoint import CheckpointApi, CudaState
from ..devices import Inventory, Nvml
from ..driver import CudaError, CUresult

log = logging.getLogger("liveshift.gpu")

SETTLE_S = 2.0
"""NVML may show memory of a process for this many seconds after its checkpoint."""

NO_CUDA = (CUresult.INVALID_VALUE, CUresult.NOT_INITIALIZED)
"""The driver's results for a process that does not use CUDA, or does not exist."""
PERHAPS_NO_CUDA = (CUresult.OPERATING_SYSTEM, CUresult.NOT_SUPPORTED)
"""Results that the driver may also give for such a process, since cuda.h names none for it. A
process that has no device file of NVIDIA's, and was not checkpointed here, has nothing on a GPU."""

_WORDS: dict[tuple[str, int], str] = {
    ("lock", CUresult.NOT_READY): "work that it has submitted to its GPU did not end in time",
    ("lock", CUresult.ILLEGAL_STATE): "it is not running",
    ("checkpoint", CUresult.ILLEGAL_STATE): "it is not locked",
    ("checkpoint", CUresult.NOT_SUPPORTED): (
        "it has something that this driver can't checkpoint: managed memory, memory shared with"
        " another process, MIG, MPS, or a debugger or profiler"
    ),
    ("checkpoint", CUresult.OUT_OF_MEMORY): (
        "the host has too little memory for what the process holds on its GPUs"
    ),
    ("restore", CUresult.ILLEGAL_STATE): "it is not checkpointed",
    ("restore", CUresult.INVALID_VALUE): (
        "the map must name every GPU that the process could see, each with another one of the same"
        " chip"
    ),
    ("restore", CUresult.OUT_OF_MEMORY): (
        "too little memory on its new GPU; the driver leaves such a process checkpointed, and it"
        " cannot be restored any more"
    ),
    ("restore", CUresult.OPERATING_SYSTEM): (
        "an earlier restore has failed, or the process was killed meanwhile"
    ),
    ("unlock", CUresult.ILLEGAL_STATE): "it is not locked",
}
_ANY: dict[int, str] = {
    CUresult.INVALID_VALUE: "it does not use CUDA, or it has ended",
    CUresult.NOT_PERMITTED: "the helper has no right to it: it must be root, in no container",
    CUresult.OPERATING_SYSTEM: "the process was killed, or the system refused a call of the driver",
    CUresult.NOT_SUPPORTED: "this driver does not support it",
}
_STATES = {
    CudaState.RUNNING: "it runs on",
    CudaState.LOCKED: "it is locked, and can be unlocked",
    CudaState.CHECKPOINTED: "it is checkpointed",
    CudaState.FAILED: "it is lost and can only be killed",
}


class Operations:
    """The operations, with the driver and NVML of this host; :meth:`turn` keeps them apart."""

    def __init__(self, driver: CheckpointApi, nvml: Nvml) -> None:
        self.driver, self.nvml = driver, nvml
        self._turn = threading.Lock()
        self._now: tuple[str, float] | None = None
        self._held: dict[tuple[int, str], dict[str, int]] = {}
        """What processes held at their checkpoints: (pid, start time) → bytes by GPU UUID."""

    @contextlib.contextmanager
    def turn(self, what: str, turn_s: float) -> Iterator[None]:
        """Wait for the turn for at most ``turn_s`` seconds, and have it while the with block runs.
        Raises StepFailed."""
        if not self._turn.acquire(timeout=max(0.0, min(turn_s, threading.TIMEOUT_MAX))):
            now = self._now
            busy = f"{now[0]} for {time.monotonic() - now[1]:.0f} s" if now else "something"
            raise StepFailed(
                what,
                f"the GPU helper {os.getpid()} did not begin within {turn_s:g} s: it is busy with"
                f" {busy}",
                hint="a GPU, or a process that uses it, may hang: look at dmesg for NVRM messages",
            )
        try:
            self._now = what, time.monotonic()
            yield
        finally:
            self._now = None
            self._turn.release()

    # ---- questions -----------------------------------------------------------------------------

    def state(self, pid: int) -> CudaState | None:
        """The driver's state of the process; None if it does not use CUDA. Raises CudaError, and
        StepFailed for a process that is stopped (SIGSTOP): the driver's call would not return
        before the process goes on."""
        if threads.stopped(pid):
            raise StepFailed(
                "gpu state",
                f"process {pid} is stopped (SIGSTOP), and the driver answers once it goes on",
                hint="let it go on (SIGCONT), and try again",
            )
        try:
            return self.driver.state(pid)
        except CudaError as error:
            if error.result in NO_CUDA:
                return None
            checkpointed = (pid, _began(pid)) in self._held
            if error.result in PERHAPS_NO_CUDA and not checkpointed and not _has_device_files(pid):
                return None
            raise

    def restore_thread(self, pid: int) -> int:
        """The driver's restore thread in the process. Raises StepFailed."""
        with self._explained("restore thread", pid):
            return self.driver.restore_thread(pid)

    # ---- operations: with the turn -------------------------------------------------------------

    def lock(self, pid: int, timeout_s: float) -> None:
        """RUNNING to LOCKED; if that takes too long, the process is RUNNING again."""
        with self._explained("lock", pid):
            try:
                self.driver.lock(pid, max(1, round(timeout_s * 1000)))
            except CudaError as error:
                # The driver makes it RUNNING again. If a driver does not, the job would hang.
                late = error.result == CUresult.NOT_READY
                if late and self.driver.state(pid) is CudaState.LOCKED:
                    self.driver.unlock(pid)
                raise

    def checkpoint(self, pid: int) -> None:
        """LOCKED to CHECKPOINTED, verified by the driver and by NVML."""
        before = self.nvml.inventory()
        used = before.used(pid)
        with self._explained("checkpoint", pid):
            self.driver.checkpoint(pid)
        state = self.state(pid)
        if state is not CudaState.CHECKPOINTED:
            name = state.name if state is not None else "unknown"
            raise StepFailed(
                "gpu checkpoint",
                f"process {pid}: the driver reported success, but the state is {name}",
            )
        self._held = {key: value for key, value in self._held.items() if _began(key[0]) == key[1]}
        self._held[pid, _began(pid)] = used
        self._check_left(pid, used, before)

    def restore(
        self,
        pid: int,
        gpus: Sequence[tuple[str, str]],
        needed: Mapping[str, int] | None,
    ) -> None:
        """CHECKPOINTED to LOCKED, on the GPUs that the map names, if they have room."""
        moved = dict(gpus)
        if all(old == new for old, new in gpus):
            gpus = ()  # so that a driver that takes no map can do it, too
        key = pid, _began(pid)
        if needed is None:
            needed = {moved.get(uuid, uuid): used for uuid, used in self._held.get(key, {}).items()}
        self._check_room(pid, needed)
        with self._explained("restore", pid):
            self.driver.restore(pid, gpus)
        self._held.pop(key, None)

    def unlock(self, pid: int) -> None:
        """LOCKED to RUNNING."""
        with self._explained("unlock", pid):
            self.driver.unlock(pid)

    # ---- verified ------------------------------------------------------------------------------

    def _check_left(self, pid: int, used: Mapping[str, int], before: Inventory) -> None:
        """Check by NVML that the process holds nothing more; raises StepFailed if it does. If NVML
        does not report it, we only log a warning."""
        if not used:
            why = before.why_none or "NVML does not report what this process held on its GPUs"
            log.warning("checkpoint of %d: not verified: %s", pid, why)
            return
        until = time.monotonic() + SETTLE_S
        while True:
            after = self.nvml.inventory()
            if not after.devices:
                log.warning("checkpoint of %d: not verified: %s", pid, after.why_none)
                return
            left = {uuid: held for uuid, held in after.used(pid).items() if held}
            if not left:
                return
            if time.monotonic() > until:
                break
            time.sleep(0.02)
        held = ", ".join(f"{units.size(size)} on {uuid}" for uuid, size in left.items())
        raise StepFailed(
            "gpu checkpoint",
            f"process {pid} is checkpointed, and NVML says that it still holds {held}",
            hint="restore and unlock it: an image of it would lack its device memory",
        )

    def _check_room(self, pid: int, needed: Mapping[str, int]) -> None:
        """Raises StepFailed if a GPU lacks the needed memory. If NVML does not answer, we only log
        a warning and let the driver try."""
        needed = {uuid: size for uuid, size in needed.items() if size}
        if not needed:
            return
        there = self.nvml.inventory()
        if not there.devices:
            log.warning("restore of %d: room not checked: %s", pid, there.why_none)
            return
        gpus = {gpu.uuid: gpu for gpu in there.devices}
        for uuid, size in needed.items():
            if uuid not in gpus:
                raise StepFailed("gpu restore", f"process {pid}: this host has no GPU {uuid}")
            if gpus[uuid].free_bytes < size + MARGIN:
                raise StepFailed(
                    "gpu restore",
                    f"process {pid} needs {units.size(size)} and {units.size(MARGIN)} to spare on"
                    f" {uuid}, which has {units.size(gpus[uuid].free_bytes)} free; not tried, it is"
                    " still checkpointed",
                    hint="free memory of that GPU, or choose another one",
                )

    @contextlib.contextmanager
    def _explained(self, what: str, pid: int) -> Iterator[None]:
        try:
            yield
        except CudaError as error:
            words = _WORDS.get((what, error.result)) or _ANY.get(error.result, "")
            try:
                stopped = threads.stopped(pid)
                state = "it is stopped" if stopped else _STATES[self.driver.state(pid)]
            except CudaError:
                state = "" if error.result in NO_CUDA else "its state is unknown"
            cause = "; ".join(text for text in (words, state) if text)
            raise StepFailed(
                f"gpu {what}", f"process {pid}: {error}{': ' if cause else ''}{cause}"
            ) from None


def _began(pid: int) -> str:
    """When the process began, in clock ticks since boot; "" if unknown. It distinguishes two
    processes with the same pid."""
    try:
        return proc_text.read(f"/proc/{pid}/stat").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _has_device_files(pid: int) -> bool:
    """Whether the process has any of /dev/nvidia* open; true if we can't read that."""
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(entry.path).startswith("/dev/nvidia"):
                    return True
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
