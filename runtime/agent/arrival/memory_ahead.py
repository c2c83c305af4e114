# SPDX-License-Identifier: Apache-2.0
"""Memory that is in place at the destination before the restore begins.

An early CRIU (criu_glue/criu/early.py) starts when the first pages come, and gets the cold ones
while the job trains. It can restore the tree once. If there is none, or if it cannot restore the
tree any more, a fresh CRIU restores the tree, and the fill copies all memory then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from .... import background, units
from ....criu_glue.capsule.sandboxes import Sandbox
from ....criu_glue.criu.early import EarlyCriu
from ....criu_glue.criu.restore import RestoringTree
from ....criu_glue.criu.tool import Criu
from ....criu_glue.images import pids
from ....criu_glue.memory.fill.fill import FillEngine
from ....criu_glue.memory.prefill.prefill import LEAST, memory_left
from ....criu_glue.memory.store.store import MemoryStore
from ....errors import StepFailed
from ...messages import Reserve
from ...model.manifest import Manifest
from ...model.stopwatch import Lap

log = logging.getLogger("liveshift.incoming")


class MemoryAhead:
    """The memory of one incoming capsule that is put in place ahead; ``criu``: None if none is.
    ``idle``: whether this host has idle cores, so that the memory comes in the background."""

    def __init__(
        self,
        criu: Criu | None,
        sandbox: Sandbox,
        images: Path,
        reserve: Reserve,
        *,
        idle: bool = False,
    ) -> None:
        self._criu = criu
        self._idle = idle
        self._halted = False
        self._sandbox = sandbox
        self._images = images
        self._reserve = reserve
        self._early: EarlyCriu | None = None
        self._why_none = ""  # why no memory was in place before the restore, in words

    def begin(self, store: MemoryStore, *, trains: bool) -> None:
        """The first pages have come: start the early CRIU. ``trains``: the job trains meanwhile."""
        if self._idle and trains and not self._halted:
            background.begin(self._reserve.migration)
        if self._criu is not None:
            self._early = EarlyCriu(self._criu, self._sandbox, self._images, store)
            self._early.begin()

    def halt(self) -> None:
        """The tree is frozen at its source: put no more memory in place."""
        self._halted = True
        background.leave(self._reserve.migration)
        if self._early is not None:
            self._early.halt()

    @property
    def lost(self) -> str:
        """Why pages that came are lost, in words; "" if they are not."""
        return self._early.lost if self._early is not None else ""

    @property
    def usable(self) -> bool:
        """Whether an early CRIU has memory in place, and no attempt to restore has used it."""
        return self._early is not None

    @property
    def placed(self) -> tuple[int, bool]:
        """Bytes that are in place before the restore, and whether more will be."""
        return (self._early.bytes, self._early.placing) if self._early is not None else (0, False)

    def restore(
        self,
        tree: RestoringTree,
        criu: Criu,
        store: MemoryStore | None,
        manifest: Manifest,
        deadline_s: float,
        lap: Lap,
        *,
        stopped: bool,
    ) -> None:
        """Restore the tree with the early CRIU, or with a fresh one. Raises StepFailed with no task
        left. ``store``: None if CRIU's image has all memory."""
        until = time.monotonic() + deadline_s
        bring_up = partial(
            tree.bring_up, criu, manifest.pipes, stopped=stopped, epoll=manifest.epoll
        )
        early, self._early = self._early, None
        fill: FillEngine | None = None
        if early is not None and store is not None:
            fill = self._restore_early(early, store, partial(bring_up, deadline_s))
        if fill is None:
            if store is not None:
                spend = not store.lent and _only_once(store.size)
                fill = FillEngine(self._images, store, free_after_copy=spend)
            bring_up(until - time.monotonic(), fill=fill)
        lap.bytes = sum(n for s, (n, _) in manifest.streams.items() if s.startswith("image"))
        if fill is not None:
            seen = fill.seen()
            lap.bytes += seen.bytes + seen.preplaced
            placed = f"{units.size(seen.preplaced)} were in place" if seen.preplaced else ""
            lap.detail = placed or self._why_none

    def _restore_early(
        self, early: EarlyCriu, store: MemoryStore, bring_up: Callable[..., None]
    ) -> FillEngine | None:
        """Return None if the early CRIU could not restore the tree; no task is left then."""
        early.why = early.why or self._ids_in_the_way()
        try:
            if early.prepare():
                spend = _only_once(store.size - early.bytes)
                fill = FillEngine(self._images, store, plan=early.plan, free_after_copy=spend)
                bring_up(fill=fill, early=early)
                return fill
            self._why_none = f"all was filled in now: {early.why}"
        except StepFailed as error:
            self._why_none = f"all was filled in now: {error}"
            log.warning("%s: without memory in place: %s", self._reserve.migration, error)
        finally:
            early.close()
        return None

    def _ids_in_the_way(self) -> str:
        """Why an early CRIU may have an id that the tree needs, in words; "" if none does. The ids
        for CRIU were chosen to avoid those that the tree had at its survey."""
        end = pids.limit()
        last = pids.place(self._reserve.survey.ids, end)
        assert last is not None  # the sandbox was made with it
        found = pids.within_reach(last, end, pids.of_image(self._images))
        return f"CRIU may have id {found[0]}, which a task has got meanwhile" if found else ""

    def drop(self) -> None:
        """End the early CRIU. A second call does no harm."""
        background.end(self._reserve.migration)
        if self._early is not None:
            self._early.drop()


def _only_once(size: int) -> bool:
    """Whether this host lacks the memory to hold ``size`` bytes in the store and in the tree."""
    return memory_left() < max(0, size) + LEAST
