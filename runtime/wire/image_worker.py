# SPDX-License-Identifier: Apache-2.0
"""Takes what comes on lane 0 for one image, in its order, in a thread of its own.

Storing a chunk may wait for a disk, a shared directory or a GPU. Only the image that needs it waits
then: a job may be frozen until the image of another one is here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import zmq

from .header import Header
from .ordered_lane import WINDOW

WAITING = 2 * WINDOW
"""At most this many chunks of an image wait. A source has WINDOW in flight; more are sent again, or
of a source that does not keep to that."""

IDLE_S = 1.0
"""A thread without work ends after so many seconds."""

Chunk = tuple[Header, list[zmq.Frame]]


class ImageWorker:
    """``take`` is called for one chunk after the other, and must not raise."""

    def __init__(self, take: Callable[[Chunk], None]) -> None:
        self._take = take
        self._chunks: deque[Chunk] = deque()
        self._more = threading.Condition()
        self._runs = False

    def put(self, chunk: Chunk) -> None:
        """Let the thread take the chunk. If too many wait, it is dropped: its source sends it
        again."""
        with self._more:
            if len(self._chunks) == WAITING:
                return
            self._chunks.append(chunk)
            self._more.notify()
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="receive-image", daemon=True).start()

    def _run(self) -> None:
        while (chunk := self._next()) is not None:
            self._take(chunk)
            del chunk  # give its memory back to libzmq

    def _next(self) -> Chunk | None:
        with self._more:
            if not self._more.wait_for(lambda: self._chunks, IDLE_S):
                self._runs = False
                return None
            return self._chunks.popleft()
