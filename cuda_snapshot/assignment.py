# SPDX-License-Identifier: Apache-2.0
"""Chooses for each GPU of the source a GPU of the destination; a pure function that gives reasons.

The driver's map must name every GPU that the process could see, used or not. Each must go onto
another GPU, which has the same chip type (cuda.h on cuCheckpointProcessRestore;
NVIDIA/cuda-checkpoint issues 35, 47 and 54). A restore that finds too little memory leaves the
process checkpointed, and it cannot be restored any more (issue 44). So this module counts the
memory before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .. import units
from ..errors import Refused
from .devices import NvmlGpu

MARGIN = 256 << 20
"""A GPU must have this many free bytes beyond what a process held. The real need is not documented:
the size of a context differs by GPU."""

Pairs = list[tuple[str, str]]
"""Pairs of UUIDs (GPU of the source, GPU of the destination), in the source's order."""


def assign(
    sources: Sequence[NvmlGpu],
    used: Mapping[str, int],
    targets: Sequence[NvmlGpu],
    taken: Mapping[str, str],
    wanted: Mapping[str, str],
) -> Pairs:
    """Choose a GPU of ``targets`` for each of ``sources``. Raises Refused with a reason for each
    GPU.

    ``used``: bytes that the capsule has on its GPUs, by UUID. ``taken``: targets that are used by
    or promised to others, and by whom, in words. ``wanted``: source → target as a person asked;
    other processes may use such a target.

    A GPU that is in both lists is the same GPU: if the capsule uses it, it keeps it. The source
    with the largest use chooses first. It takes the GPU with the same PCI address, or else the one
    with the most free memory. A restored process keeps reporting the old PCI address
    (NVIDIA/cuda-checkpoint issue 48), and NCCL looks for its GPU by this address.
    """
    by_uuid = {gpu.uuid: gpu for gpu in targets}
    chosen: dict[str, str] = {}
    order = sorted((g for g in sources if g.uuid in used), key=lambda g: -used[g.uuid])
    for old, new in wanted.items():
        _check_wanted(old, new, sources, by_uuid, chosen)
        source = next(g for g in sources if g.uuid == old)
        if why_not := _why_not(by_uuid[new], source, used, {}):
            raise Refused(f"{named(source)} cannot go onto {named(by_uuid[new])}, which {why_not}")
        chosen[old] = new
    for gpu in order:  # first of all, so that no other source gets it
        if gpu.uuid in by_uuid and gpu.uuid not in {*chosen, *chosen.values()}:
            chosen[gpu.uuid] = gpu.uuid
    for gpu in order:
        if gpu.uuid not in chosen:
            chosen[gpu.uuid] = _best(gpu, used, targets, taken, chosen)
    _place_unused(sources, targets, chosen)
    return [(gpu.uuid, chosen[gpu.uuid]) for gpu in sources]


def changes(pairs: Pairs) -> bool:
    """Whether any pair has two different GPUs, which needs driver 580 (CUDA 13.0)."""
    return any(old != new for old, new in pairs)


def _check_wanted(
    old: str,
    new: str,
    sources: Sequence[NvmlGpu],
    targets: Mapping[str, NvmlGpu],
    chosen: dict[str, str],
) -> None:
    if old not in {gpu.uuid for gpu in sources}:
        raise Refused(
            f"the source has no GPU {old}", hint="`nvidia-smi -L` at the source names its GPUs"
        )
    if new not in targets:
        raise Refused(
            f"the destination has no GPU {new}",
            hint="`nvidia-smi -L` on the destination names its GPUs",
        )
    if new in chosen.values():
        raise Refused(
            f"{new} is named as the target of two GPUs",
            hint="each GPU can stand for one other only",
        )


def _best(
    source: NvmlGpu,
    used: Mapping[str, int],
    targets: Sequence[NvmlGpu],
    taken: Mapping[str, str],
    chosen: dict[str, str],
) -> str:
    given = {new: f"will stand for {old}" for old, new in chosen.items()}
    why = {gpu.uuid: _why_not(gpu, source, used, {**taken, **given}) for gpu in targets}
    able = [gpu for gpu in targets if not why[gpu.uuid]]
    if able:
        alike = [gpu for gpu in able if gpu.pci_bus_id == source.pci_bus_id]
        return max(alike or able, key=lambda gpu: (gpu.free_bytes, -gpu.index)).uuid
    reasons = "; ".join(f"{named(gpu)} {why[gpu.uuid]}" for gpu in targets)
    raise Refused(
        f"no GPU of the destination can take what is on {named(source)} ({source.name},"
        f" {units.size(used[source.uuid])} used): {reasons or 'there is none'}",
        hint="choose a host with a free GPU of the same model, or end what uses the GPUs of this"
        " one",
    )


def _place_unused(
    sources: Sequence[NvmlGpu], targets: Sequence[NvmlGpu], chosen: dict[str, str]
) -> None:
    """Choose targets for the GPUs that the capsule could see but does not use. Nothing goes to such
    a target, so other processes may use it."""
    left = {gpu.uuid: gpu for gpu in targets if gpu.uuid not in chosen.values()}
    unused = [gpu for gpu in sources if gpu.uuid not in chosen]
    for source in unused:
        if source.uuid in left:
            chosen[source.uuid] = left.pop(source.uuid).uuid
    for source in unused:
        if source.uuid in chosen:
            continue
        alike = next((gpu for gpu in left.values() if _same_model(gpu, source)), None)
        if alike is None:
            raise Refused(
                f"the source has {len(sources)} GPUs, the destination {len(targets)}; the driver"
                " wants one at the destination for each that the processes could see, and none is"
                f" left for {named(source)} ({source.name})",
                hint="choose a host with as many GPUs of the same models, or start the job where"
                " only the GPUs that it uses can be seen (NVIDIA_VISIBLE_DEVICES in a container)",
            )
        chosen[source.uuid] = left.pop(alike.uuid).uuid


def _why_not(
    target: NvmlGpu, source: NvmlGpu, used: Mapping[str, int], taken: Mapping[str, str]
) -> str | None:
    needed = used.get(source.uuid)  # a context alone counts as use
    if not _same_model(target, source):
        return f"is another model ({target.name}, not {source.name})"
    if needed is not None and target.mig:
        return "is partitioned by MIG"
    if needed is not None and target.mps:
        return "is shared by MPS clients"
    if target.uuid in taken:
        return taken[target.uuid]
    if needed is None:
        return None
    if target.memory_bytes < needed + MARGIN:
        there, wanted = units.size(target.memory_bytes), units.size(needed + MARGIN)
        return f"has less memory ({there}, {wanted} needed)"
    free = target.free_bytes + used.get(target.uuid, 0)  # the capsule frees its own before
    if free < needed + MARGIN and target.uuid != source.uuid:
        return f"has {units.size(free)} free, {units.size(needed + MARGIN)} needed"
    return None


def _same_model(one: NvmlGpu, other: NvmlGpu) -> bool:
    return (one.name, one.compute_capability) == (other.name, other.compute_capability)


def named(gpu: NvmlGpu) -> str:
    """Text for a GPU: its number on its host, and enough of its UUID to recognise it."""
    return f"GPU {gpu.index} ({gpu.uuid[:12]})"
