# SPDX-License-Identifier: Apache-2.0
"""Which GPUs change places when a capsule is to leave one for another of its host. Pure.

The map that the driver wants names every GPU that a process could see (assignment.py), so the one
that is left stands for the other one in turn; nothing goes there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ..cuda_snapshot.assignment import named
from ..cuda_snapshot.devices import Gpu
from ..errors import NotFound, Refused
from . import gpu_preflight
from .messages import GpuSurvey, SwapPlan


def choose(
    capsule: str, survey: GpuSurvey | None, to: str, leave: str, promised: Mapping[str, str]
) -> SwapPlan:
    """The plan for a surveyed capsule; ``to`` and ``leave`` as in LookAtGpus, ``promised``: GPUs
    that moves under way have been promised, by uuid, and to whom, in words.

    Raises NotFound for a GPU that is not here, and Refused with every finding at once.
    """
    if survey is None or not (survey.processes or survey.problems):
        raise Refused(f"{capsule} uses no GPU", hint="--to-gpu is for ranks that do")
    gpus = survey.host.gpus
    if not gpus:
        _refuse(survey.problems)
    new = _find(to, gpus)
    old = _left(capsule, survey, new, leave)
    if new.uuid in promised:
        raise Refused(
            f"{named(new)} {promised[new.uuid]}", hint="name another GPU, or wait for that move"
        )
    going = [process for process in survey.processes if process.used.get(old.uuid)]
    both = [process for process in going if process.used.get(new.uuid)]
    if both:
        raise Refused(
            f"process {both[0].pid} ({both[0].name}) uses {named(new)} as well as {named(old)}",
            hint="name a GPU that it does not use: what it has on one cannot be split or joined",
        )
    these = msgspec.structs.replace(survey, processes=going)
    made = gpu_preflight.plan(these, survey.host, "", {old.uuid: new.uuid})
    _refuse(made.troubles)
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


def _find(text: str, gpus: Sequence[Gpu]) -> Gpu:
    """By index, or by as much of the uuid as tells it apart."""
    if text.isdecimal():
        found = [gpu for gpu in gpus if gpu.index == int(text)]
    else:
        found = [gpu for gpu in gpus if gpu.uuid.lower().startswith(text.lower())]
    if len(found) == 1:
        return found[0]
    known = ", ".join(map(named, gpus))
    if found:
        raise Refused(f'"{text}" names several GPUs', hint=f"GPUs here: {known}")
    raise NotFound(f'no GPU "{text}" here', hint=f"GPUs here: {known}")


def _left(capsule: str, survey: GpuSurvey, new: Gpu, leave: str) -> Gpu:
    """The GPU to leave: the one that was named, or else the only one in use."""
    gpus = {gpu.uuid: gpu for gpu in survey.host.gpus}
    used = [gpus[uuid] for uuid, size in survey.used.items() if size and uuid in gpus]
    used.sort(key=lambda gpu: gpu.index)
    words = ", ".join(map(named, used)) or "none that NVML tells of"
    if leave:
        old = _find(leave, survey.host.gpus)
        if old not in used:
            raise Refused(f"{capsule} has nothing on {named(old)}", hint=f"it uses {words}")
    elif len(used) == 1:
        old = used[0]
    else:
        _refuse(survey.problems)
        raise Refused(
            f"{capsule} uses {words}: which one is to be left?", hint="say so: --from-gpu GPU"
        )
    if old.uuid == new.uuid:
        raise Refused(f"{capsule} is on {named(new)} already", hint="name another GPU")
    return old


def _refuse(troubles: Sequence[tuple[str, str]]) -> None:
    if troubles:
        hints = dict.fromkeys(remedy for _, remedy in troubles)
        raise Refused("; ".join(text for text, _ in troubles), hint="; ".join(hints))
