# SPDX-License-Identifier: Apache-2.0
"""The results of a survey of a capsule. They are data only, since messages carry them and the
command line reads those. survey.py, along.py, footprint.py and gpu_tasks.py fill them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Along:
    """A directory that moves with the capsule; ``path`` is its path in the capsule.

    ``files`` counts entries of any kind. ``size`` is the number of bytes to send, without holes;
    ``recent`` are those of files that were written in the last RECENT_S seconds (along.py).
    ``place`` is the result of :func:`along.place_of`.
    """

    path: str
    files: int
    size: int
    recent: int
    place: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class NeededFile:
    """A file that the destination must have as it is here: path, bytes, ELF build id or '', mode.

    On a shared path the destination has the same file, which may change meanwhile. Then ``size`` is
    -1 and ``mode`` 0, and neither is compared. ``inode`` is the inode at the source of a file on a
    shared path that is open and not mapped, else 0. The destination only checks that such a file
    exists: it is missing if each host in fact has its own directory at that path.

    CRIU refuses a file with another mode (type and permission bits of st_mode; validate_file in its
    files-reg.c).
    """

    path: str
    size: int
    build_id: str
    mode: int = 0
    inode: int = field(default=0, compare=False)


@dataclass(frozen=True)
class GpuTask:
    """One task; ``pid`` is its pid in the capsule, ``host_pid`` that on the host that saw it."""

    pid: int
    host_pid: int
    name: str
    device_files: bool
    """True if the task has /dev/nvidia* open or mapped."""
    libcuda: bool
    """True if the task has the CUDA driver library mapped; it need not be a CUDA process then."""
    tracer: int = 0
    """The host's pid of the process that traces the task (a debugger); 0 if there is none, or none
    in this pid namespace."""
    injected: tuple[str, ...] = ()
    """Libraries and variables of CUDA tools, which show that a profiler is in the task. libcupti
    does not count, because PyTorch always has it mapped."""
    mps: str = ""
    """The pipe directory of an MPS daemon that the task's environment names and that exists."""


@dataclass(frozen=True)
class Survey:
    """The result of a survey; sizes in bytes, pids as the capsule sees them."""

    pids: tuple[int, ...]
    resident: int
    shared_memory: int
    needed: tuple[NeededFile, ...]
    directories: tuple[str, ...]
    single_files: tuple[str, ...]
    mapped_writable: tuple[str, ...]
    problems: tuple[tuple[str, str], ...]
    """(what prevents the move, what to do), one for each finding."""
    gpu_tasks: tuple[GpuTask, ...] = ()
    """The tasks that use a GPU or its driver; other code decides whether they prevent the move."""
    along: tuple[Along, ...] = ()
    """The directories that move with the capsule; the source measures them separately."""
    ids: tuple[int, ...] = ()
    """The ids of all threads, process groups and sessions, as the capsule sees them (pids.py)."""
    nameless: int = 0
    """Bytes of files that have lost their last name; CRIU's image holds them (lost_names.py)."""
    single_size: int = 0
    """Bytes of ``single_files`` without holes; they are sent while the job is paused."""
    output: int = 0
    """Bytes of the capsule's log, which moves too."""
    linked: tuple[str, ...] = ()
    """Files on carried paths that are open for writing and have several names."""

    def in_place(self) -> Survey:
        """The same for a host on which the tree may have run before. Directories that a move must
        not find again at its destination are that host's own then, and the earlier copy has left
        them."""
        return replace(self, along=tuple(replace(each, place=("", "")) for each in self.along))


@dataclass(frozen=True)
class Footprint:
    """The size of all processes of a capsule together; memory in bytes, resident or swapped out.

    ``private`` is anonymous memory; a page that processes share after a fork counts once there. In
    ``copied`` such a page counts once for each process. ``shared`` is mapped shared memory, with
    files of /dev/shm. ``mappings`` counts the lines of /proc/PID/maps, ``shared_mappings`` those of
    shared memory without a name.
    """

    private: int
    shared: int
    processes: int
    threads: int
    mappings: int
    copied: int = 0
    shared_mappings: int = 0
