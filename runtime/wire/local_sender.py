# SPDX-License-Identifier: Apache-2.0
"""Gives the streams of an image to an inbox of the same host, without a wire."""

from __future__ import annotations

from collections.abc import Callable

from .stream_sender import StreamSender

Take = Callable[[str, memoryview], None]
"""Takes one chunk of a stream; empty: the stream ends. Raises StepFailed, OSError."""


class LocalSender(StreamSender):
    """``take``: the inbox of ``migration``. Only one thread may send."""

    def __init__(self, migration: str, take: Take) -> None:
        super().__init__()
        self._migration = migration
        self._take = take

    @property
    def migration(self) -> str:
        return self._migration

    def finish(self) -> None:
        """Do nothing: what was sent has been taken."""

    def _send(self, stream: str, data: bytes) -> None:
        self._count(stream, data)
        self._take(stream, memoryview(data))
