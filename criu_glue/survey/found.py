# SPDX-License-Identifier: Apache-2.0
"""What was found in a capsule: data alone, for messages carry it, and the command line reads them.
Who looks is survey.py, along.py and footprint.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from .gpu_tasks import GpuTask


@dataclass(frozen=True)
class Along:
    """A directory that goes along; ``path`` is the capsule's name for it.

    ``files``: entries of any kind; ``size``: bytes that are sent, without holes; ``recent``: those
    of files that were written in the last RECENT_S seconds. ``place``: where it lies, as of
    :func:`place_of`.
    """

    path: str
    files: int
    size: int
    recent: int
    place: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class NeededFile:
    """A file that must be on the destination as it is here: path, bytes, ELF build id or '', mode.

    On a shared path it is the same file there and may change meanwhile: ``size`` is -1 and
    ``mode`` 0, which means that they are not compared. ``inode``: at the
    source, of one that is open there and not mapped, else 0. Such a file is only looked for: where
    the path is in truth each host's own, the destination lacks it.

    CRIU refuses a file with another mode (type and permission bits of st_mode; validate_file in its
    files-reg.c).
    """

    path: str
    size: int
    build_id: str
    mode: int = 0
    inode: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Survey:
    """What a move of the capsule involves; sizes in bytes, pids as the capsule sees them."""

    pids: tuple[int, ...]
    resident: int
    shared_memory: int
    needed: tuple[NeededFile, ...]
    directories: tuple[str, ...]
    single_files: tuple[str, ...]
    mapped_writable: tuple[str, ...]
    problems: tuple[tuple[str, str], ...]
    """(what stands in the way, what to do), one for each finding."""
    gpu_tasks: tuple[GpuTask, ...] = ()
    """Those that have to do with a GPU; what of it stands in the way others decide."""
    along: tuple[Along, ...] = ()
    """The directories that go along, which the source looks through besides."""
    ids: tuple[int, ...] = ()
    """Of all threads, process groups and sessions, as the capsule sees them (pids.py)."""
    nameless: int = 0
    """Bytes of files that have lost their last name and go in its image (lost_names.py)."""
    single_size: int = 0
    """Bytes of ``single_files`` without holes: they go over while the job is paused."""
    output: int = 0
    """Bytes of output that are kept, which go along too."""


@dataclass(frozen=True)
class Footprint:
    """All processes of a capsule together; memory in bytes, resident or swapped out.

    ``private``: anonymous memory, where a page that processes share after a fork counts once;
    ``copied``: the same where each of them counts it. ``shared``: mapped shared memory, files of
    /dev/shm among it. ``mappings``: lines of their maps; ``shared_mappings``: those of
    shared memory without a name.
    """

    private: int
    shared: int
    processes: int
    threads: int
    mappings: int
    copied: int = 0
    shared_mappings: int = 0
