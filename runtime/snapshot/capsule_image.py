# SPDX-License-Identifier: Apache-2.0
"""One capsule's part in a snapshot: the requests to its source and to the holder of its image."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TypeVar

import msgspec

from ... import units
from ...errors import LiveshiftError, Refused, StepFailed
from .. import messages
from ..config.timeouts import Timeouts
from ..cost.model import max_pause
from ..messages import Message
from ..messages.answers import expected
from ..migration.context import limit_bytes
from ..model.jobs import Capsule, Job
from ..model.preflight_findings import PreflightFinding, refuse
from ..model.snapshots import image_bytes
from ..model.spares import NO_GPUS, GpuNeed, need_of
from .context import SnapshotContext

log = logging.getLogger("liveshift.snapshot")
M = TypeVar("M", bound=Message)

FASTEST_DEVICE = 2e9
"""No driver has been seen to take device memory off a GPU and put it back at more bytes per second,
both together (docs/gpu.md). A snapshot that certainly takes too long must not pause the job."""


class CapsuleImage:
    """The image ``image`` of a capsule, which goes from its host to ``holder``. ``neighbour``: the
    holder may die together with a capsule of the job. Then the own host's copy is held, too.
    ``both``: the snapshot fails without that copy, as it would take the place of one that protects
    the job better.

    Its requests go to the host that had the capsule at the beginning, since the session is there.
    """

    def __init__(
        self,
        context: SnapshotContext,
        image: str,
        job: Job,
        capsule: Capsule,
        holder: str,
        limits: Timeouts,
        *,
        neighbour: bool = False,
        both: bool = False,
    ) -> None:
        self.name = capsule.name
        self.host = capsule.host
        self.epoch = capsule.epoch
        self.holder = holder
        self.begun = False
        """Whether the source may have a session."""
        self.left = asyncio.Event()
        """Set once the capsule goes on, or its host is silent: such a host lets it go by itself."""
        self.refused = False
        """Whether the holder could not hold the image."""
        self.digest = b""
        """After :meth:`seal` or :meth:`close`: as in SnapshotClosed."""
        self.gpu_need: GpuNeed = NO_GPUS
        """After :meth:`inspect`: what the capsule needs of the GPUs of a host that restores it."""
        self.carries = False
        """After :meth:`inspect`: whether there are files on carried paths."""
        self.problem = ""
        """What kept the capsule's device state from coming back at the thaw, as text."""
        self.own_copy = False
        """Whether the capsule's own host has a copy of the image, or takes one now."""
        self._neighbour = neighbour
        self._both = neighbour and both
        self._spoilt = ""  # why the image is of no use, in words
        self._context = context
        self._image = image
        self._job = job
        self._capsule = capsule
        self._limits = limits
        self._inspected: messages.Inspected | None = None
        self._hold: messages.Hold | None = None
        self._stands: messages.Holding | None = None

    @property
    def holders(self) -> list[str]:
        """After :meth:`check_held`: the hosts that hold the image."""
        return [self.holder, self.host] if self._neighbour and self.own_copy else [self.holder]

    async def inspect(self) -> int:
        """Survey the capsule; returns the bytes that its image will take at the holder. Raises
        Refused if it can have no snapshot."""
        inspect, limit = messages.Inspect(self.name, snapshot=True), self._limits.prepare
        inspected = await self._request(self.host, inspect, limit, messages.Inspected)
        longest = max_pause(self._context.cluster.precopy, self._limits)
        _check_supported(self.name, inspected, longest)
        carried = {str(path) for path in self._context.cluster.files.carried}
        # along.measure counts the directory itself.
        self.carries = any(a.files > 1 and a.path in carried for a in inspected.survey.along)
        self._inspected, self.gpu_need = inspected, need_of(inspected.gpu)
        return image_bytes(inspected.survey, inspected.gpu)

    async def hold(self, together: dict[str, int]) -> None:
        """Prepare the holder. ``together``: as in Hold."""
        inspected = self._inspected
        assert inspected is not None
        self._hold = messages.Hold(
            image=self._image,
            spec=self._job.spec(self._capsule, self._context.cluster),
            survey=inspected.survey,
            facts=inspected.facts,
            source=self.host,
            epoch=self.epoch,
            rewinds=self._job.rewinds,
            limit_bytes=limit_bytes(inspected),
            newest=self._job.newest.number if self._job.newest else 0,
            together=together,
            gpu=inspected.gpu,
        )
        limit = self._limits.prepare
        try:
            self._stands = await self._request(self.holder, self._hold, limit, messages.Holding)
        except LiveshiftError:  # it has no room, or does not answer: the next one may be better
            self.refused = True
            raise

    async def send_ahead(self, own: dict[str, int] | None, *, ordered: bool = False) -> None:
        """Send what can go while the job trains, once every holder of the job is prepared: the
        capsule's own host keeps a copy where there is room beside that. ``own``: as ``together`` in
        Hold, for that host; None if it is to keep no copy. ``ordered``: as in StartSnapshot."""
        limits, hold, stands = self._limits, self._hold, self._stands
        assert hold is not None
        assert stands is not None
        self._both = self._both and own is not None
        own_stands = await self._hold_own(hold, own)
        base, least = stands.base, stands.least
        if own_stands is not None:
            self.own_copy = True
            least = max(least, own_stands.least)
            if self._neighbour and own_stands.base != base:
                base = 0  # so all memory goes to both
        self.begun = True  # before it is sent: the answer may be lost
        start = messages.StartSnapshot(
            image=self._image,
            capsule=self.name,
            holder=self.holder,
            endpoint=stands.endpoint,
            base=base,
            least=least,
            deadline=limits.precopy - limits.suspicion,
            gpus=sorted(self.gpu_need.used),
            newest=hold.newest,
            own=own_stands.base if own_stands is not None else None,
            ordered=ordered,
        )
        await self._request(self.host, start, limits.precopy, messages.Moved)

    async def _hold_own(
        self, hold: messages.Hold, together: dict[str, int] | None
    ) -> messages.Holding | None:
        """Let the capsule's own host prepare for a copy of the image; None if it takes none."""
        if together is None:
            return None
        own = msgspec.structs.replace(hold, own=True, stays=self._neighbour, together=together)
        try:
            limit = self._limits.prepare
            return await self._request(self.host, own, limit, messages.Holding)
        except LiveshiftError as error:
            if self._both:
                raise
            log.info("%s: %s keeps no copy of it: %s", self._image, self.host, error)
            return None

    async def lock(self, left: float) -> None:
        """Lock the network, for ``left`` seconds at most; the tasks run on behind the lock."""
        lock = messages.LockCapsule(self._image, self.name, left)
        await self._context.request(self.host, lock, self._limits.answer(left))

    async def dump(self, left: float) -> None:
        """Dump the locked capsule within ``left`` seconds. It stays frozen."""
        dump = messages.DumpCapsule(self._image, self.name, left)
        await self._request(self.host, dump, self._limits.answer(left), messages.Frozen)

    async def seal(self, left: float) -> None:
        """Learn the digest of a dumped capsule, which stays frozen for ``left`` seconds at most."""
        seal = messages.SealSnapshot(self._image, self.name)
        answer = self._limits.answer(left)
        sealed = await self._request(self.host, seal, answer, messages.SnapshotClosed)
        self.digest = sealed.digest

    async def thaw(self) -> None:
        """Let the capsule go on; never raises. A source that is not reached within twice
        timeouts.suspicion goes on by itself, because the orchestrator is silent. Device state may
        take as long to come back as in a restore."""
        limits = self._limits
        thaw = messages.ThawCapsule(self._image, self.name)
        within = limits.restore if self.gpu_need.used else limits.suspicion
        until = time.monotonic() + max(within, 2 * limits.suspicion)
        while True:
            try:
                await self._context.request(self.host, thaw, limits.answer(within))
                break
            except Exception as error:
                log.warning("%s: the thaw of %s: %s", self._image, self.name, error)
                if not self._context.is_up(self.host):
                    self.left.set()
                if self.gpu_need.used:
                    self.problem = f"{self.name} did not go on at once on {self.host}: {error}"
            if time.monotonic() > until:
                break
            await asyncio.sleep(limits.heartbeat)
        self.left.set()

    async def close(self) -> None:
        """End the session, and learn the digest of what was sent; never raises."""
        request, limit = messages.CloseSnapshot(self._image, self.name), self._limits.prepare
        try:
            closed = await self._request(self.host, request, limit, messages.SnapshotClosed)
            self.digest = closed.digest
        except Exception as error:
            log.warning("%s: the end of the session of %s: %s", self._image, self.name, error)
            self._spoilt = str(error)

    async def check_held(self) -> int:
        """Let the holder compare what it has with what was sent; returns the bytes that it takes
        there. Raises StepFailed if they differ."""
        if not self.digest:
            incomplete = f"{self.host} has not sent the whole image of {self.name} to {self.holder}"
            why = self._spoilt or incomplete
            raise StepFailed("snapshot", why)
        check = messages.CheckHeld(self._image, self.name, self.digest)
        own = asyncio.ensure_future(self._check_own(check))
        try:
            try:
                held = await self._request(self.holder, check, self._limits.prepare, messages.Held)
            except LiveshiftError:  # it has something else than was sent, or does not answer
                self.refused = True
                raise
            patience = self._limits.prepare if self._neighbour else self._limits.suspicion
            if not (await asyncio.wait({own}, timeout=patience))[0]:
                self.own_copy = False  # perhaps its host is lost: the snapshot must not wait
        finally:
            own.cancel()
        if self._both and not self.own_copy:
            raise StepFailed(
                "snapshot",
                f"{self.host} has no whole copy of the image of {self.name}, which"
                f" {self.holder}, where the job runs too, would hold alone",
            )
        return held.bytes

    async def _check_own(self, check: messages.CheckHeld) -> None:
        """Let the capsule's own host keep its copy, if that is whole."""
        if not self.own_copy:
            return
        try:
            await self._request(self.host, check, self._limits.prepare, messages.Held)
        except LiveshiftError as error:
            self.own_copy = False
            log.info("%s: %s has no copy of it: %s", self._image, self.host, error)

    async def _request(self, host: str, message: Message, timeout: float, expect: type[M]) -> M:
        answer = await self._context.request(host, message, timeout)
        return expected(expect, host, message, answer)


def _check_supported(capsule: str, inspected: messages.Inspected, longest: float) -> None:
    """Raise Refused if the capsule cannot be taken back to an image yet. ``longest``: the most
    seconds for which a snapshot may pause the job."""
    refuse(_against_gpus(capsule, inspected.gpu, longest))
    if inspected.survey.linked:
        raise Refused(
            f"{capsule} can have no snapshot: {inspected.survey.linked[0]}, which is open for"
            " writing on a carried path, has other names too, and a rewind could not tell which"
            " of them are one file",
            hint="have it written under one name, or list its directory under files.shared",
        )
    if inspected.full_dump:
        raise Refused(
            f"{capsule} can have no snapshot: its memory cannot be copied while it trains:"
            f" {inspected.full_dump}",
            hint="the job trains on without snapshots; it can move",
        )


def _against_gpus(
    capsule: str, gpu: messages.GpuSurvey | None, longest: float
) -> list[PreflightFinding]:
    """Why device memory cannot go into an image: the driver would not take it off the GPU, or not
    in the time that there is."""
    if gpu is None:
        return []
    found = [(f"{capsule} can have no snapshot: {what}", hint) for what, hint in gpu.problems]
    if gpu.total > gpu.memory:
        found.append(
            (
                f"{capsule} can have no snapshot: the driver would copy its"
                f" {units.size(gpu.total)} of device memory into host memory, of which"
                f" {units.size(gpu.memory)} are available",
                "free memory on its host; the job trains on without snapshots, and it can move",
            )
        )
    if (least := gpu.total / FASTEST_DEVICE) > longest:
        found.append(
            (
                f"{capsule} can have no snapshot: its {units.size(gpu.total)} of device memory"
                f" need at least {least:.0f} s off the GPU and back, and a pause may last"
                f" {longest:.0f} s",
                "raise precopy.max_pause; the job trains on without snapshots, and it can move",
            )
        )
    return found
