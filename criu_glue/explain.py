# SPDX-License-Identifier: Apache-2.0
"""CRIU's log, in words: what stopped a dump or a restore, and what a person can do about it."""

from __future__ import annotations

import re
from pathlib import Path

KNOWN: tuple[tuple[str, str], ...] = (
    (r"io_uring", "a task holds an io_uring, which CRIU cannot dump; set UV_USE_IO_URING=0 or "
                  "turn io_uring off in the program"),
    (r"anon_inode:\[userfaultfd\]", "a task holds a userfaultfd, which CRIU cannot dump"),
    (r"Can't lookup mount=(\d+)", "a task has a file open on a mount that is not in its capsule"),
    (r"File (\S+) has bad size", "file {0} differs on the destination from what the task has open"),
    (r"File (\S+) has bad build-ID", "file {0} is another build on the destination"),
    (r"Can't open file (\S+)", "file {0} is not there on the destination"),
    (r"Connected TCP socket", "a TCP connection could not be taken along"),
    (r"Can't fork for (\d+): File exists", "pid {0} is taken in the new capsule"),
    (r"No space left on device", "the memory file system for images is full on the destination"),
    (r"Cannot allocate memory", "the destination has too little memory"),
    (r"Dangling connection|half of stream unix connection|external unix",
     "a task is connected to a UNIX socket outside its capsule"),
    (r"Can't dump (\S+) without", "a task uses {0}, which cannot be dumped"),
)  # fmt: skip
"""(pattern in the log, sentence); {0} is the pattern's first group."""

NOISE = re.compile(r"rlimit|RLIMIT|Can't keep kdat|Dumping FAILED|Restoring FAILED")


def explain(log: Path) -> str:
    """One sentence on why CRIU failed, from its log; falls back to the log's own first error."""
    try:
        text = log.read_text(errors="replace")
    except FileNotFoundError:
        return "it left no log"
    for pattern, sentence in KNOWN:
        if match := re.search(pattern, text):
            return sentence.format(*match.groups())
    errors = [line for line in text.splitlines() if "Error" in line and not NOISE.search(line)]
    if errors:
        return " / ".join(re.sub(r"^\([\d.]+\)\s*", "", line) for line in errors[:3])
    return "its log names no error; last line: " + (text.strip().splitlines() or ["(empty)"])[-1]
