# SPDX-License-Identifier: Apache-2.0
"""Looks whether all images of a snapshot are there, before a rewind to it is written: after that,
nothing of the job is left but these."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol

from ...errors import NotFound, Unreachable
from .. import messages
from ..config.cluster import Cluster
from ..model.jobs import Capsule, Job
from ..model.rewind_places import Place
from ..model.snapshots import Generation, image_name

COMPARED_PER_S = 1e9
"""A holder is expected to compare at least so many bytes of images per second; most do ten times as
many."""


class HostsAsked(Protocol):
    """How the hosts of a cluster are asked."""

    cluster: Cluster

    async def request(
        self, host: str, message: messages.Message, timeout: float
    ) -> messages.Message | None:
        """Send a request to a host's agent and return the answer. Raises what the agent raised, or
        Unreachable."""

    def is_up(self, host: str) -> bool:
        """Whether the host's agent was heard within ``timeouts.suspicion``."""


async def images_gone(
    context: HostsAsked,
    job: Job,
    generation: Generation,
    plan: Mapping[str, Place],
    *,
    trains: bool,
) -> str:
    """Say which image of the plan is gone: no holder has it any more, nor the host on which the
    capsule was. Return "" if all are there.

    ``trains``: the job may train on, so it must not be ended for a damaged image. Then the holders
    compare the images, unless these have just come: they were compared then. Raises LiveshiftError
    if a host that may have an image does not say.
    """
    limit = look_limit(context.cluster, generation)
    compare = trains and time.time() - generation.time > limit

    async def look(capsule: Capsule) -> str:
        image, name = image_name(generation.number, capsule.index), capsule.name
        get = messages.GetHeld(image, name, compare)
        home, why = generation.home(name), ""
        holders = list(dict.fromkeys((plan[name].holder, *generation.holders.get(name, ()))))
        for host in filter(context.is_up, [*holders, *([home] if home else [])]):
            try:
                await context.request(host, get, limit)
                return ""
            except NotFound as gone:
                why = why or f"{image}, the image of {name}, is gone: {gone}"
        if away := next((host for host in holders if not context.is_up(host)), ""):
            raise Unreachable(f"{away}, which may have {image}, the image of {name}, is not up")
        return why

    found = await asyncio.gather(*map(look, job.capsules.values()))
    return next(filter(None, found), "")


def look_limit(cluster: Cluster, generation: Generation) -> float:
    """Seconds in which the holders have compared all images of a snapshot."""
    return cluster.timeouts.prepare + generation.bytes / COMPARED_PER_S
