# SPDX-License-Identifier: Apache-2.0
"""Reads how many operations the living processes of a capsule have finished."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable

import psutil

from ....criu_glue.capsule import sandboxes
from ....criu_glue.capsule.sandboxes import Sandbox
from ....criu_glue.capsule.tree import inner_pid, tasks
from ....interposer.page import Page
from ....interposer.page_directory import pages


def pages_of(sandbox: Sandbox, living: Iterable[psutil.Process]) -> list[Page]:
    """The pages of these processes of the capsule that have one."""
    pids = set()
    for task in living:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            pids.add(inner_pid(task.pid))
    return _pages(sandbox, pids)


def finished_by_pid(sandbox: Sandbox, of: Collection[int] | None = None) -> dict[int, int]:
    """The finished operations of each living process, by its pid inside the capsule. ``of``: those
    processes to look at, living or not; this is cheaper."""
    seen = pages_of(sandbox, tasks(sandbox)) if of is None else _pages(sandbox, of)
    return {page.pid: page.finished for page in seen}


def _pages(sandbox: Sandbox, pids: Collection[int]) -> list[Page]:
    return pages(sandbox.root / sandboxes.PAGES.lstrip("/"), pids)
