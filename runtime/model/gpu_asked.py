# SPDX-License-Identifier: Apache-2.0
"""The GPUs that ``--to-gpu`` and ``--from-gpu`` name, by an index or the beginning of a UUID."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import NotFound, Refused, WrongUsage
from ..messages import GpuSeat, GpuSurvey, Migrate
from .jobs import Capsule
from .preflight_findings import refuse

HINT = "write HOST/GPU, or just GPU on the host where it runs: an index, or the beginning of a UUID"


@dataclass(frozen=True)
class GpuAsked:
    """The GPU to go to (``host``, ``gpu``), and the one to leave ("": the only one in use)."""

    host: str
    gpu: str
    leave: str


def asked(request: Migrate, capsule: Capsule) -> GpuAsked | None:
    """The GPUs that a request names; None if it names none. Raises WrongUsage for an invalid name,
    Refused for a GPU to leave on a host where the capsule is not."""
    if not request.to_gpu:
        if request.from_gpu:
            raise WrongUsage(
                "--from-gpu was given without --to-gpu", hint="give --to-gpu HOST/GPU too"
            )
        return None
    if request.to:
        raise WrongUsage("--to and --to-gpu were both given", hint="give --to-gpu HOST/GPU alone")
    host, gpu = _split(request.to_gpu)
    on, leave = _split(request.from_gpu) if request.from_gpu else ("", "")
    if on and on != capsule.host:
        raise Refused(
            f"{capsule.name} is on {capsule.host}: it has no GPU of {on} to leave",
            hint=f"give --from-gpu {capsule.host}/GPU",
        )
    return GpuAsked(host or capsule.host, gpu, leave)


def find(text: str, gpus: Sequence[tuple[int, str]], host: str) -> str:
    """The UUID of the one GPU that ``text`` names; ``gpus`` lists a host's GPUs as (index, UUID).

    Raises NotFound for no such GPU, and WrongUsage for several.
    """
    if text.isdecimal():
        found = [uuid for index, uuid in gpus if index == int(text)]
    else:
        found = [uuid for _, uuid in gpus if uuid.lower().startswith(text.lower())]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{index} ({uuid})" for index, uuid in gpus) or "none"
    if found:
        raise WrongUsage(f'"{text}" names several GPUs of {host}', hint=f"its GPUs are: {known}")
    raise NotFound(f'{host} has no GPU "{text}"', hint=f"its GPUs are: {known}")


def seat(text: str, host: str, seats: Sequence[GpuSeat]) -> str:
    """The UUID of a GPU that the heartbeats of its host list; raises as :func:`find` does."""
    if not seats:
        raise Refused(
            f"{host} has no usable GPU",
            hint=f"`liveshift doctor --config FILE` on {host} says what is missing",
        )
    return find(text, list(enumerate(gpu.uuid for gpu in seats)), host)


def left(capsule: str, survey: GpuSurvey | None, leave: str) -> str:
    """The UUID of the GPU that a surveyed capsule must leave: the named one, or else the only one
    in use. Raises Refused, NotFound and WrongUsage."""
    if survey is None or not (survey.processes or survey.problems):
        raise Refused(f"{capsule} uses no GPU", hint="--to-gpu is for ranks that do")
    gpus = survey.host.gpus
    used = [gpu for gpu in gpus if survey.used.get(gpu.uuid)]
    words = (
        " and ".join(f"GPU {gpu.index} ({gpu.uuid})" for gpu in used) or "no GPU that NVML reports"
    )
    if leave:
        uuid = find(leave, [(gpu.index, gpu.uuid) for gpu in gpus], f"the host of {capsule}")
        if uuid not in {gpu.uuid for gpu in used}:
            raise Refused(f"{capsule} has nothing on GPU {leave}", hint=f"it uses {words}")
        return uuid
    if len(used) != 1:
        refuse(survey.problems)
        raise Refused(f"{capsule} uses {words}: say which to leave", hint="give --from-gpu GPU")
    return used[0].uuid


def _split(text: str) -> tuple[str, str]:
    host, slash, gpu = text.rpartition("/")
    if not gpu or (slash and not host):
        raise WrongUsage(f'"{text}" names no GPU', hint=HINT)
    return host, gpu
