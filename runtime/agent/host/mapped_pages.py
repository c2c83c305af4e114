# SPDX-License-Identifier: Apache-2.0
"""Says whether a page belongs to a living process: that process has it mapped. The file of an ended
process stays, and a later process of the capsule can get its pid."""

from __future__ import annotations

import os

from .... import proc_text
from ....interposer.page import PageError, PageFile


def maps(pid: int, page: PageFile) -> bool:
    """Whether the process has the page mapped. False if the process has ended; raises PageError if
    it cannot be said."""
    seen = os.fstat(page.fd)
    wanted = f" {os.major(seen.st_dev):02x}:{os.minor(seen.st_dev):02x} {seen.st_ino} "
    try:
        # Not of the process: where the main thread has exited, only the others' files say it.
        threads = (f"/proc/{pid}/task/{tid}/maps" for tid in os.listdir(f"/proc/{pid}/task"))
        mappings = next(filter(None, map(_mappings, threads)), "")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError as error:
        raise PageError(
            f"cannot read whether process {pid} has mapped {page.path}: {error.strerror}"
        ) from error
    return wanted in mappings


def _mappings(path: str) -> str:
    """The text of a thread's proc_pid_maps(5); "" if it has exited. It depends on the kernel's
    version whether the file is empty then, or there is an error."""
    try:
        return proc_text.read(path)
    except (FileNotFoundError, ProcessLookupError):
        return ""
