# SPDX-License-Identifier: Apache-2.0
"""A host as a holder of images: it answers the orchestrator's requests from Hold to LoadHeld. At
every heartbeat it asks for a ruling on each image.

holding/ does the work. A ruling ends an image that is kept (ownership.rule_held), so no order to
drop one can be lost. A Hold for a further image does so too, if there would be too many.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from ...criu_glue.files.rights import User
from ...criu_glue.survey.found import Survey
from ...errors import LiveshiftError, NotFound
from .. import messages
from ..daemon.faultpoints import reached
from ..model.ownership import Ruling
from ..model.preflight_findings import refuse
from ..model.snapshots import HELD as HELD_SIDE
from ..model.snapshots import KEPT_FREE, image_bytes, image_number
from ..wire import LANES
from . import preflight
from .arrival.inbox import Inbox
from .arrival.restore_attempt import SendClaim
from .holding import saved_manifests
from .holding.held_capsule import HeldCapsule
from .holding.held_generation import HeldGeneration
from .holding.held_images import HELD, HeldImages
from .holding.held_note import HeldNote
from .host import host_facts
from .host.capsule_table import CapsuleTable
from .host.cut_back import cut_back
from .migration_registry import MigrationRegistry

log = logging.getLogger("liveshift.holding")

T = TypeVar("T")

DISK_THREADS = 32
"""At most this many threads save images in directories, load them from there, or cut files back.
What hosts share may hang as long as its server is away, and other work needs the other threads."""


class HoldingHandlers:
    """Answers Hold, CheckHeld, GetHeld and ForwardHeld, and the requests about images in a
    directory. ``budget``: bytes of memory that this host offers to images. No image is here before
    :meth:`recover`."""

    def __init__(
        self,
        capsule_table: CapsuleTable,
        registry: MigrationRegistry,
        send_claim: SendClaim,
        budget: int,
    ) -> None:
        self._capsule_table = capsule_table
        self._registry = registry
        self._send_claim = send_claim
        self._budget = budget
        self._own = capsule_table.cluster.host(capsule_table.host)
        factory = capsule_table.factory
        carried = factory.placement.carried
        self._images = HeldImages(factory.images(HELD), factory.host, carried, budget)
        self._disk = ThreadPoolExecutor(DISK_THREADS, "disk")
        # By capsule. A repeated request waits for the first one.
        self._preparing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._forwarding: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._copying: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._saving: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        # By job.
        self._cutting: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def recover(self) -> None:
        """Go on with the images that an earlier agent has kept."""
        factory = self._capsule_table.factory
        self._images = await asyncio.to_thread(HeldImages.recover, factory, self._budget)

    def close(self) -> None:
        """Close all files, and leave them to the next agent."""
        self._images.close()

    @property
    def busy(self) -> bool:
        """Whether an image comes, or is sent on, saved or loaded. A restart of the agent loses
        that."""
        found = self._images.generations()
        comes = any(not generation.kept and not generation.note.own for generation in found)
        at_work = (
            *self._forwarding.values(),
            *self._copying.values(),
            *self._saving.values(),
            *self._preparing.values(),
        )
        return comes or any(lock.locked() for lock in at_work)

    def held(self) -> list[str]:
        """Return the names of the images that are kept here. An image that still comes is left out:
        this host may have lost an earlier copy of it, and the orchestrator must learn that."""
        return [each.note.migration for each in self._images.generations() if each.kept]

    # ---- a snapshot ----------------------------------------------------------------------------

    async def hold(self, request: messages.Hold) -> messages.Holding:
        """Check that the image fits here, and take it from the source from now on."""
        image, name = request.image, request.spec.name
        note = _note(request)
        async with self._preparing[name]:
            if request.anew:
                await asyncio.to_thread(self._images.give_up, image, name)
                self._registry.receiver.forget(image)
            here = [g for g in self._images.generations() if g.note.spec.name == name]
            repeated = any(g.note.migration == image for g in here)
            if not (repeated or request.own):
                await asyncio.to_thread(self._check, request, here)
            inbox = await asyncio.to_thread(
                self._images.expect, note, request.newest, request.together
            )
            for given_up in (g for g in here if not g.kept and g.note.migration != image):
                self._registry.receiver.forget(given_up.note.migration)
            if not (repeated or request.own):
                self._registry.receiver.expect(
                    image, request.source, inbox, request.limit_bytes, inbox.pages, LANES
                )
            capsule, number = self._images.find(image)
            base, least = await asyncio.to_thread(capsule.stands, number)
        return messages.Holding("" if request.own else f"tcp://{self._own.data}", base, least)

    def own_inbox(self, image: str) -> Inbox | None:
        """Return the inbox for this host's own copy of an image. None: the orchestrator has not
        asked for a copy."""
        for generation in self._images.generations():
            if generation.note.migration == image and generation.note.own:
                return generation.inbox
        return None

    def _check(self, request: messages.Hold, here: list[HeldGeneration]) -> None:
        """Raise Refused if this host could not restore the capsule. For a further image only what
        may have changed at the source is looked at: the other checks run programs, and a snapshot
        comes every few seconds."""
        if any(generation.kept for generation in here):
            refuse(request.survey.problems, at_source=bool(request.survey.problems))
            return
        itself = request.source == self._capsule_table.host  # its own directories are no obstacle
        self._check_here(request.survey.in_place() if itself else request.survey, request.facts)
        self.make_room(image_bytes(request.survey, request.gpu), request.spec.name)

    def _check_here(self, survey: Survey, source: messages.HostFacts) -> None:
        paths = self._capsule_table.cluster.paths
        preflight.check(
            survey,
            source,
            self._registry.facts,
            self._registry.criu,
            host_facts.memory_offered(self._own.memory, self.own_bytes()),
            ahead=True,
            host=self._capsule_table.host,
            capsules=paths.state,
            images=paths.run / "images",
            gives_way=self.own_bytes(),
        )

    async def check(self, request: messages.CheckHeld) -> messages.Held:
        """Keep an image, if its memory is the source's."""
        capsule, number = self._images.find(request.image)
        try:
            state = await asyncio.to_thread(capsule.held, number, request.digest)
        finally:
            if not self._comes(request.image):
                self._registry.receiver.forget(request.image)
        return messages.Held(state.bytes)

    def _comes(self, image: str) -> bool:
        found = self._images.generations()
        return any(g.note.migration == image and not g.kept for g in found)

    # ---- the copies of this host's own capsules --------------------------------------------------

    def own_bytes(self, besides: str = "", staying: str = "") -> int:
        """Bytes of memory that would be free without these copies; that of the capsule ``besides``
        does not count. ``staying``: as in HeldImages.drop_own."""
        return self._images.own_bytes(besides, staying)

    def own_bytes_soon(self) -> int:
        """As HeldImages.own_bytes_soon."""
        return self._images.own_bytes_soon()

    def make_room(self, needed: int, besides: str, staying: str = "") -> None:
        """Let the copies give way, except that of the capsule ``besides``, unless ``needed`` bytes
        are available without that. ``staying``: as in HeldImages.drop_own."""
        images = self._capsule_table.cluster.paths.run / "images"
        free = shutil.disk_usage(images).free if images.exists() else needed
        if min(host_facts.memory_to_spare(0.0), free) < needed:
            self._images.drop_own(besides, staying)

    # ---- a rewind ------------------------------------------------------------------------------

    async def facts(self, request: messages.GetHeld) -> messages.HeldFacts:
        capsule, number = self._images.find(request.image)
        if request.compare:
            async with self._forwarding[request.capsule]:  # a repeated request waits for the first
                await asyncio.to_thread(capsule.compare, number)
        placement = self._capsule_table.factory.placement
        return await asyncio.to_thread(capsule.describe, number, placement)

    async def cut_back(self, request: messages.CutBack) -> messages.CutBackDone:
        user = User(request.uid, request.gid, tuple(request.groups))
        # An answer means that no earlier request cuts any more: the job may write again then.
        until = time.monotonic() + request.deadline
        async with self._cutting[request.job]:
            work = partial(
                cut_back, user, request.sizes, until, request.identities, request.appended
            )
            cut, left = await self._on_disk(work)
        return messages.CutBackDone(cut, left)

    async def forward(self, request: messages.ForwardHeld) -> messages.Frozen:
        """Send an image to a host that restores it, or becomes a further holder of it; it stays
        here as it is."""
        if request.migration == request.image:
            # It has a lock of its own, so that a resumption need not wait for it.
            async with self._copying[request.capsule]:
                return await self._send(*self._images.find(request.image), request)
        async with self._forwarding[request.capsule]:
            capsule, number = self._images.find(request.image)
            if request.destination == self._capsule_table.host:
                frozen = await self._hand_over(capsule, number, request.migration)
            else:
                frozen = await self._send(capsule, number, request)
        await reached("rewind.forwarded")
        return frozen

    async def _send(
        self, capsule: HeldCapsule, number: int, request: messages.ForwardHeld
    ) -> messages.Frozen:
        registry, to = self._registry, request.destination
        with (
            contextlib.closing(
                registry.open_sender(request.migration, to, request.endpoint)
            ) as sender,
            contextlib.closing(registry.open_lanes(sender)) as lanes,
        ):
            return await asyncio.to_thread(capsule.forward, number, sender, lanes)

    async def _hand_over(
        self, capsule: HeldCapsule, number: int, migration: str
    ) -> messages.Frozen:
        if (incoming := self._registry.incoming.get(migration)) is None:
            raise NotFound(f"{self._capsule_table.host} has not reserved a sandbox for {migration}")
        with self._registry.working(migration):
            return await asyncio.to_thread(capsule.hand_over, number, incoming.inbox)

    # ---- a directory ---------------------------------------------------------------------------

    async def save(self, request: messages.SaveHeld) -> messages.Saved:
        capsule, number = self._images.find(request.image)
        directory, job = Path(request.directory), request.capsule.partition("/")[0]

        def save() -> messages.Saved:
            saved_manifests.check_free(directory, job, f"s{number}")
            written = capsule.save(number, directory / job / request.image)
            return messages.Saved(written.bytes, written.digest)

        # One at a time: an earlier attempt that fails late removes what it finds there.
        async with self._saving[request.capsule]:
            return await self._on_disk(save)

    async def drop_saved(self, request: messages.DropSaved) -> None:
        directory, job = Path(request.directory), request.capsule.partition("/")[0]
        number = image_number(request.image)
        async with self._saving[request.capsule]:
            where = directory, job, f"s{number}"
            await self._on_disk(partial(saved_manifests.drop, *where, request.image))

    async def write_manifest(self, request: messages.WriteManifest) -> None:
        where = Path(request.directory), request.job, request.snapshot
        await self._on_disk(partial(saved_manifests.write, *where, request.data))

    async def read_manifest(self, request: messages.ReadManifest) -> messages.SavedManifest:
        where = Path(request.directory), request.job, request.snapshot
        return messages.SavedManifest(await self._on_disk(partial(saved_manifests.read, *where)))

    async def load(self, request: messages.LoadHeld) -> None:
        source = Path(request.directory) / request.capsule.partition("/")[0] / request.saved
        async with self._preparing[request.capsule]:
            self._registry.receiver.forget(request.image)
            load = partial(self._images.load, request, source, self._check_loaded)
            await self._on_disk(load)

    async def _on_disk(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    def _check_loaded(self, note: HeldNote) -> None:
        """Raise Refused if this host could not restore the capsule."""
        self._check_here(note.survey, note.facts)

    # ---- without requests ----------------------------------------------------------------------

    async def keep_claiming(self) -> None:
        """Once per heartbeat, send a claim for each image, and remove those that are over."""
        while True:
            await asyncio.sleep(self._capsule_table.cluster.timeouts.heartbeat)
            if host_facts.memory_to_spare(KEPT_FREE) < 0:
                await asyncio.to_thread(self._images.drop_own)
            await asyncio.gather(*map(self._settle, self._images.generations()))
            await asyncio.to_thread(self._images.tidy)

    async def _settle(self, generation: HeldGeneration) -> None:
        note = generation.note
        try:
            await self.claim(generation)
        except LiveshiftError as error:
            log.warning("%s is not settled yet: %s", note.migration, error)
        except Exception:
            log.exception("%s is not settled yet", note.migration)

    async def claim(self, generation: HeldGeneration) -> None:
        """Send a claim for an image, and apply the ruling. If the image has become whole meanwhile,
        or its transfer has begun again, the ruling is ignored: the next claim says what is so now.
        """
        note, whole = generation.note, generation.kept
        image, name = note.migration, note.spec.name
        claim = messages.Claim(
            image, name, HELD_SIDE, note.epoch, ready=whole, rewinds=note.rewinds
        )
        ruled = await self._send_claim(claim)
        if generation.kept is not whole or generation not in self._images.generations():
            return
        if Ruling(ruled.ruling) is Ruling.END:
            self._registry.receiver.forget(image)
            await asyncio.to_thread(self._images.drop, image)


def _note(request: messages.Hold) -> HeldNote:
    return HeldNote(
        request.image,
        image_number(request.image),
        request.source,
        request.spec,
        request.survey,
        request.facts,
        request.epoch,
        request.rewinds,
        request.limit_bytes,
        image_bytes(request.survey, request.gpu),
        gpu=request.gpu,
        own=request.own,
        stays=request.stays,
    )
