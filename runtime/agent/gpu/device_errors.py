# SPDX-License-Identifier: Apache-2.0
"""Errors of this host's GPUs, from the kernel's log: NVIDIA's driver writes a line "NVRM: Xid …"
for each (docs.nvidia.com/deploy/xid-errors).

A process whose GPU has failed ends with an error as if it had decided that itself. So the agent
reports these errors with its heartbeats, and the orchestrator takes such a job back.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from ...messages import DeviceError

log = logging.getLogger("liveshift.gpus")

KMSG = Path("/dev/kmsg")
RECORD = 8192
"""A record of /dev/kmsg has at most this many bytes (Documentation/ABI/testing/dev-kmsg)."""

OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 109})
"""Xids that programs cause, or that follow the end of one: NVIDIA's device plugin for Kubernetes
does not count these as faults of a GPU. 109 also followed each move of an NCCL rank on the H100 of
docs/gpu.md."""

_XID = re.compile(rb"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(?:, ?(.{0,200}))?")

Address = tuple[int, int, int]
"""Domain, bus and device of a GPU."""


def address(text: str) -> Address | None:
    """The PCI address in NVML's form (00000000:65:00.0) or in the log's (0000:65:00)."""
    try:
        domain, bus, device = text.partition(".")[0].split(":")
        return int(domain, 16), int(bus, 16), int(device, 16)
    except ValueError:
        return None


class DeviceErrors:
    """What the kernel's log says of GPUs since this object was made. ``log_file``: another file
    than the kernel's. Where it cannot be read, nothing is known."""

    def __init__(self, log_file: Path = KMSG) -> None:
        self._file: int | None = None
        self._seen: list[tuple[float, Address, str]] = []  # monotonic seconds, GPU, text
        try:
            self._file = os.open(log_file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError as error:
            log.warning("errors of GPUs stay unknown: %s cannot be read: %s", log_file, error)

    def within(self, seconds: float, gpus: Mapping[Address, str]) -> list[DeviceError]:
        """The errors of the last so many seconds; ``gpus``: the UUIDs of this host's GPUs."""
        now = time.monotonic()
        self._read(now)
        self._seen = [each for each in self._seen if now - each[0] <= seconds]
        return [
            DeviceError(gpus[where], text, now - when)
            for when, where, text in self._seen
            if where in gpus
        ]

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read(self, now: float) -> None:
        while self._file is not None:
            try:
                record = os.read(self._file, RECORD)
            except BlockingIOError:
                return
            except BrokenPipeError:  # the kernel has dropped records that were not read in time
                continue
            except OSError as error:
                log.warning("errors of GPUs stay unknown from now on: %s", error)
                self.close()
                return
            if not record:
                return
            for found in _XID.finditer(record):
                where, number = address(found[1].decode()), int(found[2])
                if where is not None and number not in OF_PROGRAMS:
                    said = (found[3] or b"").decode(errors="replace").strip()
                    text = f"Xid {number} ({said})" if said else f"Xid {number}"
                    self._seen.append((now, where, text))
