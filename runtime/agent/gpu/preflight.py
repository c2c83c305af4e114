# SPDX-License-Identifier: Apache-2.0
"""The destination's checks of GPUs: which new GPU replaces which old one, and whether it can."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .... import units
from ....cuda_snapshot.assignment import Pairs, assign, changes, named
from ....errors import Refused
from ...messages import GpuHost, GpuSurvey
from ...model.preflight_findings import PreflightFinding
from .survey import CHECKPOINTS, NEWER, dotted

SHOWN = 4
"""A message names at most this many reasons of one kind and counts the rest."""


@dataclass
class GpuPlan:
    """The plan for a capsule's GPUs on this host. It can move if ``findings`` is empty."""

    pairs: Pairs = field(default_factory=list)
    plain: str = ""
    """Why device memory cannot be streamed here, in words; "" if it can."""
    host_memory: int = 0
    """Bytes of host memory that the driver's checkpoint takes for device memory, on each host."""
    at_source: bool = False
    """Whether the source causes some of the findings: no other destination avoids those."""
    rows: list[tuple[str, str]] = field(default_factory=list)
    findings: list[PreflightFinding] = field(default_factory=list)


def plan(
    survey: GpuSurvey, here: GpuHost | None, why: str, wanted: Mapping[str, str], host: str
) -> GpuPlan:
    """Plan for a surveyed capsule; raises nothing.

    ``here``: None if this host has no GPU helper, and ``why`` says why. ``wanted``: GPU of the
    source → GPU of this host. ``host``: the name of this host.
    """
    made = GpuPlan(findings=list(survey.problems))
    made.at_source = bool(survey.problems) or survey.by_driver("") > survey.memory
    if not survey.processes:
        return made
    if here is None or not here.gpus:
        why = why if here is None else here.why_none
        made.rows.append(("GPUs", "none can be used here"))
        made.findings.append(
            (
                f"{host} has no usable GPU: {why}",
                f"`liveshift doctor --config FILE` on {host} says what is missing",
            )
        )
        return made
    made.plain = here.fast_path
    made.host_memory = survey.by_driver(made.plain)
    made.findings += _of_driver(survey.host, here, host)
    try:
        made.pairs = assign(survey.host.gpus, survey.used, here.gpus, here.taken, wanted)
    except Refused as refused:
        made.findings.append((str(refused), refused.hint or "choose another host"))
    if changes(made.pairs) and not here.can_remap:
        made.findings.append(
            (
                f"the driver on {host}, {here.driver} (CUDA {dotted(here.cuda)}), cannot restore"
                " onto another GPU than the one of the checkpoint",
                "install a driver of CUDA 13.0 (580) or later on both hosts",
            )
        )
    made.findings += _of_source_memory(survey, made)
    made.rows += [*_rows(survey, here, made), *survey.remarks]
    return made


def _of_driver(source: GpuHost, here: GpuHost, host: str) -> Iterator[PreflightFinding]:
    if here.cuda < CHECKPOINTS:
        yield (
            f"the driver on {host}, {here.driver} (CUDA {dotted(here.cuda)}), cannot restore"
            " a checkpoint",
            NEWER,
        )
    if source.driver and here.driver and source.driver != here.driver:
        kind = "older" if _version(here.driver) < _version(source.driver) else "newer"
        yield (
            f"the driver on {host}, {here.driver}, is {kind} than {source.driver} at the source",
            "install the same one on both hosts: a process keeps the driver library that it was"
            " started with, and a kernel driver serves the library of its own version only",
        )


def _version(driver: str) -> list[int]:
    return [int(part) if part.isdigit() else 0 for part in driver.split(".")]


def _of_source_memory(survey: GpuSurvey, made: GpuPlan) -> Iterator[PreflightFinding]:
    if made.host_memory > survey.memory:
        why = _why_plain(survey, made)
        streamed = f", or let device memory be streamed ({why})" if why else ""
        yield (
            "the source has not enough host memory: the driver copies"
            f" {units.size(made.host_memory)} of device memory into the processes,"
            f" {units.size(survey.memory)} are available",
            f"free memory at the source{streamed}",
        )


def _why_plain(survey: GpuSurvey, made: GpuPlan) -> str:
    return made.plain or next((p.plain for p in survey.processes if p.plain), "")


def _rows(survey: GpuSurvey, here: GpuHost, made: GpuPlan) -> Iterator[tuple[str, str]]:
    yield "GPU driver", f"{here.driver or 'unknown'} (CUDA {dotted(here.cuda)})"
    old = {gpu.uuid: gpu for gpu in survey.host.gpus}
    new = {gpu.uuid: gpu for gpu in here.gpus}
    used = survey.used
    words = [
        f"{named(old[a])} → {named(new[b])}, {new[b].name}, {units.size(used[a])} used"
        for a, b in made.pairs
        if a in used
    ]
    if words:
        yield "GPUs", units.some(words, SHOWN, "; ")
    strange = [
        f"{named(new[b])} for {named(old[a])}, which is at {old[a].pci_bus_id}"
        for a, b in made.pairs
        if a in used and old[a].pci_bus_id not in {gpu.pci_bus_id for gpu in here.gpus}
    ]
    if strange:
        # NVIDIA/cuda-checkpoint issue 48: the process still reports the old address.
        problem = "no GPU here has that PCI address, by which NCCL will look for it"
        yield "PCI addresses", f"{units.some(strange, SHOWN, '; ')}: {problem}"
    streamed = survey.total - made.host_memory
    if why := _why_plain(survey, made):
        found = f"{units.size(made.host_memory)} copied by the driver's checkpoint: {why}"
        yield "device memory", f"{units.size(streamed)} streamed, {found}" if streamed else found
    else:
        yield "device memory", f"{units.size(streamed)} streamed, the rest by the driver"
    off = [named(new[b]) for a, b in made.pairs if a in used and new[b].persistence is False]
    if off:
        # Its helper has called cuInit and stays, so the move works (cuda.h), but takes longer.
        yield (
            "persistence mode",
            f"off here on {units.some(off, SHOWN, '; ')}: nvidia-smi -pm 1 saves seconds",
        )
