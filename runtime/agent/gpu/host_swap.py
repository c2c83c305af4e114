# SPDX-License-Identifier: Apache-2.0
"""A swap of GPUs on the host where it happens. Every method blocks: the agent runs it in a thread.

CUDA processes swap one after the other: the agent takes a process's device state off the old GPU
and puts it onto the new one; the capsule's other processes stay as they are. After a failure the
state goes back onto the old GPU.

A note in the capsule's directory says how far the swap is. With it a restarted agent can finish the
swap, and can report it to the orchestrator as long as the capsule is here.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from ....criu_glue.capsule import sandboxes
from ....errors import LiveshiftError, StepFailed, Unreachable
from ...daemon.faultpoints import reach
from ...messages import Moved
from ...model.stopwatch import Stopwatch
from ..host.running_capsule import RunningCapsule
from .device_state import DeviceLost, SavedDevices
from .devices import DeviceTree

log = logging.getLogger("liveshift.swap")

NOTE = "gpu-swap"
ATTEMPTS = 2
"""The agent tries this many times to put device state onto a GPU if there is no other way."""

Tree = Callable[[int], DeviceTree]
"""Returns the device state of one process, by its pid inside the capsule."""


class Stage(StrEnum):
    """A SwapNote has one of these stages; the last three end the swap. SWAPPED: all processes run
    on the new GPUs. STAYS: no further process swaps; those in ``SwapNote.done`` keep the new GPU.
    LOST: the device state of a process is lost, so the agent ends the capsule."""

    SAVING = "saving"  # the state of one process is leaving the old GPU
    BRINGING = "bringing"  # the state of one process is going onto the new GPU
    RETURNING = "returning"  # the state of one process is going back onto the old GPU
    SWAPPED = "swapped"
    STAYS = "stays"
    LOST = "lost"


ENDS = frozenset({Stage.SWAPPED, Stage.STAYS, Stage.LOST})


class SwapNote(msgspec.Struct, frozen=True):
    """How far a swap is. ``pids`` (inside the capsule) have still to swap, the first of them is at
    ``stage``; ``done`` have swapped.

    ``saved``: the first one's state, once it is off the GPU. ``why``: why the capsule stays.
    """

    migration: str
    stage: Stage
    pairs: list[tuple[str, str]] = []
    pids: list[int] = []
    done: list[int] = []
    saved: list[SavedDevices] = []
    why: str = ""

    @property
    def over(self) -> bool:
        return self.stage in ENDS


def read(resident: RunningCapsule) -> SwapNote | None:
    """The note of the capsule's last swap; None if there is none or it cannot be read."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.msgpack.decode(_path(resident).read_bytes(), type=SwapNote)
    return None


def write(resident: RunningCapsule, note: SwapNote) -> None:
    """Replace the capsule's note in one step."""
    path = _path(resident)
    path.with_suffix(".new").write_bytes(msgspec.msgpack.encode(note))
    path.with_suffix(".new").rename(path)


class HostSwap:
    """One swap of one capsule. Call :meth:`run`; after the agent's death, or when the helper could
    not be reached, call :meth:`finish`."""

    def __init__(self, resident: RunningCapsule, note: SwapNote, tree: Tree) -> None:
        self.note = note
        self._resident = resident
        self._tree = tree

    def run(self, deadline_s: float) -> Moved:
        """Move all of the note's processes to the other GPU.

        Raises the error that prevented it; the note says where the processes are.
        """
        watch, until = Stopwatch(), time.monotonic() + deadline_s
        while self.note.pids:
            self._note(Stage.SAVING)
            tree = self._tree(self.note.pids[0])
            try:
                if not tree.save(watch):
                    raise StepFailed("gpu save", f"process {self.note.pids[0]} is gone")
                reach("swap.saved")
                if time.monotonic() > until:
                    raise StepFailed("gpu save", f"it took longer than {deadline_s:g} s")
            except Exception as error:
                self._go_back(tree, watch, error)
                raise
            self._note(Stage.BRINGING, saved=list(tree.saved))
            self._bring_over(tree, watch)
        self._note(Stage.SWAPPED)
        return Moved(0, watch.phases)

    def finish(self) -> None:
        """Finish an interrupted swap: forward if the state had left the old GPU, else back. No
        further process swaps. Raises Unreachable while the helper cannot be reached."""
        if self.note.over:
            return
        watch, why = Stopwatch(), self.note.why or "the agent was restarted"
        tree = self._tree(self.note.pids[0])
        tree.saved[:] = self.note.saved
        if self.note.stage is not Stage.BRINGING:
            self._go_back(tree, watch, StepFailed("swap", why))
            return
        try:
            self._bring_over(tree, watch)
        except Unreachable:
            raise
        except Exception:  # the note says what became of it
            return
        if self.note.pids:
            self._note(Stage.STAYS, why=self._with_done(why))

    def _bring_over(self, tree: DeviceTree, watch: Stopwatch) -> None:
        """Return when the process runs on the new GPU; else raise, after it is back or lost.

        Once the driver has put the state onto the new GPU there is no way back.
        """
        for attempt in range(ATTEMPTS):
            try:
                tree.bring_back(watch, self.note.pairs)
                break
            except Unreachable:
                raise
            except Exception as error:
                if not isinstance(error, DeviceLost) and tree.off_gpus():
                    self._go_back(tree, watch, error)
                    raise
                if isinstance(error, DeviceLost) or attempt + 1 == ATTEMPTS:
                    self._lose(tree, str(error))
                    raise
                log.warning("%s: again, since it is there already: %s", self.note.migration, error)
        reach("swap.brought")
        first, *rest = self.note.pids
        done = [*self.note.done, first]
        self._note(Stage.SAVING if rest else Stage.SWAPPED, pids=rest, done=done, saved=[])

    def _go_back(self, tree: DeviceTree, watch: Stopwatch, error: Exception) -> None:
        """Put the process back onto its old GPU; if that fails, it is lost."""
        why = str(error) or type(error).__name__
        self._note(Stage.RETURNING, why=why)
        for attempt in range(ATTEMPTS):
            try:
                tree.bring_back(watch)
                self._note(Stage.STAYS, saved=[], why=self._with_done(why))
                return
            except Unreachable:
                raise
            except Exception as again:
                log.error("%s: back, attempt %d: %s", self.note.migration, attempt + 1, again)
                if isinstance(again, DeviceLost) or attempt + 1 == ATTEMPTS:
                    self._lose(tree, f"{why}; and it cannot go back: {again}")
                    return

    def _lose(self, tree: DeviceTree, why: str) -> None:
        """End the capsule: it would hang at its next CUDA call, and so would all of its job."""
        self._note(Stage.LOST, why=f"its device state is lost, so it was ended: {why}")
        sandboxes.end(self._resident.sandbox)
        with contextlib.suppress(LiveshiftError):  # a restarted agent does it again
            tree.drop()

    def _with_done(self, why: str) -> str:
        if not self.note.done:
            return why
        gone = ", ".join(map(str, self.note.done))
        return f"{why} (on the other GPU already: process {gone})"

    def _note(self, stage: Stage, **more: Any) -> None:
        self.note = msgspec.structs.replace(self.note, stage=stage, **more)
        write(self._resident, self.note)


def _path(resident: RunningCapsule) -> Path:
    return resident.sandbox.plan.directory / NOTE
