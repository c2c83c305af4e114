# SPDX-License-Identifier: Apache-2.0
"""The destination's checks: all that can be known before the freeze."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ...criu_glue.criu.tool import Criu
from ...criu_glue.images import pids
from ...criu_glue.memory import engine
from ...criu_glue.survey.found import NeededFile, Survey
from ...criu_glue.survey.survey import fingerprint, open_plain
from ...errors import LiveshiftError
from ...units import size, some
from ..messages import HostFacts
from ..model import host_versions
from ..model.preflight_findings import PreflightFinding, refuse
from . import files_along
from .files_along import SHOWN
from .gpu.preflight import GpuPlan
from .host import task_limits

MEMORY_MARGIN = 128 << 20
ONCE_MARGIN = 512 << 20
"""Further bytes of margin if memory is not needed twice: it is then counted in larger pieces."""
SPARE_TASKS = 50
"""Further threads that CRIU, its hooks and the agent need."""

PROCESSOR_STATE = {"amx_tile", "amx_int8", "amx_bf16"}
"""Processor features whose registers CRIU does not save; the check ignores them."""


def check(
    survey: Survey,
    source: HostFacts,
    here: HostFacts,
    criu: Criu | None,
    memory: int,
    gpus: GpuPlan | None = None,
    *,
    ahead: bool = False,
    host: str = "the destination",
    capsules: Path = Path("/var/lib"),
    images: Path | None = None,
    gives_way: int = 0,
) -> list[tuple[str, str]]:
    """Check that a surveyed tree can run here; returns (what, found) rows.

    ``memory``: bytes that this host offers; ``gpus``: the plan for GPUs, None if the tree uses
    none; ``ahead``: whether pre-copy brings its memory; ``host``: this host's name; ``capsules``:
    the directory of capsules here; ``images``: the directory of images, None if the image needs no
    place there; ``gives_way``: bytes that would be free there if they were needed.
    Raises Refused with all findings at once.
    """
    gpus = gpus or GpuPlan()
    rows: list[tuple[str, str]] = []
    against: list[PreflightFinding] = list(survey.problems)
    for what, (found, finding) in (
        ("CRIU", _check_criu(criu, host)),
        ("processor and kernel", _check_machine(source, here, host)),
        ("threads", _check_tasks(survey.ids, host)),
        (
            "memory",
            _check_memory(survey, memory, gpus.host_memory, ahead, host, images, gives_way),
        ),
        ("files", _check_files(survey.needed, host)),
        ("directories", _check_directories(survey.directories, host)),
    ):
        rows.append((what, found))
        if finding:
            against.append(finding)
    against += host_versions.findings(source, here, host)
    rows += [("warning", text) for text in host_versions.warnings(source, here, host)]
    row, findings = files_along.check(survey.along, capsules, host, survey.output)
    rows += [row, *files_along.while_paused(survey), *gpus.rows]
    against += [*findings, *gpus.findings]
    refuse(against, at_source=bool(survey.problems) or gpus.at_source)
    return rows


Check = tuple[str, PreflightFinding | None]
"""What was found, and what of it prevents the move."""


def _check_criu(criu: Criu | None, host: str) -> Check:
    remedy = f"run `liveshift doctor` on {host}"
    if criu is None:
        return "missing", (f"{host} has no CRIU, or one that is too old", remedy)
    try:
        works, text = criu.check()
    except LiveshiftError as error:
        works, text = False, str(error)
    version = ".".join(map(str, criu.version))
    if not works:
        return text, (f"CRIU {version} does not work on {host}: {text}", remedy)
    return version, None


def _check_machine(source: HostFacts, here: HostFacts, host: str) -> Check:
    found = f"{here.cpu}, Linux {here.kernel}"
    if source.machine != here.machine:
        text = f"the capsule runs on {source.machine}, and {host} is {here.machine}"
        return found, (text, "choose a host of the same architecture")
    missing = set(source.cpu_flags) - set(here.cpu_flags) - PROCESSOR_STATE
    if missing:
        features = ", ".join(sorted(missing)[:6])
        text = f"the processor of {host} lacks {features}, which {source.cpu} has"
        remedy = (
            "programs choose their code by these when they start; choose a host with the same"
            " processor"
        )
        return found, (text, remedy)
    return found, None


def _check_tasks(ids: Sequence[int], host: str) -> Check:
    count, end = len(ids), pids.limit()
    limit = task_limits.tightest()
    found = f"{count} ids in use, room for {limit.left} threads ({limit.name})"
    if count + SPARE_TASKS > limit.left:
        text = (
            f"it has {count} threads, and only {max(0, limit.left)} more can run on {host}:"
            f" {limit.name} is {limit.most}"
        )
        return found, (text, limit.remedy)
    if pids.place(ids, end) is None:
        text = (
            f"its threads have ids up to {ids[-1]}, and kernel.pid_max of {host} is {end}, which"
            f" leaves CRIU no {pids.LEAST} ids in a row"
        )
        return found, (text, f"on {host}: sysctl -w kernel.pid_max=4194304")
    return found, None


def _check_memory(
    survey: Survey,
    memory: int,
    device_memory: int,
    ahead: bool,
    host: str,
    images: Path | None,
    gives_way: int,
) -> Check:
    # An image stays in memory until the tree is restored from it, so memory is needed twice. Pages
    # of pre-copy can be freed in the store as they are restored (MemoryStore.free_after_copy).
    image = survey.resident + survey.shared_memory + device_memory
    needed = 2 * image + MEMORY_MARGIN + survey.nameless  # nameless memory is only in the image
    image += survey.nameless
    if ahead:
        needed = min(needed, needed - survey.resident + ONCE_MARGIN)
    found = f"{size(memory)} offered, {size(needed)} needed"
    if device_memory:
        found += f", of which {size(2 * device_memory)} for what the driver's checkpoint copies"
    if needed > memory:
        also = f", with {size(device_memory)} of device memory in it" if device_memory else ""
        what_for = f"the image{also}, and the restored tree"
        if ahead:
            what_for = f"its memory, and what is in its image{also}, twice"
        text = (
            f"{host} has not enough memory: {size(needed)} are needed ({what_for}), "
            f"{size(memory)} are offered"
        )
        remedy = "choose a host with more free memory, or raise hosts.<name>.memory"
        return found, (text, remedy)
    if images is not None and image + MEMORY_MARGIN > (
        free := shutil.disk_usage(images).free + gives_way
    ):
        text = (
            f"the memory file system for images, {images} of {host}, is too full:"
            f" {size(image + MEMORY_MARGIN)} are needed, {size(free)} are free"
        )
        remedy = f"on {host}: mount -o remount,size=90% {images}; or choose another host"
        return f"{found}; {size(free)} are free on {images}", (text, remedy)
    return found, None


def _check_files(needed: Sequence[NeededFile], host: str) -> Check:
    missing: list[str] = []
    other: list[str] = []
    for file in needed:
        if file.inode:
            here = file if os.path.isfile(file.path) else None
        else:
            here = fingerprint(file.path)
        if here is not None and file.size < 0:
            here = replace(here, size=-1)
        if here is not None and not file.mode:
            here = replace(here, mode=0)
        if here is None:
            missing.append(file.path)
        elif here != file:
            other.append(f"{file.path} ({_difference(file, here)})")
    texts = []
    if missing:
        texts.append(f"{host} lacks {some(missing, SHOWN)}")
    if other:
        texts.append(f"{host} has a different {some(other, SHOWN)}")
    if texts:
        text = "; ".join(texts)
        remedy = (
            "install the same files with the same modes at the same paths, or list their directory"
            " under files.shared or files.carried"
        )
        return text, (text, remedy)
    return f"{len(needed)} mapped or open files, all alike here", None


def _check_directories(directories: Iterable[str], host: str) -> Check:
    missing = [d for d in directories if not os.path.isdir(d)]
    if missing:
        text = f"{host} lacks the directory {some(missing, SHOWN)}"
        remedy = f"make or mount it on {host}, or list it under files.carried"
        return text, (text, remedy)
    return "the directories that it uses exist", None


def warm(needed: Iterable[NeededFile]) -> None:
    """Ask the kernel to read the files that the restored tree maps into the page cache."""
    _read_ahead(Path(file.path) for file in needed if not file.inode)


TOOLS = ("nsenter", "sh")
"""Programs besides CRIU that run while the job is paused."""


def warm_tools(criu: Criu) -> None:
    """Do the same for the programs that dump or restore, let CRIU probe this kernel now, and load
    what reads and writes memory."""
    _read_ahead([*criu.files(), *(Path(p) for p in map(shutil.which, TOOLS) if p is not None)])
    criu.warm()
    with contextlib.suppress(OSError):  # what uses it says so
        engine.warm()


def _read_ahead(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError, ValueError), open_plain(path) as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _difference(there: NeededFile, here: NeededFile) -> str:
    if there.size != here.size:
        return f"{there.size} bytes at the source, {here.size} here"
    if there.build_id != here.build_id:
        return "another build id"
    return f"mode {stat.S_IMODE(there.mode):04o} at the source, {stat.S_IMODE(here.mode):04o} here"
