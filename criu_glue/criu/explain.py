# SPDX-License-Identifier: Apache-2.0
"""Explains CRIU's log: what stopped a dump or a restore, and what a person can do about it.

Each known cause states where it lies, and which check finds it before anything is copied. A cause
in the capsule would stop a move to any other host as well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ...errors import SourceFailed, StepFailed


@dataclass(frozen=True)
class KnownCause:
    """A known cause: its ``pattern`` in the log and its sentence; {0} is the pattern's first group.

    ``in_capsule``: it lies in the capsule, otherwise at the destination. ``check`` names the
    function that finds it before a move, by module and name.
    """

    pattern: str
    sentence: str
    in_capsule: bool
    check: str


def _capsule(check: str, pattern: str, sentence: str) -> KnownCause:
    return KnownCause(pattern, sentence, True, "criu_glue." + check)


def _destination(check: str, pattern: str, sentence: str) -> KnownCause:
    return KnownCause(pattern, sentence, False, "runtime.agent.preflight." + check)


_DESCRIPTORS, _FILES = "survey.survey._look_at_descriptors", "_check_files"

KNOWN: tuple[KnownCause, ...] = (
    _capsule(
        _DESCRIPTORS,
        r"io_uring",
        "a task holds an io_uring, which CRIU cannot dump; set UV_USE_IO_URING=0 or turn"
        " io_uring off in the program",
    ),
    _capsule(
        _DESCRIPTORS,
        r"anon_inode:\[userfaultfd\]",
        "a task holds a userfaultfd, which CRIU cannot dump",
    ),
    _capsule(
        _DESCRIPTORS,
        r"Can't lookup mount=(\d+)",
        "a task has a file open on a mount that is not in its capsule",
    ),
    _capsule(
        "survey.survey._look_at_user_namespace",
        r"Can't dump nested user namespace",
        "a task has a user namespace of its own, which CRIU cannot dump",
    ),
    _capsule(
        "survey.odd_sockets.of_task",
        r"Unsupported proto \d+",
        "a task has an MPTCP socket, which CRIU cannot dump, or one of another rare kind",
    ),
    _capsule(
        "survey.epoll_sets.find",
        r"Dump eventpoll .*failed",
        "an epoll set holds a file that no process of the capsule has open any more",
    ),
    _capsule(
        "survey.terminals.of_task",
        r"ctty inheritance detected",
        "a task holds /dev/tty, which CRIU cannot dump",
    ),
    _capsule(
        "survey.terminals.of_sandbox",
        r"Unable to open \S*ptmx with specified index (\d+)",
        "the capsule holds the terminal /dev/pts/{0} and too few below it, which CRIU cannot"
        " restore",
    ),
    _capsule(
        "survey.terminals.of_sandbox",
        r"Index (\d+) on \S+ is too big",
        "the capsule holds the terminal /dev/pts/{0}, and CRIU dumps none above 1000",
    ),
    _capsule(
        "survey.lost_names.look",
        r"Can't dump ghost file (\S.*) of (\d+) size",
        "a task uses {0}, which was deleted and has {1} bytes, more than can be carried",
    ),
    _capsule(
        "survey.unix_sockets.outside",
        r"Dangling connection|half of stream unix connection|"
        r"External socket is used|name-less external socket",
        "a task is connected to a UNIX socket outside its capsule",
    ),
    _capsule(
        "survey.unix_sockets.outside",
        r"Found a closed in-flight socket",
        "a client has closed its UNIX socket before it was accepted, which CRIU cannot dump",
    ),
    _capsule(
        "survey.unaccepted.find",
        r"In-flight connection \(l\)",
        "a task has not accepted a TCP connection yet, which CRIU cannot dump",
    ),
    _capsule(
        "survey.traced.find",
        r"Unseizable non-zombie|Unable to interrupt task: (\d+) \(Operation not permitted\)"
        r"[\s\S]*Unable to detach from \1:",  # the second: for the first process of the tree
        "a task is traced by another process (strace, gdb), or was about to end, and CRIU could not"
        " stop it",
    ),
    _capsule(
        "images.file_locks.lasting",
        r"Can not set (?:ofd lock|posix lock|flock)",
        "a file lock of a task is held by another process on the destination",
    ),
    _destination(
        _FILES,
        r"File /?(\S.*) has bad size (\d+) \(expect (\d+)\)",
        "file /{0} has {1} bytes on the destination, and had {2} where the task had it"
        " open; the same file must be there, or its directory be listed under files.shared"
        " or files.carried",
    ),
    _destination(
        _FILES,
        r"File /?(\S.*) has bad mode 0(\d+) \(expect 0(\d+)\)",
        "file /{0} has mode {1} on the destination, and had {2} where the task had it"
        " open; owners and modes must be alike on all hosts",
    ),
    _destination(
        _FILES,
        r"File /?(\S+) has bad build-ID",
        "file /{0} is another build on the destination; install the same files on all hosts",
    ),
    _destination(_FILES, r"Can't open file /?(\S+)", "the destination lacks /{0}"),
    _destination(
        "_check_tasks",
        r"Unable to create a thread: -17",
        "the id of a thread is taken in the new capsule",
    ),
    _destination(
        "_check_tasks", r"Unable to create a thread: -11", "the destination allows no more threads"
    ),
    _destination(
        "_check_tasks", r"Can't fork for (\d+): File exists", "pid {0} is taken in the new capsule"
    ),
    _destination(
        "_check_memory",
        r"No space left on device",
        "the memory file system for images is full on the destination",
    ),
    _destination(
        "_check_memory", r"Cannot allocate memory", "the destination has too little memory"
    ),
)

NOISE = re.compile(r"rlimit|RLIMIT|Can't keep kdat|Dumping FAILED|Restoring FAILED")


@dataclass(frozen=True)
class Cause:
    """Why CRIU failed, in one sentence.

    ``known`` is the entry of KNOWN that matches, if one does. ``named`` is False if CRIU's log
    contains no error."""

    words: str
    known: KnownCause | None = None
    named: bool = True

    def of_dump(self) -> type[StepFailed]:
        """The error class for a failed dump.

        A dump depends on its capsule only, so an error that no check finds will come again. For a
        known error, a check reports before the next attempt whether the cause is still there."""
        return SourceFailed if self.known is None and self.named else StepFailed

    def of_restore(self) -> type[StepFailed]:
        """The error class for a failed restore. A cause in the capsule comes again at any
        destination."""
        in_capsule = self.known is not None and self.known.in_capsule
        return SourceFailed if in_capsule else StepFailed


def explain(log: Path) -> Cause:
    """Find the cause of a failure in CRIU's log; if none is known, quote the log's first errors."""
    try:
        text = log.read_text(errors="replace")
    except FileNotFoundError:
        return Cause("CRIU left no log", named=False)
    for known in KNOWN:
        if match := re.search(known.pattern, text):
            return Cause(known.sentence.format(*match.groups()), known)
    errors = [line for line in text.splitlines() if "Error" in line and not NOISE.search(line)]
    if errors:
        return Cause(" / ".join(re.sub(r"^\([\d.]+\)\s*", "", line) for line in errors[:3]))
    last = (text.strip().splitlines() or ["(empty)"])[-1]
    return Cause(f"CRIU's log names no error; its last line is: {last}", named=False)
