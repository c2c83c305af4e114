# SPDX-License-Identifier: Apache-2.0
"""One generation of one capsule at its holder: an image that comes, or one that is kept.

Its directory has CRIU's images, the manifest, the note, and what HeldPlace makes. They stay as they
came, so the image can be restored any number of times, on any host.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec

from ....criu_glue.memory.store.held_store import HeldStore
from ....criu_glue.memory.store.lent_store import LentStore
from ....criu_glue.memory.store.page_table import ProcessTable
from ....errors import LiveshiftError, NotFound, StepFailed
from ...messages import Frozen
from ...model import manifest
from ...model.manifest import Manifest
from ...wire import PAGE_TABLE, Lanes, LocalSender, Sender, StreamSender
from ...wire.small_images import SmallImagePacker
from ..arrival.forwarding import forward_file
from ..arrival.inbox import FREED_S, Inbox
from ..gpu.device_memory import TABLE, TableInlet
from . import kept_sums
from .held_note import HeldNote, read_note, write_note
from .held_place import HeldPlace, output_file, tree_file

log = logging.getLogger("liveshift.holding")

COMPARED_S = 30.0
"""An image that was compared is not compared again within this many seconds. A rewind has it
compared before it is written, and has it sent on after that, while the job waits."""

Beside = Callable[[], dict[str, tuple[int, int]]]
"""Ends the streams that lie beside those of a sender, and returns their entries in the manifest."""


class HeldGeneration:
    """``base``: the generation whose memory the store had when this one began. A source that knows
    what it has sent for just that one may leave the same out; any other source must send all."""

    def __init__(self, note: HeldNote, images: Path, base: int = 0) -> None:
        self.note = note
        self.images = images
        self.base = base
        self.inbox: Inbox | None = None
        """Takes the image; None once it is kept."""
        self.users = 0  # threads that send it on
        self._dropped = False  # then these threads must stop
        self._wires: list[tuple[Sender, Lanes]] = []  # that these threads use
        self._kept: Manifest | None = None
        self._compared = float("-inf")  # when a rewind last heard that it is undamaged

    def begin(self, store: HeldStore, carried: tuple[str, ...]) -> Inbox:
        """Make the directory and the inbox. Raises StepFailed with nothing left behind."""
        note = self.note
        patience = 0.0 if note.own else FREED_S  # the job would wait, too
        place = HeldPlace(self.images, note.migration, note.spec.name, carried, patience)
        try:
            place.make()
            write_note(self.images, note)
        except OSError as error:
            self.remove()
            raise StepFailed("hold", f"{self.images} cannot be made: {error}") from error
        devices = TableInlet() if note.gpu is not None else None
        by_wire = not note.own
        self.inbox = Inbox(place, devices, note.limit_bytes, None, memory=store, by_wire=by_wire)
        return self.inbox

    @classmethod
    def recover(cls, images: Path) -> Self | None:
        """One that came completely to an earlier agent, which may have kept its memory or not; None
        if it has not come completely."""
        if (note := read_note(images)) is None:
            return None
        here = cls(note, images)
        try:
            here._kept = manifest.load(images).manifest
        except LiveshiftError as error:
            if not isinstance(error, NotFound):
                log.error("the image in %s is lost: %s", images, error)
            return None
        return here

    @staticmethod
    def renumber(directory: Path, old: int, note: HeldNote) -> None:
        """Give the generation ``old``, the only one in ``directory``, a new note, and its number.
        No HeldCapsule may use the directory. Raises StepFailed, OSError."""
        images = directory / f"s{note.number}"
        if old != note.number:
            HeldStore.renumber(directory, old, note.number)
            (directory / f"s{old}").rename(images)
        write_note(images, note)

    @property
    def number(self) -> int:
        return self.note.number

    @property
    def complete(self) -> bool:
        """Whether the whole image has come. Its memory is not compared with the source's yet."""
        return self.kept or (self.inbox is not None and self.inbox.complete)

    @property
    def kept(self) -> bool:
        """Whether it is complete, and its memory is the source's."""
        return self._kept is not None

    @property
    def manifest(self) -> Manifest:
        """The manifest of one that is kept."""
        assert self._kept is not None
        return self._kept

    def keep(self, store: HeldStore, digest: bytes) -> None:
        """Keep it, with the memory that has come, once it is complete. Raises StepFailed if the
        memory has another ``digest`` than the source's."""
        assert self.inbox is not None
        try:
            kept_sums.write(self.images, digest)  # first: a restarted agent has them, or no image
        except OSError as error:
            raise StepFailed("hold", f"{self.images} cannot be written: {error}") from error
        store.keep(self.number, digest)
        self._kept = self.inbox.manifest
        self.inbox.close()
        self.inbox = None

    def damage(self, store: HeldStore) -> str:
        """Say what of the image is not as it was kept; "" if all is. It reads the whole image,
        unless :meth:`note_compared` was called just before. Raises StepFailed, OSError."""
        if time.monotonic() - self._compared < COMPARED_S:
            return ""

        def digest() -> bytes:
            with store.view(self.number) as view:
                return view.digest()

        return kept_sums.damage(self.images, digest)

    def note_compared(self) -> None:
        """Record the time at which a rewind hears that the image is undamaged."""
        self._compared = time.monotonic()

    def digest(self) -> bytes:
        """Return the digest of its memory; see kept_sums.memory."""
        return kept_sums.memory(self.images)

    def size(self, store: HeldStore) -> int:
        """Bytes that :meth:`forward` sends, to within the note. Raises StepFailed, OSError."""
        files = sum(path.stat().st_size for path in self.images.rglob("*") if path.is_file())
        with store.view(self.number) as view:
            return files + view.size + len(msgspec.msgpack.encode(view.table))

    def forward(self, store: HeldStore, sender: Sender, lanes: Lanes) -> Frozen:
        """Send the image to another host, as its source did. Raises StepFailed, also if it is
        dropped meanwhile."""

        def send_memory() -> Beside:
            self._forward_memory(store, sender, lanes)
            return lanes.end

        self._wires.append((sender, lanes))
        try:
            self._check()
            return self._send(sender, send_memory)
        except StepFailed:
            self._check()  # if the image was dropped, that is the reason
            raise
        finally:
            self._wires.remove((sender, lanes))

    def hand_over(self, store: HeldStore, inbox: Inbox) -> Frozen:
        """Give the image to a capsule that is restored on this host: a copy of the files, and the
        memory as it lies here. Raises as :meth:`forward` does."""
        sender = LocalSender(inbox.place.migration, inbox.write)

        def lend_memory() -> Beside:
            lent = LentStore.borrow(store, self.number, inbox.images)
            try:
                inbox.adopt(lent)
            except BaseException:
                lent.close()
                raise
            _send_table(sender, lent.table)
            return dict

        return self._send(sender, lend_memory)

    def _send(self, sender: StreamSender, send_memory: Callable[[], Beside]) -> Frozen:
        """Send all, in the order in which it is taken. ``send_memory``: returns what ends the
        memory's own streams."""
        found, images = self.manifest, self.images
        packer = SmallImagePacker(sender.send)
        for path in sorted(images.glob("*.img")):
            self._check()
            forward_file(functools.partial(packer, path.name), path)
        packer.finish()
        if TABLE in found.streams:
            forward_file(functools.partial(sender.send, TABLE), images / TABLE)
        for stream in found.streams:
            kind, _, name = stream.partition(":")
            if kind == "output":
                self._check()
                forward_file(functools.partial(sender.send, stream), output_file(images, name))
        end_memory = send_memory()
        # What the first pass has brought must be there before the second one changes it.
        for pass_ in ("tree:1:", "tree:2:"):
            for stream in (s for s in found.streams if s.startswith(pass_)):
                self._check()
                forward_file(functools.partial(sender.send, stream), tree_file(images, stream))
        sender.send_manifest(
            found.capsule,
            found.image_bytes,
            found.pipes,
            found.gone(),
            end_memory(),
            found.epoll,
            found.shared,
            found.written,
        )
        sender.finish()
        return Frozen(found.image_bytes, [])

    def _forward_memory(self, store: HeldStore, sender: Sender, lanes: Lanes) -> None:
        def send(chunk: memoryview, release: Callable[[], None]) -> None:
            try:
                self._check()
            except StepFailed:
                release()
                raise
            lanes.pages(chunk, release)

        with store.view(self.number) as view:
            view.forward(send)
            lanes.finish()
            _send_table(sender, view.table)

    def stop(self) -> None:
        """Make the threads that send the image fail soon, since the image is dropped. The host to
        which they send it may have dropped it before, and would never acknowledge the rest."""
        self._dropped = True
        for sender, lanes in self._wires.copy():
            sender.until = lanes.until = float("-inf")

    def _check(self) -> None:
        if self._dropped:
            raise StepFailed("ship", f"the image {self.note.migration} is not held any more")

    def close(self) -> None:
        """Take nothing more. After this no thread writes into the store for this generation."""
        if self.inbox is not None:
            self.inbox.close()
            self.inbox.wait_for_writers()

    def remove(self) -> None:
        """Remove the directory. The manifest goes first: without it no agent takes this up."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (self.images / manifest.FILE).unlink()
        shutil.rmtree(self.images, ignore_errors=True)


def _send_table(sender: StreamSender, table: dict[int, ProcessTable]) -> None:
    sender.send(PAGE_TABLE, msgspec.msgpack.encode(table))
    sender.send(PAGE_TABLE, b"")
