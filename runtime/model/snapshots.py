# SPDX-License-Identifier: Apache-2.0
"""Snapshots of whole jobs: what one consists of, and how its images are named."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...criu_glue.survey.found import Survey
from ...errors import LiveshiftError
from ..messages import GpuSurvey
from .spares import GpuNeed

HELD = "held"
"""The side of a claim for a held image. It is no ownership.Side: such an image never runs."""

IMAGE = re.compile(r"s([1-9][0-9]{0,17})\.[0-9]{1,9}")
"""The name of a capsule's image in a snapshot. SQLite's integers have 64 bits."""


COPY_FREE, KEPT_FREE, SHORT, NEEDED_AT_ONCE = 0.15, 0.1, 0.05, 0.02
"""Shares of a host's memory. The images that a host takes must leave KEPT_FREE of it to what runs
there. The copies of its own capsules must leave COPY_FREE, and go if less than KEPT_FREE is left.
With less than SHORT left a host keeps no snapshot if another one can. With less than NEEDED_AT_ONCE
a snapshot is given up for it: the kernel would soon end a process."""

RESTORE = re.compile(r"r[1-9][0-9]{0,17}\.[0-9]{1,9}")
"""The name under which a rewind restores a capsule."""


@dataclass(frozen=True)
class Generation:
    """A complete snapshot of a job; the journal keeps it in this form.

    ``number`` counts the snapshots of all jobs. ``boundary``: where all ranks were, as text.
    ``time``: of the boundary, in seconds since 1970 (time.time()). ``rewinds``: how often the job
    had been rewound. ``owners``: the host and epoch of each capsule. ``holders``: the hosts that
    hold the image of each capsule. ``bytes``: memory that all images take. ``directory``: where
    the images are saved too, or "". ``saved``: the name of the snapshot there if it is another one,
    because another cluster has saved it, or this one before; else "". ``gpus``: what each capsule
    needs of the GPUs of a host that restores it; a capsule without GPUs is not in it.
    ``own_copies``: the capsules of which their own host had a copy too. It may be gone by now,
    unless that host is among the holders.
    ``carried``: the capsules that had files on carried paths. No two of them may be on one host.
    """

    number: int
    job: str
    boundary: str
    time: float
    rewinds: int
    owners: dict[str, tuple[str, int]]
    holders: dict[str, list[str]]
    bytes: int = 0
    directory: str = ""
    saved: str = ""
    gpus: dict[str, GpuNeed] = field(default_factory=dict)
    own_copies: list[str] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"s{self.number}"

    @property
    def saved_name(self) -> str:
        """The name of the snapshot in ``directory``."""
        return self.saved or self.name

    def same_images(self, other: Generation) -> bool:
        """Whether both are the same snapshot in the same place: in memory, perhaps of more or fewer
        hosts, or in the same directory."""
        mine = self.number, self.directory, bool(self.holders)
        return mine == (other.number, other.directory, bool(other.holders))

    def home(self, capsule: str) -> str:
        """The host on which the capsule was, if it may still have a copy of the image and is no
        holder; else ""."""
        host = self.owners[capsule][0]
        holds = host in self.holders.get(capsule, ())
        return host if capsule in self.own_copies and not holds else ""

    def keepers(self, capsule: str, *, copies: bool) -> set[str]:
        """The hosts that may keep the capsule's image in memory: its holders, and with ``copies``
        the host on which it was, which gives it to a rewind in place, and if no holder has it."""
        holders = set(self.holders.get(capsule, ()))
        return holders | {self.owners[capsule][0]} if holders and copies else holders

    def images_of(self, host: str, indices: Mapping[str, int]) -> set[str]:
        """The names of the images that ``host`` holds. ``indices``: of the job's capsules."""
        held = {name for name, hosts in self.holders.items() if host in hosts}
        return {image_name(self.number, indices[name]) for name in held.intersection(indices)}


def image_name(snapshot: int, index: int) -> str:
    """The name of a capsule's image on the wire, in claims and on the disk, such as s17.0."""
    return f"s{snapshot}.{index}"


def snapshot_of(image: str) -> int | None:
    """The number of the snapshot to which an image of that name belongs; None for other names."""
    found = IMAGE.fullmatch(image)
    return int(found[1]) if found else None


def image_number(image: str) -> int:
    """As :func:`snapshot_of`. Raises LiveshiftError for other names."""
    if (number := snapshot_of(image)) is None:
        raise LiveshiftError(f'an image of a snapshot cannot have the name "{image}"')
    return number


def restore_name(rewind: int, index: int) -> str:
    """The name under which a rewind restores a capsule, such as r4.0. It takes the place of a
    migration's name; ``rewind`` counts the rewinds of all jobs."""
    return f"r{rewind}.{index}"


def is_restore_name(name: str) -> bool:
    """Whether a Reserve under this name is for a rewind, and not for a migration."""
    return RESTORE.fullmatch(name) is not None


def image_bytes(survey: Survey, gpu: GpuSurvey | None) -> int:
    """Bytes of memory that a capsule's image takes at its holder: its files lie in memory too, and
    its device memory is in it."""
    files = survey.single_size + survey.output + sum(each.size for each in survey.along)
    devices = gpu.total if gpu is not None else 0
    return survey.resident + survey.shared_memory + survey.nameless + devices + files
