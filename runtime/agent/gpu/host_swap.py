# SPDX-License-Identifier: Apache-2.0
"""A swap of GPUs on the host where it happens. Every method blocks: the agent runs it in a thread.

One CUDA process after the other: its device state is taken off the one GPU and put onto the other,
while all others of the capsule are left alone. What fails on the way goes back onto the old GPU.

How far it has come is in a note in the capsule's directory, so that an agent's next life can end
what this one began, and can tell the orchestrator of it until the capsule goes.
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

from ....criu_glue.capsule import room
from ....errors import LiveshiftError, StepFailed, Unreachable
from ...daemon.faultpoints import reach
from ...messages import Moved
from ...model.stopwatch import Stopwatch
from ..host.resident import Resident
from .device_state import DeviceLost, Saved
from .devices import DeviceTree

log = logging.getLogger("liveshift.swap")

NOTE = "gpu-swap"
ATTEMPTS = 2
"""How often the driver is asked to put device state somewhere, where there is no other way."""

Tree = Callable[[int], DeviceTree]
"""The device state of one process, by its pid inside the capsule."""


class Stage(StrEnum):
    SAVING = "saving"  # one process's state is being taken off the old GPU
    BRINGING = "bringing"  # … put onto the new one
    RETURNING = "returning"  # … put back
    SWAPPED = "swapped"
    STAYS = "stays"
    LOST = "lost"


ENDS = frozenset({Stage.SWAPPED, Stage.STAYS, Stage.LOST})


class SwapNote(msgspec.Struct, frozen=True):
    """``pids`` (as inside) have still to go, the first of them is at ``stage``; ``done`` have gone.

    ``saved``: of the first one, once its state is off the GPU. ``why`` it is not swapped.
    """

    migration: str
    stage: Stage
    pairs: list[tuple[str, str]] = []
    pids: list[int] = []
    done: list[int] = []
    saved: list[Saved] = []
    why: str = ""

    @property
    def over(self) -> bool:
        return self.stage in ENDS


def read(resident: Resident) -> SwapNote | None:
    """The note of the capsule's last swap; None where there is none that can be read."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.msgpack.decode(_path(resident).read_bytes(), type=SwapNote)
    return None


def write(resident: Resident, note: SwapNote) -> None:
    """In place of the one before, whole or not at all."""
    path = _path(resident)
    path.with_suffix(".new").write_bytes(msgspec.msgpack.encode(note))
    path.with_suffix(".new").rename(path)


class HostSwap:
    """One swap of one capsule: :meth:`run`, and after an agent's death, or while the helper could
    not be reached, :meth:`finish`."""

    def __init__(self, resident: Resident, note: SwapNote, tree: Tree) -> None:
        self.note = note
        self._resident = resident
        self._tree = tree

    def run(self, deadline_s: float) -> Moved:
        """Bring all of the note's processes over.

        Raises what stood in the way; the note tells what became of it.
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
        """End what was interrupted: forward if the state was off the old GPU, back otherwise, and
        no further process. Raises Unreachable while the helper cannot be reached."""
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
        except Exception:  # the note tells
            return
        if self.note.pids:
            self._note(Stage.STAYS, why=self._with_done(why))

    def _bring_over(self, tree: DeviceTree, watch: Stopwatch) -> None:
        """The process runs on the other GPU; else raises, with it back on the old one, or lost.

        Where the driver has put it onto the other GPU there is no way back, only on.
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
        """The process goes on where it was, or is lost."""
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
        """It would hang at its next CUDA call, and the others of its job with it."""
        self._note(Stage.LOST, why=f"its device state is lost, so it was ended: {why}")
        room.end(self._resident.room)
        with contextlib.suppress(LiveshiftError):  # an agent's next life does it again
            tree.drop()

    def _with_done(self, why: str) -> str:
        if not self.note.done:
            return why
        gone = ", ".join(map(str, self.note.done))
        return f"{why} (on the other GPU already: process {gone})"

    def _note(self, stage: Stage, **more: Any) -> None:
        self.note = msgspec.structs.replace(self.note, stage=stage, **more)
        write(self._resident, self.note)


def _path(resident: Resident) -> Path:
    return resident.room.plan.directory / NOTE
