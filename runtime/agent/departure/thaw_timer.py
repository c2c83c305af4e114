# SPDX-License-Identifier: Apache-2.0
"""Ends a snapshot whose time is over.

An orchestrator that is gone, or a request that was lost, must not keep a capsule locked or frozen.
Nothing is promised in a snapshot, so its source may let the capsule go on at any time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger("liveshift.snapshot")

AGAIN_S = 1.0
"""A thaw that fails is tried again after this many seconds."""


class ThawTimer:
    """Calls ``thaw`` in a thread of its own once the time is over, and again until it succeeds.

    ``name`` stands in the log. Every method returns at once, and any thread may call it. Time that
    is over stays over: no later call of :meth:`within` gives more.
    """

    def __init__(self, name: str, thaw: Callable[[], None]) -> None:
        self._name = name
        self._thaw = thaw
        self._changed = threading.Condition()
        self._until = float("inf")  # monotonic seconds
        self._ended = False  # whether it was asked to end now
        self._thawed = False
        self._thread: threading.Thread | None = None

    @property
    def over(self) -> bool:
        """Whether the capsule goes on, or will do so at once."""
        return self._ended or self._thawed or time.monotonic() >= self._until

    @property
    def left(self) -> float:
        """Seconds until the time is over; 0.0 if it is."""
        return 0.0 if self.over else self._until - time.monotonic()

    def within(self, seconds: float) -> None:
        """The time is over in ``seconds``."""
        with self._changed:
            if not self.over:
                self._until = time.monotonic() + seconds
                self._wake()

    def end(self) -> None:
        """The time is over now."""
        with self._changed:
            if not self._thawed:
                self._ended = True
                self._wake()

    def thawed(self) -> None:
        """The capsule goes on: there is nothing left to do."""
        with self._changed:
            self._thawed = True
            self._changed.notify_all()

    def _wake(self) -> None:
        if self._thread is None:
            name = f"thaw {self._name}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        with self._changed:
            while not self.over:
                self._changed.wait(self.left)
            if not (self._ended or self._thawed):
                log.warning("%s: its time is over, so the capsule goes on", self._name)
        reported = ""
        while not self._thawed:
            try:
                self._thaw()
                return
            except Exception as error:
                if str(error) != reported:
                    reported = str(error)
                    log.error("%s: the capsule does not go on yet: %s", self._name, error)
                with self._changed:
                    self._changed.wait_for(lambda: self._thawed, AGAIN_S)
