# SPDX-License-Identifier: Apache-2.0
"""Orders hosts to save the images of a snapshot in a directory that all of them see, and to load
them from there.

Each holder writes its images. When all are on the disk, one of the holders writes the manifest,
which makes the snapshot whole there (snapshot/saved_snapshot.py). A host that loads an image gets
its digest from the manifest, and refuses any other image.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ...errors import LiveshiftError, NotFound, Unreachable, WrongUsage
from .. import messages
from ..config.cluster import Cluster
from ..control.signatures import Signatures
from ..messages.answers import expected
from ..model.jobs import NAME, Job
from ..model.snapshots import Generation, image_name
from . import saved_snapshot
from .saved_snapshot import SavedSnapshot

SNAPSHOT = re.compile(r"s[1-9][0-9]{0,17}")


class Ask(Protocol):
    """Sends a request to a host's agent; as RewindContext.request."""

    async def __call__(
        self, host: str, message: messages.Message, timeout: float
    ) -> messages.Message | None: ...


@dataclass(frozen=True)
class Found:
    """A snapshot in a directory. ``host``: the one that has read of it. ``signer``: "" if this
    cluster has saved it, else the name under which that cluster's key is trusted."""

    saved: SavedSnapshot
    host: str
    signer: str


class DirectoryImages:
    """``busy``: each job whose images are being saved or loaded → a text that says which."""

    def __init__(self, cluster: Cluster, ask: Ask) -> None:
        self._cluster = cluster
        self._ask = ask
        self._signatures = Signatures(cluster.paths.keys)
        self.busy: dict[str, str] = {}

    async def save(self, job: Job, generation: Generation, directory: str) -> int:
        """Save all images from the memory of their holders; return the bytes that they take on the
        disk. Raises LiveshiftError; the directory then has no such snapshot."""
        first = {name: holders[0] for name, holders in generation.holders.items()}
        last = {name: holders[-1] for name, holders in generation.holders.items()}
        for hosts in (first, last):
            try:
                return await self._save(job, generation, directory, hosts)
            except Exception as error:
                await self._drop(job, generation, directory, hosts)
                if hosts == last or not isinstance(error, NotFound | Unreachable):
                    raise
        raise AssertionError

    async def _drop(
        self, job: Job, generation: Generation, directory: str, hosts: Mapping[str, str]
    ) -> None:
        """Let the hosts remove what they have written of a snapshot that is not whole. What a host
        leaves that does not answer only takes room."""
        await asyncio.gather(
            *(
                self._ask(
                    hosts[c.name],
                    messages.DropSaved(image_name(generation.number, c.index), c.name, directory),
                    self._cluster.timeouts.prepare,
                )
                for c in job.capsules.values()
            ),
            return_exceptions=True,
        )

    async def _save(
        self, job: Job, generation: Generation, directory: str, hosts: Mapping[str, str]
    ) -> int:
        orders = {
            c.name: messages.SaveHeld(image_name(generation.number, c.index), c.name, directory)
            for c in job.capsules.values()
        }
        saved = [
            expected(messages.Saved, hosts[name], orders[name], answer)
            for name, answer in zip(orders, await self._all(hosts, orders), strict=True)
        ]
        digests = {name: each.digest for name, each in zip(orders, saved, strict=True)}
        described = saved_snapshot.describe(self._cluster, job, generation, digests)
        data = saved_snapshot.encode(described, self._signatures)
        write = messages.WriteManifest(job.name, generation.name, directory, data)
        await self._ask(hosts[next(iter(orders))], write, self._cluster.timeouts.prepare)
        return sum(each.bytes for each in saved) + len(data)

    async def find(
        self, hosts: Iterable[str], directory: str, job: str, snapshot: str = ""
    ) -> Found:
        """Return a snapshot of a job in the directory; ``snapshot``: its name there, "" for the
        newest. One of ``hosts`` reads it. Raises LiveshiftError if no host can, or if no trusted
        cluster has signed it; WrongUsage if the name cannot be one."""
        if not NAME.fullmatch(job):  # it becomes part of a path
            raise WrongUsage(f'"{job}" is no name of a job')
        if snapshot and not SNAPSHOT.fullmatch(snapshot):
            raise WrongUsage(f'"{snapshot}" is no name of a snapshot', hint="such as s17")
        error: LiveshiftError = Unreachable("no host is up that could read it")
        read = messages.ReadManifest(job, snapshot, directory)
        for host in hosts:
            try:
                answer = await self._ask(host, read, self._cluster.timeouts.prepare)
            except (NotFound, Unreachable) as missing:  # perhaps another host has it mounted
                if isinstance(missing, NotFound) or isinstance(error, Unreachable):
                    error = missing  # one that has looked knows more
                continue
            data = expected(messages.SavedManifest, host, read, answer).data
            saved, signer = saved_snapshot.decode(data, self._signatures, directory)
            right = saved.job == job and SNAPSHOT.fullmatch(saved.snapshot)
            if not right or snapshot not in ("", saved.snapshot):
                raise LiveshiftError(f"{directory} has {saved.snapshot} of {saved.job} there")
            return Found(saved, host, signer)
        raise error

    async def load(
        self, job: Job, generation: Generation, where: Mapping[str, str], saved: SavedSnapshot
    ) -> None:
        """Let each host of ``where`` load the image of its capsule. Raises LiveshiftError."""
        orders = {
            c.name: messages.LoadHeld(
                image_name(generation.number, c.index),
                c.name,
                generation.directory,
                saved.capsules[c.name].image,
                saved.capsules[c.name].digest,
                c.epoch,
                job.rewinds,
            )
            for c in job.capsules.values()
        }
        await self._all(where, orders)

    async def _all(
        self, hosts: Mapping[str, str], orders: Mapping[str, messages.Message]
    ) -> Collection[messages.Message | None]:
        """Send each capsule's order to its host; raise the first error once all have answered."""
        limit = self._cluster.timeouts.precopy
        done = await asyncio.gather(
            *(self._ask(hosts[name], order, limit) for name, order in orders.items()),
            return_exceptions=True,
        )
        answers: list[messages.Message | None] = []
        for answer in done:
            if isinstance(answer, BaseException):
                raise answer
            answers.append(answer)
        return answers
