# SPDX-License-Identifier: Apache-2.0
"""The copy of a capsule's image that its own host keeps: a rewind in place then needs no network.

What a snapshot sends to the holder also comes into an inbox here. The job must not pay for an error
in that: it costs the copy, and the snapshot goes on.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger("liveshift.snapshot")


class CopyInbox(Protocol):
    """What receives the copy; arrival/inbox.py has it. The first two may raise anything."""

    def write(self, stream: str, data: memoryview) -> None: ...
    def take_pages(self, chunk: memoryview) -> None: ...
    def close(self) -> None: ...


class OwnCopy:
    """Writes the copy of ``image`` into ``inbox``. Several threads may call its methods at once."""

    def __init__(self, image: str, inbox: CopyInbox) -> None:
        self._image = image
        self._inbox = inbox
        self._failed = False

    def stream(self, name: str, data: bytes) -> None:
        """Take a chunk of a stream (Sender.also)."""
        self._unless_failed(lambda: self._inbox.write(name, memoryview(data)))

    def pages(self, chunk: memoryview) -> None:
        """Take a chunk of pages (Lanes.also)."""
        self._unless_failed(lambda: self._inbox.take_pages(chunk))

    def _unless_failed(self, take: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            take()
        except Exception as error:
            log.warning("%s: its copy is lost: %s", self._image, error)
            self.give_up(str(error))

    def give_up(self, why: str) -> None:
        """Take nothing more: the copy would not be whole."""
        self._failed = True
        log.info("%s: this host keeps no copy of it: %s", self._image, why)
        with contextlib.suppress(Exception):
            self._inbox.close()
