# SPDX-License-Identifier: Apache-2.0
"""All generations of one capsule at its holder. One is kept while the next one comes.

The order: ``expect`` makes an inbox; the receiver's threads fill it; ``held`` compares the memory
with the source's, and keeps the generation; ``drop`` removes the one before. Only the orchestrator
knows which generation is complete at all holders, so nothing kept is removed without ``drop``. What
has come and was not kept is given up when a further generation is expected.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from ....criu_glue.capsule.mounts import Placement
from ....criu_glue.images import written_files
from ....criu_glue.memory.store.held_store import GENERATIONS, HeldStore
from ....errors import LiveshiftError, NotFound, Refused, StepFailed
from ...messages import Frozen, HeldFacts
from ...wire import Lanes, Sender
from ..arrival.inbox import Inbox
from . import saved_image
from .held_generation import HeldGeneration
from .held_note import HeldNote

log = logging.getLogger("liveshift.holding")
T = TypeVar("T")

_BLOCK = 512  # st_blocks counts these (stat(2))
_DIRECTORY = re.compile(r"s([0-9]{1,18})")


@dataclass(frozen=True)
class HeldState:
    """A generation that is kept. ``image_bytes``: sent while the job was frozen. ``bytes``: memory
    that all generations of the capsule take on this host."""

    number: int
    image_bytes: int
    bytes: int


class HeldCapsule:
    """The generations in ``directory``. ``carried``: see HeldPlace. ``budget``: bytes of memory
    that this host offers to generations.

    Methods block; any thread may call them.
    """

    def __init__(self, directory: Path, carried: tuple[str, ...], budget: int) -> None:
        self.directory = directory
        self._carried = carried
        self._budget = budget
        self._generations: dict[int, HeldGeneration] = {}
        self._leaving: set[HeldGeneration] = set()  # dropped, and still sent on
        self._store: HeldStore | None = None  # None while there is no generation
        self._lock = threading.RLock()
        self._gave_way = False  # whether the generations gave way when that was last known

    @classmethod
    def recover(cls, directory: Path, carried: tuple[str, ...], budget: int) -> Self:
        """The generations that an earlier agent has kept. All else in the directory is removed, and
        the directory too if nothing is left."""
        here = cls(directory, carried, budget)
        places = {number: path for path in directory.iterdir() if (number := _number(path))}
        came = {n: found for n, path in places.items() if (found := HeldGeneration.recover(path))}
        kept: list[int] = []
        if came:
            try:
                here._store = HeldStore.load(directory)
                kept = here._store.kept
            except LiveshiftError as error:
                log.error("the memory in %s is lost: %s", directory, error)
        here._generations = {n: generation for n, generation in came.items() if n in kept}
        for number in kept:
            if number not in here._generations and here._store is not None:
                here._store.drop(number)
        for number, path in places.items():
            if number not in here._generations:
                shutil.rmtree(path, ignore_errors=True)
        here._close_if_empty()
        return here

    # ---- what there is -------------------------------------------------------------------------

    @property
    def generations(self) -> list[HeldGeneration]:
        """All that are kept and the one that comes, the newest one last."""
        return [generation for _, generation in sorted(self._generations.copy().items())]

    @property
    def empty(self) -> bool:
        """Whether nothing is here. Then the directory is removed too."""
        with self._lock:  # its removal may be under way, and another capsule object may make it
            return not self._generations and not self._leaving

    @property
    def needed(self) -> int:
        """Bytes of memory that were announced for the newest generation."""
        return max((g.note.needed for g in self.generations[-1:]), default=0)

    def used(self) -> int:
        """Bytes of memory that all generations take."""
        return memory_of(self.directory)

    # ---- a generation that comes ---------------------------------------------------------------

    def expect(self, note: HeldNote, newest: int = 0) -> Inbox:
        """Make the inbox for a further generation; a repeated request gets the same one.

        ``newest``: the generation that a rewind would need, 0 if none is known. If two are kept,
        the other one is removed: its ruling may come a heartbeat later, and snapshots may be taken
        as often. Gives up a generation that was not kept.

        Raises Refused if this generation is not newer than all others, or if two are kept of which
        ``newest`` is none. Raises StepFailed if the memory or the directory cannot be made.
        """
        with self._lock:
            known = self._generations.get(note.number)
            if known is not None and known.inbox is not None:
                return known.inbox
            if (last := max(self._generations, default=0)) >= note.number:
                raise Refused(
                    f"{note.migration} cannot come: s{last} of {note.spec.name} is here already"
                )
            for unkept in [g for g in self.generations if not g.kept]:
                del self._generations[unkept.number]
                self._remove(unkept)
            if len(self._generations) >= GENERATIONS and newest in self._generations:
                for number in self._generations.keys() - {newest}:
                    self.drop(number)
            if len(self._generations) + len(self._leaving) >= GENERATIONS:
                names = " and ".join(f"s{g.number}" for g in [*self.generations, *self._leaving])
                raise Refused(
                    f"{note.migration} cannot come: {names} of {note.spec.name} are held here",
                    hint="one of them is dropped with the next heartbeats; try again then",
                )
            try:
                return self._begin(note)
            finally:
                self._close_if_empty()
                self._gave_way = self._only(lambda note: note.gives_way)

    def stands(self, number: int) -> tuple[int, int]:
        """The generation at which the store stood when ``number`` was expected, and the highest
        incarnation of a process in it. (0, 1): at none, so all memory must come.

        Raises NotFound if there is no generation ``number``, StepFailed if that other one is gone.
        """
        with self._lock:
            if not (base := self._find(number).base):
                return 0, 1
            with self._open().view(base) as view:
                return base, max(view.incarnations().values(), default=1)

    def _begin(self, note: HeldNote) -> Inbox:
        store = self._open(note.limit_bytes)
        base = max(self._generations, default=0)
        # Also if nothing has come since that generation was kept: the store has pages that its
        # tables do not name, and the source has forgotten these (MemoryTracker.image_complete).
        store.revert(base)
        generation = HeldGeneration(note, self.directory / f"s{note.number}", base)
        inbox = generation.begin(store, self._carried)
        self._generations[note.number] = generation
        return inbox

    def held(self, number: int, digest: bytes) -> HeldState:
        """Compare the memory with the source's and keep the generation, unless that was done.

        ``digest``: as in HeldStore.keep. Raises NotFound if there is no such generation, and
        StepFailed if it is not complete. Raises StepFailed too if its memory is not the source's;
        then the generation is removed.
        """
        with self._lock:
            generation = self._find(number)
            if not generation.complete:
                raise StepFailed("hold", f"the image {generation.note.migration} is not complete")
            if not generation.kept:
                try:
                    generation.keep(self._open(), digest)
                except BaseException:
                    self.drop(number)
                    raise
            return HeldState(number, generation.manifest.image_bytes, self.used())

    # ---- what is kept --------------------------------------------------------------------------

    def describe(self, number: int, placement: Placement) -> HeldFacts:
        """What a restore needs of a generation that is kept. Raises NotFound if it is not kept
        here, StepFailed if it cannot be read."""
        with self._lock:
            generation = self._find_kept(number)
            note, manifest = generation.note, generation.manifest
            try:
                written, appended = written_files.shared(
                    generation.images, placement, manifest.written
                )
                return HeldFacts(
                    note.survey,
                    note.facts,
                    generation.size(self._open()),
                    written,
                    note.gpu,
                    {path: which for path, which in manifest.shared.items() if path in written},
                    sorted(appended),
                    generation.digest(),
                )
            except OSError as error:
                raise StepFailed("ship", f"{generation.images} cannot be read: {error}") from error

    def forward(self, number: int, sender: Sender, lanes: Lanes) -> Frozen:
        """Send a generation that is kept to a host that restores it; it stays as it is.

        Raises NotFound if it is not kept here, also if it is damaged: then it is removed. Raises
        StepFailed if it cannot be sent.
        """
        return self._using(
            number, lambda generation, store: generation.forward(store, sender, lanes)
        )

    def hand_over(self, number: int, inbox: Inbox) -> Frozen:
        """Give a generation that is kept to a capsule that is restored on this host; as
        :meth:`forward`."""
        return self._using(number, lambda generation, store: generation.hand_over(store, inbox))

    def compare(self, number: int) -> None:
        """Compare a generation that is kept with what it was then. Raises as :meth:`forward`
        does, which need not compare it again soon after."""
        self._using(number, lambda generation, store: generation.note_compared())

    def _using(self, number: int, send: Callable[[HeldGeneration, HeldStore], T]) -> T:
        with self._lock:
            generation, store = self._find_kept(number), self._open()
            generation.users += 1
        try:
            self._check(generation, store)
            return send(generation, store)
        except OSError as error:
            raise StepFailed("ship", f"{generation.images} cannot be read: {error}") from error
        finally:
            self._unuse(generation)

    def save(self, number: int, target: Path) -> saved_image.WrittenImage:
        """Write the newest snapshot's generation to ``target``. No rewind uses an earlier one any
        more. So this removes those first, and does not save their pages. Raises what
        saved_image.save raises, and NotFound as :meth:`forward` does."""
        with self._lock:
            generation, store = self._find_kept(number), self._open()
            for other in [n for n in self._generations if n < number]:
                self.drop(other)
            generation.users += 1
        try:
            self._check(generation, store)
            note = generation.note
            own = [path for path in generation.images.rglob("*") if path.is_file()]
            files = [*own, *HeldStore.files(self.directory, number)]
            return saved_image.save(self.directory, files, target, note.migration, note.spec.name)
        finally:
            self._unuse(generation)

    def _check(self, generation: HeldGeneration, store: HeldStore) -> None:
        """Remove a generation that is not as it was kept, and raise NotFound. Raises StepFailed if
        that cannot be said. The caller counts as its user, and does not have the lock."""
        try:
            why = generation.damage(store)
        except OSError as error:
            raise StepFailed("ship", f"{generation.images} cannot be read: {error}") from error
        if why:
            log.error("the image %s is damaged: %s", generation.note.migration, why)
            with self._lock:
                self.drop(generation.number)
            raise NotFound(
                f"the image {generation.note.migration} is damaged, so it was removed: {why}",
                hint="a bit of this host's memory has flipped, or a file was changed in"
                f" {generation.images}",
            )

    def _unuse(self, generation: HeldGeneration) -> None:
        with self._lock:
            generation.users -= 1
            if generation in self._leaving and not generation.users:
                self._leaving.discard(generation)
                self._end(generation)

    def drop(self, number: int) -> None:
        """Remove a generation, at once or when it is not sent on any more. It does nothing if there
        is none. With the last one the memory and the directory go too."""
        with self._lock:
            if (generation := self._generations.pop(number, None)) is None:
                return
            generation.stop()
            if generation.users:
                self._leaving.add(generation)
            else:
                self._end(generation)

    def give_up(self, number: int) -> None:
        """Remove a generation that was not kept. Raises Refused, and removes nothing, if it was
        kept. That includes one that was dropped while a thread uses it."""
        with self._lock:
            kept = {g.number for g in (*self.generations, *self._leaving) if g.kept}
            if number in kept:
                raise Refused(f"s{number} is kept in {self.directory} already")
            self.drop(number)

    @property
    def gives_way(self) -> bool:
        """Whether all generations are only the copies of a capsule's own host, and none of them is
        lent to a restore. False while a thread is at work here: a heartbeat asks, and must not
        wait for a digest."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._gave_way = self._only(lambda note: note.gives_way)
            return self._gave_way
        finally:
            self._lock.release()

    @property
    def gives_way_soon(self) -> bool:
        """The same; but while a thread is at work here, as it was before."""
        return self.gives_way or self._gave_way

    @property
    def only_own(self) -> bool:
        """As ``gives_way``, but copies that stay count as well."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._only(lambda note: note.own)
        finally:
            self._lock.release()

    def drop_own(self, *, staying: bool = False) -> bool:
        """Remove all generations if they give way; with ``staying``, if they are own copies.
        Returns whether they were removed."""
        with self._lock:
            if not (self.only_own if staying else self.gives_way):
                return False
            for generation in self.generations:
                self.drop(generation.number)
            return True

    def close(self) -> None:
        """Close all that is open, and leave all files to the next agent."""
        with self._lock:
            for generation in self.generations:
                generation.close()
            if self._store is not None:
                self._store.close()

    # ---- parts of these; the caller has the lock -----------------------------------------------

    def _only(self, counts: Callable[[HeldNote], bool]) -> bool:
        """Whether there are generations, all of them count, and none is in use."""
        if self._store is None or self._store.lent or self._leaving:
            return False
        found = self.generations
        return bool(found) and all(counts(g.note) and not g.users for g in found)

    def _find(self, number: int) -> HeldGeneration:
        if (generation := self._generations.get(number)) is None:
            raise NotFound(f"s{number} is not in {self.directory} (any more)")
        return generation

    def _find_kept(self, number: int) -> HeldGeneration:
        if not (generation := self._find(number)).kept:
            raise NotFound(f"the image {generation.note.migration} was not kept")
        return generation

    def _open(self, limit: int = 0) -> HeldStore:
        """The store. A new one takes what this host offers: the capsule may grow, and a store whose
        limit is too low would have to be replaced, without what it keeps."""
        if self._store is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._store = HeldStore.create(self.directory, max(limit, self._budget))
        return self._store

    def _end(self, generation: HeldGeneration) -> None:
        self._remove(generation)
        if all(g.kept for g in self.generations):
            base = max(self._generations, default=0)
            if generation.number > base > 0:  # what came for it must go
                self._open().revert(base)
        self._close_if_empty()

    def _remove(self, generation: HeldGeneration) -> None:
        generation.close()
        generation.remove()
        if self._store is not None:
            self._store.drop(generation.number)

    def _close_if_empty(self) -> None:
        if self.empty:
            if self._store is not None:
                self._store.close()
            self._store = None
            shutil.rmtree(self.directory, ignore_errors=True)


def memory_of(directory: Path) -> int:
    """Bytes of memory that all files in a directory take."""
    size = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # it is being removed
                size += (Path(folder) / name).lstat().st_blocks * _BLOCK
    return size


def _number(path: Path) -> int:
    """The number of the generation in this directory; 0: it is another file."""
    found = _DIRECTORY.fullmatch(path.name)
    return int(found[1]) if found else 0
