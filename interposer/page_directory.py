# SPDX-License-Identifier: Apache-2.0
"""Reads the pages of a whole capsule, at a bounded cost whatever its job has put there."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from . import layout
from .page import Page, PageError, opened

log = logging.getLogger("liveshift.page")
_complained: set[Path] = set()

ROWS = 64 * layout.CLOCKS
"""The agent reads at most this many rows of clocks of one capsule at a time, in about 30 ms. A rank
uses some dozens. The agent reads the counts of all capsules for each heartbeat: if one job could
make that take long, its host would count as lost."""


def pages(directory: Path, pids: Iterable[int] | None = None) -> list[Page]:
    """The pages of these processes that can be read, by pid. ``pids`` are the capsule's. Without
    them: all pages in the directory, also those of ended processes; not for a job's own directory.

    A page that can't be read is logged and left out: a job may write anything there, and its host
    must still report on the other pages. So are pages after ROWS rows of clocks.
    """
    found, rows = [], 0
    for path in paths(directory) if pids is None else [directory / str(p) for p in sorted(pids)]:
        try:
            with opened(path) as file:
                if str(file.pid) != path.name:
                    raise PageError(f"{path} is the page of process {file.pid}")
                rows += min(file.rows("clocks"), layout.CLOCKS)
                if rows > ROWS:
                    _complain(directory, f"the pages in {directory} have more than {ROWS} clocks")
                    break
                found.append(file.page())
        except FileNotFoundError:
            continue  # this process has no page, or the capsule has gone
        except PageError as error:
            _complain(path, error.message)
    return found


def paths(directory: Path) -> list[Path]:
    """The files that look like pages, by pid; empty where the directory doesn't exist."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    # Other names: a page still being made is called .<pid>.
    numbers = [name for name in names if name.isascii() and name.isdecimal() and name[0] != "0"]
    return [directory / name for name in sorted(numbers, key=int)]


def _complain(path: Path, text: str) -> None:
    """Log a warning once for each file, and for at most a thousand files."""
    if path not in _complained and len(_complained) < 1000:
        _complained.add(path)
        log.warning("%s", text)
