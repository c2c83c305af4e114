# SPDX-License-Identifier: Apache-2.0
"""Receives the streams of one image: CRIU's images, memory, directories, the output log.

It takes only what an image can consist of, and only until the manifest says that all is here. Then
the image is complete, and it stays complete for a restarted agent. A place (image_place.py) says
where directories and output go.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import xxhash

from .... import units
from ....criu_glue.capsule.output import SEGMENT
from ....criu_glue.capsule.sandboxes import STDERR_FD, STDOUT_FD
from ....criu_glue.memory.prefill.prefill import memory_left
from ....criu_glue.memory.store.store import TABLE_LIMIT, MemoryStore, WantedPages, read_table
from ....errors import LiveshiftError, NotFound, StepFailed
from ...model import manifest
from ...model.manifest import Landed, Manifest
from ...wire import PAGE_TABLE, PageStreams, small_images
from ..gpu.device_memory import MEMORY, TABLE, TableInlet
from .image_place import ImagePlace, Sink, append, create
from .memory_ahead import MemoryAhead

log = logging.getLogger("liveshift.inbox")

IMAGE_NAME = re.compile(r"[a-z][a-z0-9-]{0,60}\.img")
"""The names of CRIU's images (criu: image-desc.c). Our own files in that directory have other
names."""

STREAMS = 200_000
OPEN = 512
"""One image may have ``STREAMS`` streams and image files, and ``OPEN`` streams at once. CRIU writes
seven images for each task, one after the other, two for each shared mapping, and some for all."""

OUTPUT = "output"

LOOK = 32 << 20
"""The inbox checks the free memory each time it has taken this many bytes of pages."""

LEFT, FREED_S = 160 << 20, 0.5
"""Minimum free memory in bytes, else the OOM killer may hit another job; and the seconds for which
less is accepted, because early.py may be about to give some back. The refusal must reach the source
of a snapshot before that gives its holder up as silent (PAUSED_SILENCE_S)."""

FRESH = 64 << 20
"""At the freeze, memory is ready for this many bytes of new pages, so that no copy waits for it."""


@dataclass
class Inbox:
    """One image's inbox. ``devices`` is set for a capsule with CUDA processes. ``ahead``: None if
    no memory is put in place before the restore. ``memory``: None if the first pages make it.
    ``by_wire``: whether pages come over lanes; else the source is on this host, and gives them to
    :meth:`take_pages`."""

    place: ImagePlace
    devices: TableInlet | None
    memory_limit: int
    """Bytes of the capsule's own memory that may come in pages; a page may come several times."""
    ahead: MemoryAhead | None
    memory: MemoryStore | None = None
    by_wire: bool = True
    bytes: dict[str, int] = field(default_factory=dict)
    landed: Landed | None = None
    _sinks: dict[str, Sink] = field(default_factory=dict)
    _hashes: dict[str, xxhash.xxh3_64] = field(default_factory=dict)
    _ended: set[str] = field(default_factory=set)
    _files: dict[str, int] = field(default_factory=dict)
    _trees: set[str] = field(default_factory=set)  # streams of directories that have not ended
    _manifest: bytearray = field(default_factory=bytearray)
    _page_table: bytearray = field(default_factory=bytearray)
    _unlooked: int = 0  # bytes of pages since the last check of the free memory
    _making_room: threading.Thread | None = None
    pages: PageStreams = field(init=False)
    """Receives the streams of pages from the lanes."""
    _closed: bool = False
    _adopted: bool = False  # whether all memory has come at once
    _ordered: threading.Lock = field(default_factory=threading.Lock)
    """Guards what comes in order, on lane 0. Its holder may wait for a disk."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards the memory. Page writers take it, which serve all images, so its holder waits for no
    disk. A thread that needs both takes ``_ordered`` first."""
    _writers: int = 0  # threads that write pages into the store
    _no_writers: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._small = small_images.SmallImageUnpacker(self._keep_small)
        self._small_files = 0
        self.pages = PageStreams(self.take_pages, self._wanted_pages, self._take_device)

    @property
    def images(self) -> Path:
        return self.place.images

    @property
    def complete(self) -> bool:
        """Whether the manifest has come and every stream is as it says."""
        return self.landed is not None

    @property
    def manifest(self) -> Manifest:
        """The manifest of a complete image."""
        assert self.landed is not None
        return self.landed.manifest

    def recover_image(self) -> bool:
        """Read what an earlier agent received; return whether the image is complete."""
        try:
            self.landed = manifest.load(self.images)
        except LiveshiftError as error:
            if not isinstance(error, NotFound):
                log.error("the image in %s is lost: %s", self.images, error)
            return False
        self.place.came, self.place.written = self.landed.came, self.landed.written
        self.bytes = {stream: size for stream, (size, _) in self.manifest.streams.items()}
        if PAGE_TABLE in self.bytes:
            try:
                self.memory = MemoryStore.load(self.images)
            except LiveshiftError as error:
                log.error("the memory in %s is lost: %s", self.images, error)
                return False
        return True

    def write(self, stream: str, data: memoryview) -> None:
        """Take one chunk; empty data ends the stream.

        Raises StepFailed for a stream that no image has, OSError if there is no space.
        """
        with self._ordered:
            if self.complete or self._closed:
                raise StepFailed("ship", "the image is closed and takes no more data")
            if stream in self._ended:
                raise StepFailed("ship", f"more came for {stream!a} after its end")
            if stream == manifest.STREAM:
                self._take_manifest(data)
                return
            if stream not in self.bytes:
                self._begin_stream(stream)
            self.bytes[stream] += len(data)
            self._hashes[stream].update(data)
            take, end = self._sinks[stream]
            if data:
                take(data)
            else:
                self._ended.add(stream)
                del self._sinks[stream]
                end()

    def adopt(self, memory: MemoryStore) -> None:
        """Take all memory at once, from a holder on this host: a store that has its table. Raises
        StepFailed if the image takes no memory, or has some already."""
        with self._ordered, self._lock:
            if self.complete or self._closed or not self.memory_limit or self.memory is not None:
                raise StepFailed("restore", "this image cannot take over the memory of another one")
            self.memory, self._adopted = memory, True

    def close(self) -> None:
        """Take nothing more, and close all that is open. A second call does no harm."""
        with self._lock:
            self._closed = True
        with self._ordered:
            for fd in self._files.values():
                os.close(fd)
            self._files.clear()
            self.place.close()
            self._trees.clear()
            self._sinks.clear()
            if self.devices is not None:
                self.devices.close()

    def wait_for_writers(self) -> None:
        """Return once no thread writes pages any more; after :meth:`close`. The store may then be
        used for another image."""
        with self._no_writers:
            self._no_writers.wait_for(lambda: not self._writers)

    def forget_memory(self) -> None:
        """Free the pages; the image's directory will be removed next."""
        with self._ordered, self._lock:
            if self.memory is not None:
                self.memory.close()
            self.memory = None

    def path(self, kind: str, name: str) -> Path:
        """The path of a stream that is a file; raises StepFailed for one that no image has."""
        if kind == OUTPUT and SEGMENT.fullmatch(name):
            return self.place.output(name)
        if kind == "image" and IMAGE_NAME.fullmatch(name):
            return self.images / name
        raise _unknown(f"{kind}:{name}")

    def _begin_stream(self, stream: str) -> None:
        if self._full() or len(self._files) + len(self._trees) >= OPEN:
            raise StepFailed("ship", f"the image has too many streams: {len(self.bytes)}")
        self._sinks[stream] = self._sink(stream)
        self.bytes[stream] = 0
        self._hashes[stream] = xxhash.xxh3_64()

    def _sink(self, stream: str) -> Sink:
        """What takes a new stream; raises StepFailed for one that no image has."""
        kind, _, name = stream.partition(":")
        pass_, _, tree = name.partition(":")
        if kind in ("image", small_images.STREAM) and self.ahead is not None:
            with self._lock:
                self.ahead.halt()
        if kind in (OUTPUT, "image"):
            file = self._files[stream] = create(self.path(kind, name))
            return partial(append, file), lambda: os.close(self._files.pop(stream))
        if kind == "tree" and pass_ in ("1", "2"):
            take, end = self.place.tree(stream, tree)
            self._trees.add(stream)
            return take, partial(self._end_tree, stream, end)
        if stream == small_images.STREAM:
            return self._small.write, self._small.check_ended
        if stream == PAGE_TABLE and self.memory_limit:
            return self._take_page_table, self._end_page_table
        if self.devices is not None and stream == TABLE:
            return self.devices.write_table, partial(self._end_device_table, self.devices)
        if self.devices is not None and kind == MEMORY and name:
            filler = self.devices.filler(name)
            return filler.write, filler.finish
        raise _unknown(stream)

    def _keep_small(self, name: str, data: memoryview) -> None:
        self._small_files += 1
        if self._full():
            raise StepFailed("ship", f"the image has too many files: {self._small_files}")
        try:
            file = create(self.path("image", name))
        except FileExistsError:
            raise StepFailed("ship", f"the image {name} comes twice") from None
        try:
            append(file, data)
        finally:
            os.close(file)

    def _full(self) -> bool:
        return len(self.bytes) + self._small_files >= STREAMS

    def _end_tree(self, stream: str, end: Callable[[], object]) -> None:
        self._trees.discard(stream)
        end()

    def _end_device_table(self, devices: TableInlet) -> None:
        devices.end_table()
        (self.images / TABLE).write_bytes(devices.table)

    def _take_device(self, process: int, at: int, chunk: memoryview) -> None:
        """Take device memory; several threads call this."""
        if self.complete or self._closed or self.devices is None:
            raise StepFailed("ship", "this image takes no device memory")
        self.devices.write_at(process, at, chunk)

    def take_pages(self, chunk: memoryview) -> None:
        """Take a chunk of pages. Several threads may call this: they copy into the store at the
        same time. Raises StepFailed."""
        with self._lock:
            if self.complete or self._closed or not self.memory_limit:
                raise StepFailed("ship", "this image takes no pages of memory")
            self._unlooked += len(chunk)
            if self._unlooked > LOOK:
                need_memory(FREED_S if self.by_wire else 0.0)  # else the job waits too
                self._unlooked = 0
            first = self.memory is None
            memory = self._store()
            if first and self.ahead is not None:
                self.ahead.begin(memory, trains=self._making_room is None)
            with self._no_writers:
                self._writers += 1
        try:
            memory.write(chunk)
        finally:
            with self._no_writers:
                self._writers -= 1
                self._no_writers.notify_all()

    def _wanted_pages(self) -> list[WantedPages]:
        with self._lock:
            return self.memory.wants() if self.memory is not None and not self._closed else []

    def _store(self) -> MemoryStore:
        if self.memory is None:
            self.memory = MemoryStore.create(self.images, self.memory_limit)
        return self.memory

    def make_room(self, stop: int = 0) -> bool:
        """Prepare memory for the pages that come during the freeze, so that the job does not wait
        for it then: the kernel clears each page at its first use, and on a virtual machine the
        hypervisor may have to find it. May be called repeatedly.

        ``stop``: bytes of memory that all come during the freeze, as none is pre-copied. A thread
        prepares memory for them. Returns whether that thread still works.
        """
        if stop and self._making_room is None and self.memory_limit and not self.complete:
            with self._lock:
                memory = self._store()
            size = min(stop, self.memory_limit, max(0, memory_left() - 2 * LEFT))
            self._making_room = threading.Thread(
                target=self._reserve, args=(memory, size), name="room", daemon=True
            )
            self._making_room.start()
        elif self.memory is not None and not self.complete and self._making_room is None:
            self._reserve(self.memory, FRESH)
        return self._making_room is not None and self._making_room.is_alive()

    @staticmethod
    def _reserve(memory: MemoryStore, size: int) -> None:
        with contextlib.suppress(StepFailed):  # the writer that needs the memory meets this error
            memory.reserve(size)

    def _take_page_table(self, data: memoryview) -> None:
        if len(self._page_table) + len(data) > TABLE_LIMIT:
            raise StepFailed("ship", f"the table of pages has more than {TABLE_LIMIT} bytes")
        self._page_table += data

    def _end_page_table(self) -> None:
        """Raises StepFailed unless every page of the table has come. This is checked before the
        source promises."""
        table = read_table(bytes(self._page_table))
        with self._lock:
            if not self._adopted:
                self._store().end(table)  # no pages: memory is all zeros
            elif self._store().table != table:
                raise StepFailed("restore", "the memory that was taken over is of another image")

    def _take_manifest(self, data: memoryview) -> None:
        if data:
            if len(self._manifest) + len(data) > manifest.LIMIT:
                raise StepFailed("ship", f"the manifest has more than {manifest.LIMIT} bytes")
            self._manifest += data
            return
        found = manifest.decode(self._manifest)
        self._verify(found)
        if self.ahead is not None and (why := self.ahead.lost):
            raise StepFailed("ship", f"memory that was put in place in advance is lost: {why}")
        with self._lock:
            if self.memory is not None:
                self.memory.save()
        came, written = self.place.came, self.place.written
        for tree, names in found.gone().items():  # names that came and were removed later
            came.get(tree.removeprefix("carried:"), set()).difference_update(names)
        manifest.save(self.images, found, came, written)
        self.landed = Landed(found, came, written)

    def _verify(self, found: Manifest) -> None:
        """Raises StepFailed unless the manifest belongs to this image and all it lists is here."""
        who = (found.migration, found.capsule)
        if who != (self.place.migration, self.place.capsule):
            raise StepFailed("ship", f"the manifest is of another image: {who!a}")
        not_ended = [s for s in self.bytes if s not in self._ended] + self.pages.not_ended()
        if not_ended:
            raise StepFailed("ship", f"the image is not complete: {_some(not_ended)} did not end")
        have = {s: (size, self._hashes[s].intdigest()) for s, size in self.bytes.items()}
        have |= self.pages.streams()
        streams = found.streams
        if not self.by_wire:  # what the lanes carry to the holder does not come here
            streams = {s: n for s, n in streams.items() if not s.startswith(f"{PAGE_TABLE}:")}
        if have != streams:
            wrong = [s for s in have.keys() | streams if have.get(s) != streams.get(s)]
            raise StepFailed("ship", f"the image is not complete or damaged: {_some(wrong)}")
        if not set(found.pipes.values()) <= {STDOUT_FD, STDERR_FD}:
            raise StepFailed("ship", f"the manifest names pipes that no capsule has: {found.pipes}")
        for tree in found.removed:
            self.place.check_tree(tree)


def need_memory(patience: float = FREED_S) -> None:
    """Raises StepFailed if this host has too little free memory for ``patience`` seconds."""
    until = time.monotonic() + patience
    while (left := memory_left()) < LEFT:
        if time.monotonic() > until:
            raise StepFailed(
                "ship",
                f"this host has no memory for more: {units.size(left)} are left",
                hint="choose a host with more free memory, or free some of it there",
            )
        time.sleep(0.01)


def _unknown(stream: str) -> StepFailed:
    return StepFailed(
        "ship", f"an image names a stream that no destination takes: {stream[:200]!a}"
    )


def _some(streams: list[str]) -> str:
    return units.some((f"{s[:80]!a}" for s in sorted(streams)), 5)
