# SPDX-License-Identifier: Apache-2.0
"""Checks the privileges, memory and settings of the machine, and its GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from ... import units
from ...criu_glue.criu.tool import capabilities
from ...cuda_snapshot import checkpoint, devices, driver
from .finding import Finding, Verdict, judged

# linux/capability.h
NEEDED_CAPABILITIES = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "NET_ADMIN": 12,
    "NET_RAW": 13,
    "SYS_CHROOT": 18,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
}
SYS_RESOURCE = 24

MIB = 1 << 20
GIB = 1 << 30
ENOUGH_MEMORY = 2 * GIB
"""This many bytes are enough for two small ranks, an image of one of them, and a second copy while
it is restored."""


def privileges() -> Iterator[Finding]:
    """Check for root, and for the capabilities that namespaces and CRIU need."""
    held = capabilities()
    missing = [name for name, bit in NEEDED_CAPABILITIES.items() if not held >> bit & 1]
    if os.geteuid() != 0:
        found = f"user {os.geteuid()}"
    elif missing:
        found = f"root without {', '.join(f'CAP_{name}' for name in missing)}"
    else:
        found = "root"
    yield judged(
        "privileges",
        found,
        "root with CAP_SYS_ADMIN, CAP_NET_ADMIN, CAP_SYS_PTRACE …",
        found == "root",
        "run as root (sudo liveshift doctor), outside of restricted containers",
    )
    there = bool(held >> SYS_RESOURCE & 1)
    yield judged(
        "CAP_SYS_RESOURCE",
        "held" if there else "not held",
        "optional: larger pipes, faster dumps",
        there,
        "grant it to the agent, or set fs.pipe-max-size as below",
        Verdict.WARN,
    )


def pipes() -> Iterator[Finding]:
    """Check the size of the largest pipe that a process without CAP_SYS_RESOURCE may have."""
    size = int(Path("/proc/sys/fs/pipe-max-size").read_text())
    enough = size >= MIB
    advice = "sysctl fs.pipe-max-size=4194304"
    yield Finding(
        "pipe-max-size",
        units.size(size),
        f"{units.size(MIB)}; {units.size(4 * MIB)} are faster",
        Verdict.OK if enough else Verdict.WARN,
        advice if size < 4 * MIB else "",
    )


def run_directory() -> Iterator[Finding]:
    """Check whether /run is a tmpfs: only then CRIU keeps there what it learnt about the kernel."""
    mounts = {p.mountpoint: p.fstype for p in psutil.disk_partitions(all=True)}
    kind = mounts.get("/run", f"part of / ({mounts.get('/', 'unknown')})")
    advice = "mount a tmpfs on /run: each dump and restore is 35 ms faster"
    yield judged("/run", kind, "optional: a tmpfs", kind == "tmpfs", advice, Verdict.WARN)


def memory() -> Iterator[Finding]:
    """Check the free memory: images lie in memory, never on a disk."""
    there = psutil.virtual_memory()
    yield judged(
        "memory",
        f"{units.size(there.available)} of {units.size(there.total)} available",
        f"{units.size(ENOUGH_MEMORY)} available for small jobs",
        there.available >= ENOUGH_MEMORY,
        "a rank needs twice its size at the destination while it moves",
        Verdict.WARN,
    )


def gpus(libraries: Path | None = None) -> Iterator[Finding]:
    """Check the GPU driver, its GPUs, and whether it can checkpoint. ``libraries``: the directory
    of the driver's libraries, if a cluster file names one."""
    inventory = devices.inventory(libraries=libraries)
    own = libraries / driver.LIBRARY if libraries else None
    cuda = checkpoint.survey(str(own) if own and own.exists() else driver.LIBRARY)
    needed = f"for GPU jobs only: CUDA {driver.NEEDED[0]}.{driver.NEEDED[1]} (driver 580) or newer"
    if inventory.driver is None and cuda.cuda is None:
        absent = (inventory.why_none or "").startswith("no NVIDIA driver")
        yield Finding(
            "GPU driver",
            "none" if absent else str(inventory.why_none),
            needed,
            Verdict.OK if absent else Verdict.WARN,
            "not needed for CPU jobs" if absent else "look at the driver's messages (dmesg)",
        )
        return
    found = f"driver {inventory.driver or 'unknown'}; "
    found += f"CUDA {cuda.cuda[0]}.{cuda.cuda[1]}; " if cuda.cuda else f"{cuda.why_none}; "
    names = [gpu.name for gpu in inventory.devices]
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    found += ", ".join(f"{n} × {name}" for name, n in counts.items()) or str(inventory.why_none)
    advice = []
    if cuda.missing:
        advice.append(f"this driver can't checkpoint (no {cuda.missing[0]}): install a newer one")
    elif cuda.cuda is None or cuda.cuda < driver.NEEDED:
        advice.append("install a newer driver")
    if any(gpu.mig for gpu in inventory.devices):
        advice.append("switch MIG off: it can't be checkpointed")
    if any(gpu.mps for gpu in inventory.devices):
        advice.append("end MPS: what it shares can't be checkpointed")
    if any(gpu.persistence is False for gpu in inventory.devices):
        advice.append("nvidia-smi -pm 1: restores start faster")
    if not inventory.devices:
        advice.append(str(inventory.why_none))
    yield Finding(
        "GPU driver", found, needed, Verdict.WARN if advice else Verdict.OK, "; ".join(advice)
    )
