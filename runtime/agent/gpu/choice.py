# SPDX-License-Identifier: Apache-2.0
"""Chooses which GPUs change places when a capsule leaves one for another of its host. The functions
are pure.

The driver needs a map that names every GPU that a process could see (assignment.py). So the map
also sends the new GPU to the old one, although nothing moves there.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ....cuda_snapshot.assignment import named
from ....errors import Refused
from ...messages import GpuSurvey, SwapPlan
from ...model.gpu_asked import find, left
from ...model.preflight_findings import refuse
from . import preflight as gpu_preflight


def choose(
    capsule: str, survey: GpuSurvey | None, to: str, leave: str, promised: Mapping[str, str]
) -> SwapPlan:
    """The plan for a surveyed capsule. ``to`` and ``leave`` are those of LookAtGpus; ``promised``:
    GPUs promised to moves under way, uuid → the reason in words.

    Raises NotFound for a GPU that is not here, and Refused with all findings at once.
    """
    leave = left(capsule, survey, leave)
    assert survey is not None
    gpus = {gpu.uuid: gpu for gpu in survey.host.gpus}
    seen = [(gpu.index, gpu.uuid) for gpu in survey.host.gpus]
    old, new = gpus[leave], gpus[find(to, seen, f"the host of {capsule}")]
    if old.uuid == new.uuid:
        raise Refused(f"{capsule} is on {named(new)} already", hint="name another GPU")
    if new.uuid in promised:
        raise Refused(
            f"{named(new)} is not free: it {promised[new.uuid]}",
            hint="name another GPU, or wait for that move",
        )
    going = [process for process in survey.processes if process.used.get(old.uuid)]
    both = [process for process in going if process.used.get(new.uuid)]
    if both:
        raise Refused(
            f"process {both[0].pid} ({both[0].name}) uses {named(new)} as well as {named(old)}",
            hint="name a GPU that it does not use: what it has on one cannot be split or joined",
        )
    these = msgspec.structs.replace(survey, processes=going)
    made = gpu_preflight.plan(
        these, survey.host, "", {old.uuid: new.uuid}, f"the host of {capsule}"
    )
    refuse(made.findings)
    rows = [*made.rows, ("processes", ", ".join(f"{p.pid} ({p.name})" for p in going))]
    if new.uuid in survey.host.taken:
        rows.append(("shared", f"{named(new)} {survey.host.taken[new.uuid]}"))
    return SwapPlan(
        leave=f"GPU {old.index}",
        to=f"GPU {new.index}",
        pairs=made.pairs,
        pids=[process.pid for process in going],
        bytes=sum(process.used[old.uuid] for process in going),
        checks=rows,
    )
