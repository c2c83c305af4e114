# SPDX-License-Identifier: Apache-2.0
"""What the double of the orchestrator knows of its cluster, and how `status` shows it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from liveshift.criu_glue.capsule.output import REWIND
from liveshift.runtime import messages
from liveshift.runtime.messages import CapsuleRow, HostRow, JobRow


@dataclass
class Capsule:
    """One capsule; ``log`` is its record log, which stays with it wherever it goes."""

    name: str
    host: str
    epoch: int = 1
    log: bytes = b""
    code: int | None = None
    migration: str | None = None
    kept_from: int = 0  # what of the log is older was rotated away
    output_trouble: str = ""
    rewound_at: int | None = None  # the log was cut back to so many bytes
    cut_off: bytes = b""
    gone: str = ""  # why what was cut off is not there any more

    def place(self, offset: int) -> int:
        """Where in ``log`` is what a reader finds at an offset."""
        cut = self.rewound_at
        return offset if cut is None or offset < cut else cut + max(0, offset - REWIND)


@dataclass
class Job:
    name: str
    argv: list[str]
    capsules: dict[str, Capsule]
    started: float = field(default_factory=time.time)
    signals: list[int] = field(default_factory=list)
    code: int | None = None
    suspended: bool = False
    protection: messages.ProtectionRow | None = None


@dataclass
class Host:
    name: str
    slots: int = 1
    taint: str | None = None
    cordon: str | None = None
    state: str = "up"
    other_file: bool = False
    gpus: list[messages.GpuSeat] = field(default_factory=list)


def job_row(job: Job) -> JobRow:
    rows = [
        CapsuleRow(
            name=c.name,
            index=n,
            state=_state(job, c),
            host="" if job.suspended else c.host,
            epoch=c.epoch,
            address=f"10.99.1.{n + 2}",
            ranks=[2 * n, 2 * n + 1],
            pids=12,
            resident=250_000_000,
            collectives=1234,
            rate=12.3,
            code=c.code,
            migration=c.migration,
            output_trouble=c.output_trouble,
        )
        for n, c in enumerate(job.capsules.values())
    ]
    state = "ended" if job.code is not None else "suspended" if job.suspended else "running"
    argv = " ".join(job.argv)
    started, kept = job.started, job.protection
    return JobRow(job.name, state, argv, 0, started, 12.3, job.code, rows, kept)


def _state(job: Job, capsule: Capsule) -> str:
    if capsule.code is not None:
        return "ended"
    if job.suspended:
        return "suspended"
    return "moving" if capsule.migration else "running"


def host_row(host: Host, capsules: Iterable[Capsule]) -> HostRow:
    here = [c.name for c in capsules if c.host == host.name and c.code is None]
    return HostRow(
        name=host.name,
        address="10.88.0.10",
        state=host.state,
        spare="floating",
        slots=host.slots,
        other_file=host.other_file,
        used=len(here),
        taint=host.taint,
        taint_by="root" if host.taint else None,
        memory_free=7_000_000_000,
        capsules=here,
        gpus=host.gpus,
        cordon=host.cordon,
    )
