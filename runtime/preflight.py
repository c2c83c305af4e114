# SPDX-License-Identifier: Apache-2.0
"""The destination's checks: everything that can be known before anything is frozen."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from ..criu_glue.survey import NeededFile, Survey, fingerprint, open_plain
from ..criu_glue.tool import Criu
from ..errors import LiveshiftError
from .gpu_preflight import GpuPlan
from .messages import HostFacts
from .troubles import Trouble, refuse

MEMORY_MARGIN = 128 << 20
ONCE_MARGIN = 512 << 20
"""More of it where memory is not to be there twice: what moves is counted in larger pieces then."""
SHOWN = 3
"""How many files of a list an error names; the rest is counted."""

PROCESSOR_STATE = {"amx_tile", "amx_int8", "amx_bf16"}
"""Features whose registers CRIU does not save; they do not count either way."""


def check(
    survey: Survey,
    source: HostFacts,
    here: HostFacts,
    criu: Criu | None,
    memory: int,
    gpus: GpuPlan | None = None,
    *,
    ahead: bool = False,
) -> list[tuple[str, str]]:
    """Check that a surveyed tree can run here; returns (what, found) rows.

    ``memory`` is what this host offers, in bytes; ``gpus`` what was found of GPUs, None where the
    tree holds none; ``ahead``: whether its memory comes page by page while it runs.
    Raises Refused with every finding at once.
    """
    gpus = gpus or GpuPlan()
    rows: list[tuple[str, str]] = []
    against: list[Trouble] = list(survey.problems)
    for what, found, trouble in (
        _check_criu(criu),
        _check_machine(source, here),
        _check_memory(survey, memory, gpus.host_memory, ahead),
        _check_files(survey.needed),
        _check_directories(survey.directories),
    ):
        rows.append((what, found))
        if trouble:
            against.append(trouble)
    rows += gpus.rows
    against += gpus.troubles
    refuse(against)
    return rows


Check = tuple[str, str, Trouble | None]


def _check_criu(criu: Criu | None) -> Check:
    if criu is None:
        return (
            "CRIU",
            "missing",
            ("CRIU is missing or too old there", "run `liveshift doctor` there"),
        )
    try:
        works, text = criu.check()
    except LiveshiftError as error:
        works, text = False, str(error)
    version = ".".join(map(str, criu.version))
    if not works:
        return "CRIU", text, (f"CRIU {version} does not work there: {text}", "`liveshift doctor`")
    return "CRIU", version, None


def _check_machine(source: HostFacts, here: HostFacts) -> Check:
    what = "processor and kernel"
    found = f"{here.cpu}, Linux {here.kernel}"
    if source.machine != here.machine:
        text = f"the capsule runs on {source.machine}, this host is {here.machine}"
        return what, found, (text, "choose a host of the same architecture")
    missing = set(source.cpu_flags) - set(here.cpu_flags) - PROCESSOR_STATE
    if missing:
        text = f"its processor lacks {', '.join(sorted(missing)[:6])}, which {source.cpu} has"
        return what, found, (text, "programs choose their code by these when they start; choose a "
                                   "host with the same processor")  # fmt: skip
    return what, found, None


def _check_memory(survey: Survey, memory: int, device_memory: int, ahead: bool) -> Check:
    # An image lies in memory until the tree has been restored from it, hence twice; of pages
    # one can be given up for the other (MemoryStore.spend).
    needed = 2 * (survey.resident + survey.shared_memory + device_memory) + MEMORY_MARGIN
    if ahead:
        needed = min(needed, needed - survey.resident + ONCE_MARGIN)
    found = f"{memory >> 20} MiB offered, {needed >> 20} MiB needed"
    if copied := 2 * device_memory >> 20:
        found += f", of which {copied} MiB for what the driver's checkpoint copies"
    if needed > memory:
        also = f", with {device_memory >> 20} MiB of device memory in it" if device_memory else ""
        what_for = f"the image{also}, and the restored tree"
        if ahead:
            what_for = f"its memory, and what is in its image{also}, twice"
        return "memory", found, (
            f"not enough memory there: {needed >> 20} MiB are needed ({what_for}), "
            f"{memory >> 20} MiB are offered",
            "choose a host with more free memory, or raise hosts.<name>.memory",
        )  # fmt: skip
    return "memory", found, None


def _check_files(needed: Iterable[NeededFile]) -> Check:
    missing: list[str] = []
    other: list[str] = []
    count = 0
    for file in needed:
        count += 1
        here = fingerprint(file.path)
        if here is None:
            missing.append(file.path)
        elif here != file:
            other.append(f"{file.path} ({_difference(file, here)})")
    what, found = "files", f"{count} mapped or open files, all alike here"
    texts = []
    if missing:
        texts.append(f"missing there: {_some(missing)}")
    if other:
        texts.append(f"different there: {_some(other)}")
    if texts:
        return what, "; ".join(texts), (
            "; ".join(texts),
            "install the same files at the same paths, or list their directory under "
            "files.shared or files.carried",
        )  # fmt: skip
    return what, found, None


def _check_directories(directories: Iterable[str]) -> Check:
    missing = [d for d in directories if not Path(d).is_dir()]
    if missing:
        text = f"working directory missing there: {_some(missing)}"
        return "directories", text, (text, "make it there, or list it under files.carried")
    return "directories", "working directories exist", None


def warm(needed: Iterable[NeededFile]) -> None:
    """Ask the kernel to read the files that the restored tree maps into the page cache."""
    _read_ahead(Path(file.path) for file in needed)


TOOLS = ("nsenter", "sh")
"""What runs while the job stands, besides CRIU."""


def warm_tools(criu: Criu) -> None:
    """The same for the programs that dump or restore it, and what they keep of this kernel."""
    _read_ahead([*criu.files(), *(Path(p) for p in map(shutil.which, TOOLS) if p is not None)])
    criu.warm()


def _read_ahead(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError, ValueError), open_plain(path) as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _difference(there: NeededFile, here: NeededFile) -> str:
    if there.size != here.size:
        return f"{there.size} bytes at the source, {here.size} here"
    return "another build id"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
