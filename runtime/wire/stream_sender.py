# SPDX-License-Identifier: Apache-2.0
"""Sends the streams of one image in order, and the manifest of all of them at the end.

Where they go is for those that inherit from it: over lane 0 to another host (sender.py), or into an
inbox of this host (local_sender.py).
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence

import xxhash

from ...criu_glue.files.identity import Identity
from ...criu_glue.survey.epoll_sets import EpollEntry
from ..model import manifest
from ..model.manifest import Manifest
from .header import CHUNK


class StreamSender(abc.ABC):
    """``bytes``: sent so far. ``streams``: the bytes of each stream so far."""

    def __init__(self) -> None:
        self.bytes = 0
        self.streams: dict[str, int] = {}
        self._hashes: dict[str, xxhash.xxh3_64] = {}
        self._ended: set[str] = set()

    @property
    @abc.abstractmethod
    def migration(self) -> str:
        """The name of the migration or of the image."""

    @abc.abstractmethod
    def _send(self, stream: str, data: bytes) -> None:
        """Send one chunk, and :meth:`_count` it; empty: the stream ends."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Return when every chunk has been taken; raises like :meth:`send`."""

    def send(self, stream: str, data: bytes | memoryview) -> None:
        """Send bytes (empty: the stream ends); blocks while no credit is left. Raises StepFailed
        when they are refused."""
        if not data:
            self._ended.add(stream)
            self._send(stream, b"")
        for at in range(0, len(data), CHUNK):
            # Copy: the chunk is kept until acknowledged, but the caller reuses a view's memory.
            self._send(stream, bytes(data[at : at + CHUNK]))

    def manifest_streams(self) -> dict[str, tuple[int, int]]:
        """Every stream so far except a manifest: name → (bytes, xxh3-64 of them)."""
        return {
            stream: (self.streams[stream], rolling.intdigest())
            for stream, rolling in self._hashes.items()
            if stream != manifest.STREAM
        }

    def send_manifest(
        self,
        capsule: str,
        image_bytes: int,
        pipes: Mapping[int, int],
        removed: Mapping[str, Iterable[str]],
        beside: Mapping[str, tuple[int, int]] | None = None,
        epoll: Sequence[EpollEntry] = (),
        shared: Mapping[bytes, Identity] | None = None,
        written: Mapping[bytes, int] | None = None,
    ) -> Manifest:
        """End the streams that are still open, and send the manifest of all streams.

        ``beside``: the streams of other lanes (Lanes.end). ``epoll``: the parts of epoll sets that
        CRIU could not dump. ``shared``, ``written``: as in Manifest.

        Once :meth:`finish` has returned, the image is complete at the destination. The image may be
        complete even if this method or finish raises, because the answer may have been lost.
        """
        for stream in [s for s in self.streams if s not in self._ended]:
            self.send(stream, b"")
        found = Manifest(
            version=manifest.VERSION,
            migration=self.migration,
            capsule=capsule,
            image_bytes=image_bytes,
            streams={**self.manifest_streams(), **(beside or {})},
            pipes=dict(pipes),
            removed=manifest.as_bytes(removed),
            epoll=list(epoll),
            shared=dict(shared or {}),
            written=dict(written or {}),
        )
        self.send(manifest.STREAM, manifest.encode(found))
        self.send(manifest.STREAM, b"")
        return found

    def _count(self, stream: str, data: bytes) -> None:
        self._hashes.setdefault(stream, xxhash.xxh3_64()).update(data)
        self.bytes += len(data)
        self.streams[stream] = self.streams.get(stream, 0) + len(data)
