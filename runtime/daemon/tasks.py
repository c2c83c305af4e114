# SPDX-License-Identifier: Apache-2.0
"""Background work of a daemon: kept referenced until it ends; an error is logged, never lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger("liveshift.tasks")


class Tasks:
    """Keeps references to running tasks, because asyncio itself keeps only weak ones."""

    def __init__(self) -> None:
        self._running: set[asyncio.Future[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        self.keep(asyncio.create_task(work))

    def keep(self, task: asyncio.Future[Any]) -> None:
        """Do the same for a task that already runs."""
        self._running.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("background work failed", exc_info=error)
