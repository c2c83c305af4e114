# SPDX-License-Identifier: Apache-2.0
"""What the records of benchmarks share: goals, a file that is kept as it grows, what was measured.

A record is a msgspec.Struct with a field for each thing that two runs must have in common, so that
one can go on with the other's figures.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import msgspec
import psutil

import liveshift
from liveshift.criu_glue.criu.tool import dotted, find


class Goal(msgspec.Struct, frozen=True):
    """``met`` None: it cannot be told, or does not concern this case."""

    name: str
    wanted: str
    seen: str
    met: bool | None
    reason: str = ""


def at_most(name: str, seen: float, wanted: float, unit: str, reason: str) -> Goal:
    """``reason``: why it may have been missed; left out if it was met."""
    met = seen <= wanted
    return Goal(name, f"≤ {wanted:g}{unit}", f"{seen:.2f}{unit}", met, "" if met else reason)


class Record(msgspec.Struct, kw_only=True):
    """A whole run, as far as it has come. A benchmark adds its effort and its cases."""

    liveshift: str
    product: str
    """What the installed package's files hash to: other code, other figures."""
    cores: int
    memory: int
    kernel: str
    torch: str
    criu: str
    began: float
    load_before: float = 0.0
    seconds: float = 0.0
    complete: bool = False
    goals: list[Goal] = []

    @staticmethod
    def here() -> dict[str, Any]:
        """The fields that this machine and its programs have, for a record that begins now."""
        import torch

        return {
            "liveshift": liveshift.__version__,
            "product": product(),
            "cores": os.cpu_count() or 1,
            "memory": psutil.virtual_memory().total,
            "kernel": platform.release(),
            "torch": str(torch.__version__),
            "criu": dotted(find().version),
            "began": time.time(),
            "load_before": os.getloadavg()[0],
        }

    def write(self, path: Path) -> None:
        write(path, self)


R = TypeVar("R", bound=Record)
ALIKE = ("product", "effort", "cores", "kernel", "torch", "criu")
"""What two runs must have in common, so that one goes on with the other's figures."""


def write(path: Path, record: msgspec.Struct) -> None:
    """A reader, or a run that resumes, never finds half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.new")
    staged.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    os.replace(staged, path)


def kept(path: Path, fresh: R, more: bool = False, same: Sequence[str] = ALIKE) -> R | None:
    """The record of an earlier run that can be gone on with: it was interrupted, and its fields
    named ``same`` are those of ``fresh``. ``more``: one that is complete can be, too."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=type(fresh))
    except (FileNotFoundError, msgspec.DecodeError, msgspec.ValidationError):
        return None
    alike = all(getattr(found, key) == getattr(fresh, key) for key in same)
    over = not more and found.complete
    return found if alike and not over else None


def product() -> str:
    """Of the package's files, the ones that run."""
    found = hashlib.sha256()
    root = Path(str(files("liveshift")))
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".so") or path.name == "capsule-init":
            found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def middle(values: Iterable[float | None]) -> float | None:
    """The median of those that are known."""
    known = [value for value in values if value is not None]
    return median(known) if known else None
