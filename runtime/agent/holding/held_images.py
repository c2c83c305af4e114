# SPDX-License-Identifier: Apache-2.0
"""All images that this host holds, by their names on the wire, and the memory that they may take.

They lie in a directory beside those of migrations, on the same tmpfs. It is there only while there
are images. An agent that is restarted takes them up; a host that is restarted has lost them.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from .... import units
from ....errors import LiveshiftError, NotFound, Refused, StepFailed
from ...messages import LoadHeld
from ...model.snapshots import COPY_FREE, KEPT_FREE, image_number, snapshot_of
from ..arrival.inbox import Inbox
from ..host import host_facts
from ..host.running_capsule import CapsuleFactory
from . import saved_image
from .held_capsule import HeldCapsule, memory_of
from .held_generation import HeldGeneration
from .held_note import NOTE, HeldNote

log = logging.getLogger("liveshift.holding")

NOTHING: Mapping[str, int] = {}

HELD = "held"
"""The name of the directory. No migration has this name."""


@dataclass(frozen=True)
class _Loading:
    """A capsule whose image is being loaded into ``directory``. ``needed``: as in HeldCapsule."""

    directory: Path
    needed: int
    empty = False

    def used(self) -> int:
        return memory_of(self.directory)


class HeldImages:
    """The images in ``directory``. ``carried``: see HeldPlace. ``budget``: bytes of memory that
    this host offers to them (snapshots.memory).

    Methods block, except ``generations`` and ``find``; any thread may call them.
    """

    def __init__(self, directory: Path, host: str, carried: tuple[str, ...], budget: int) -> None:
        self._directory = directory
        self._host = host
        self._carried = carried
        self._budget = budget
        self._capsules: dict[str, HeldCapsule] = {}  # by name, "gpt/1"
        self._loading: dict[str, _Loading] = {}  # by name; none of these is in _capsules
        # For both. A load takes minutes, or for ever if a server hangs, so it is not held then.
        self._lock = threading.Lock()

    @classmethod
    def recover(cls, factory: CapsuleFactory, budget: int) -> Self:
        """What an earlier agent has held. What it had not kept is removed."""
        here = cls(factory.images(HELD), factory.host, factory.placement.carried, budget)
        for path in sorted(here._directory.iterdir()) if here._directory.exists() else []:
            try:
                capsule = HeldCapsule.recover(path, here._carried, budget)
            except (OSError, LiveshiftError) as error:  # the agent must start
                log.error("the images in %s are lost: %s", path, error)
                shutil.rmtree(path, ignore_errors=True)
                continue
            for generation in capsule.generations:
                here._capsules[generation.note.spec.name] = capsule
                log.warning("%s: it is held here still", generation.note.migration)
        here._tidy()
        return here

    def generations(self) -> list[HeldGeneration]:
        """All that are here, for claims: those that are kept and those that come."""
        capsules = self._capsules.copy().values()
        return [generation for capsule in capsules for generation in capsule.generations]

    def find(self, migration: str) -> tuple[HeldCapsule, int]:
        """The capsule and the number of the image of that name. Raises NotFound."""
        for capsule in self._capsules.copy().values():
            for generation in capsule.generations:
                if generation.note.migration == migration:
                    return capsule, generation.number
        raise NotFound(f"{self._host} does not hold the image {migration} (any more)")

    def expect(
        self, note: HeldNote, newest: int = 0, together: Mapping[str, int] = NOTHING
    ) -> Inbox:
        """Make the inbox for an image; see HeldCapsule.expect. Raises Refused also if the image
        does not fit into what this host offers; before that, own copies make room for an image that
        is none. ``together``: as in messages.Hold."""
        with self._lock:
            self._capsules = {n: c for n, c in self._capsules.items() if not c.empty}
            name = note.spec.name
            if name in self._loading:
                raise Refused(f"{self._host} is loading another image of {name}: try again")
            capsule = self._capsules.get(name)
            if capsule is None:
                capsule = HeldCapsule(self._place(name), self._carried, self._budget)
            self._make_fit(note, together)
            try:
                inbox = capsule.expect(note, newest)
            finally:
                self._tidy()
            self._capsules[name] = capsule
            return inbox

    def load(
        self, request: LoadHeld, source: Path, check: Callable[[HeldNote], None] = lambda _: None
    ) -> None:
        """Take the image that is saved in ``source``, unless it is kept here.

        Raises as saved_image.read and load do, what ``check`` raises for its note, and Refused if
        there is no room for it, or another image of the capsule.
        """
        with contextlib.suppress(NotFound):
            here, number = self.find(request.image)
            if any(each.number == number and each.kept for each in here.generations):
                return
            here.give_up(number)  # nobody will send the rest of this copy
        saved = saved_image.read(source, request.digest)
        old, capsule = snapshot_of(saved.image), saved.capsule
        if old is None or capsule != request.capsule:
            raise NotFound(f"{source} has {saved.image} of {capsule}, not of {request.capsule}")
        own = f"s{old}/{NOTE}"
        note = _renamed(saved_image.content(source, saved, own), request)
        check(note)
        with self._lock:
            directory = self._begin_loading(capsule, note)
        loaded: HeldCapsule | None = None
        try:
            # The note comes last. An agent that is restarted before takes up no image without.
            saved_image.load(source, directory, saved, without=own)
            HeldGeneration.renumber(directory, old, note)
            found = HeldCapsule.recover(directory, self._carried, self._budget)
            if found.empty:
                raise StepFailed("restore", f"the image in {source} cannot be used: see the log")
            loaded = found
        except (OSError, LiveshiftError) as error:
            shutil.rmtree(directory, ignore_errors=True)
            if isinstance(error, LiveshiftError):
                raise
            raise StepFailed("restore", f"{directory} cannot be made: {error}") from error
        finally:
            with self._lock:
                del self._loading[capsule]
                if loaded is not None:
                    self._capsules[capsule] = loaded
                self._tidy()

    def _begin_loading(self, capsule: str, note: HeldNote) -> Path:
        """Make the directory for an image, and see to it that nothing else gets its memory."""
        if capsule in self._capsules:  # a copy from before its job was suspended
            self._capsules[capsule].drop_own()
        self._capsules = {n: c for n, c in self._capsules.items() if not c.empty}
        directory = self._place(capsule)
        if capsule in self._capsules or directory.exists():
            raise Refused(f"{self._host} holds another image of {capsule}: try again")
        try:
            self._make_fit(note, NOTHING)
            directory.mkdir(parents=True)
        except OSError as error:
            raise StepFailed("restore", f"{directory} cannot be made: {error}") from error
        finally:
            self._tidy()
        self._loading[capsule] = _Loading(directory, note.needed)
        return directory

    def _place(self, capsule: str) -> Path:
        """One directory for each capsule: no job has a dot in its name."""
        return self._directory / capsule.replace("/", ".")

    def _all(self) -> dict[str, HeldCapsule | _Loading]:
        return {**self._capsules, **self._loading}

    def own_bytes(self, besides: str = "", staying: str = "") -> int:
        """Bytes of memory that :meth:`drop_own` would give back."""
        return sum(self._capsules[name].used() for name in self._giving_way(besides, staying))

    def own_bytes_soon(self) -> int:
        """The same, with the copies on which a thread is at work: they give way after that."""
        return sum(c.used() for c in self._capsules.copy().values() if c.gives_way_soon)

    def _giving_way(self, besides: str, staying: str = "") -> list[str]:
        found = self._capsules.copy()
        going = {n: c.only_own if n == staying else c.gives_way for n, c in found.items()}
        return [name for name, goes in going.items() if goes and name != besides]

    def drop_own(self, besides: str = "", staying: str = "") -> list[str]:
        """Remove the copies of capsules that run on this host, except of ``besides``, since memory
        is needed; return the capsules. Of the capsule ``staying`` also a copy that stays: another
        holder sends its image to this host."""
        with self._lock:
            dropped = self._drop_own(besides, staying)
            self._tidy()
        return dropped

    def _drop_own(self, besides: str = "", staying: str = "") -> list[str]:
        going = self._giving_way(besides, staying)
        dropped = [n for n in going if self._capsules[n].drop_own(staying=n == staying)]
        for name in dropped:
            log.info("the copy of %s that its own host kept makes room", name)
        return dropped

    def _make_fit(self, note: HeldNote, together: Mapping[str, int]) -> None:
        """Drop own copies if the image needs their room and is no copy itself. Raises Refused if it
        does not fit."""
        try:
            self._check_fits(note, together)
        except Refused:
            copies = set() if note.gives_way else set(self._giving_way(note.spec.name))
            if not copies:
                raise
            self._check_fits(note, together, copies)
            self._drop_own(note.spec.name)

    def budget_left(self) -> int:
        """Bytes of memory that this host offers to further images. Below 0, the images take more
        than was announced for them."""
        return self._budget - sum(map(_taken, self._all().values()))

    def _check_fits(
        self, note: HeldNote, together: Mapping[str, int], without: Collection[str] = ()
    ) -> None:
        """``without``: capsules whose images are taken to be gone."""
        come = {**together, note.spec.name: note.needed}
        here = {n: c for n, c in self._all().items() if n not in without}
        budget = self._budget
        others = sum(_taken(capsule) for name, capsule in here.items() if name not in come)
        # A capsule of which an image is here already takes what it takes, until that is dropped.
        needed = sum(max(n, here[name].used() if name in here else 0) for name, n in come.items())
        if others + needed <= budget:
            self._check_available(note, come, without)
            return
        it = "it takes" if len(come) == 1 else f"the {len(come)} images of {note.spec.job} take"
        raise Refused(
            f"{self._host} cannot hold the image of {note.spec.name}: {it}"
            f" {units.size(needed)}, and {units.size(max(0, budget - others))} of the"
            f" {units.size(budget)} that {self._host} offers to snapshots are left",
            hint=f"it fits if snapshots.memory is {_spelled(others + needed)} there, or more",
        )

    def _check_available(
        self, note: HeldNote, come: Mapping[str, int], without: Collection[str]
    ) -> None:
        """Raise Refused if what has yet to come of all images would take memory that the processes
        of this host may need."""
        found = self._all()
        used = {name: each.used() for name, each in found.items()}
        here = {name: size for name, size in used.items() if name not in without}
        announced = {name: found[name].needed for name in here}
        left = {n: max(0, size - here.get(n, 0)) for n, size in {**announced, **come}.items()}
        kept = COPY_FREE if note.gives_way else KEPT_FREE
        lacking = sum(left.values())
        spare = host_facts.memory_to_spare(kept) + sum(used[name] for name in without)
        if lacking <= spare:
            return
        raise Refused(
            f"{self._host} cannot hold the image of {note.spec.name}: {units.size(lacking)} are yet"
            f" to come, and {units.size(max(0, spare))} of its memory are available beyond the"
            f" {kept:.0%} that stay free for what runs there",
            hint="the job has a snapshot once memory is free there, or another host can hold it",
        )

    def drop(self, migration: str) -> None:
        """Remove the image of that name, if there is one; see HeldCapsule.drop."""
        try:
            capsule, number = self.find(migration)
        except NotFound:
            return
        capsule.drop(number)
        with self._lock:  # a capsule that makes its directory below this one has the lock
            self._tidy()

    def give_up(self, migration: str, capsule: str) -> None:
        """Remove what has come of an image of ``capsule``; see HeldCapsule.give_up."""
        if (found := self._capsules.get(capsule)) is not None:
            found.give_up(image_number(migration))

    def tidy(self) -> None:
        """Remove the directory once no image is left. :meth:`drop` does that too, unless a thread
        uses the image: that thread removes no more than the image."""
        if not self._capsules or self.generations():
            return
        with self._lock:
            self._capsules = {n: c for n, c in self._capsules.items() if not c.empty}
            self._tidy()

    def _tidy(self) -> None:
        """Remove the directory if nothing is in it."""
        with contextlib.suppress(OSError):
            self._directory.rmdir()

    def close(self) -> None:
        """Close all that is open, and leave all files to the next agent."""
        for capsule in self._capsules.copy().values():
            capsule.close()


def _renamed(raw: bytes, request: LoadHeld) -> HeldNote:
    """The note of an image that another orchestrator may have had made, with what this one knows
    it by."""
    try:
        note = msgspec.msgpack.decode(raw, type=HeldNote)
    except (ValueError, msgspec.DecodeError) as error:  # ValueError: it is not UTF-8
        raise StepFailed("restore", f"the note in the image cannot be read: {error}") from error
    return msgspec.structs.replace(
        note,
        migration=request.image,
        number=image_number(request.image),
        survey=note.survey.in_place(),  # its job runs nowhere, perhaps since the boot of its host
        epoch=request.epoch,
        rewinds=request.rewinds,
    )


def _spelled(size: int) -> str:
    """A size with three figures that is not smaller; the cluster file may have it so."""
    step: int = 10 ** max(0, len(str(size)) - 3)
    return units.size(-(-size // step) * step)


def _taken(capsule: HeldCapsule | _Loading) -> int:
    return 0 if capsule.empty else max(capsule.needed, capsule.used())
