# SPDX-License-Identifier: Apache-2.0
"""The interposer's pages of a capsule's living processes, opened to be given orders."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress

from ..criu_glue import below, room
from ..criu_glue.survey import inner_pid, tasks
from ..interposer.inspection import ProcessState, inspect
from ..interposer.layout import CommunicatorState
from ..interposer.orders import OrderedPage, open_ordered
from ..interposer.page import PageError, paths
from .messages import Member
from .resident import Resident

log = logging.getLogger("liveshift.gatekeeper")


def ordered_pages(resident: Resident) -> Iterator[tuple[OrderedPage, int]]:
    """(page, the process's pid as the host sees it), of those that can be opened.

    The directory is the job's to write to: it is reached through no link of the job's making.
    """
    living = {}
    for task in tasks(resident.room):
        with suppress(FileNotFoundError, ProcessLookupError):
            living[inner_pid(task.pid)] = task.pid
    name = room.PAGES.lstrip("/")
    try:
        with below.opened(resident.room.root) as top:
            directory = below.open_below(top, name, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return  # no rank has a page yet, or its room is ending
    try:
        for path in paths(resident.room.root / name):
            if int(path.name) not in living:
                continue
            try:
                page = open_ordered(path, directory)
            except FileNotFoundError:
                continue
            except PageError as error:
                log.warning("%s: %s", resident.spec.name, error)
                continue
            if page.pid == int(path.name):
                yield page, living[page.pid]
            else:
                page.close()
    finally:
        os.close(directory)


def states(resident: Resident) -> list[ProcessState]:
    """What the capsule's processes hold; a damaged page is left out, and logged."""
    found = []
    for page, pid in ordered_pages(resident):
        try:
            if _maps(pid, page):
                found.append(inspect(page))
        except PageError as error:
            log.warning("%s", error)
        finally:
            page.close()
    return found


def _maps(pid: int, page: OrderedPage) -> bool:
    """Whether the process has the page mapped: a program that was exec'ed in its place, and has
    nothing to record, has not, and holds nothing of what it says."""
    seen = os.fstat(page.fd)
    wanted = f" {os.major(seen.st_dev):02x}:{os.minor(seen.st_dev):02x} {seen.st_ino} "
    try:
        with open(f"/proc/{pid}/maps") as maps:
            return any(wanted in line for line in maps)
    except OSError:
        return False  # it has just ended


def members(page: OrderedPage) -> list[Member]:
    """The rank's parts in the communicators that live, or are down; none of a damaged page."""
    try:
        rows = page.communicators()
    except PageError as error:
        log.warning("%s", error)
        return []
    live = (CommunicatorState.LIVE, CommunicatorState.DOWN)
    return [
        Member(
            row.id, row.library.name.lower(), row.name, row.size, row.rank,
            -1 if page.rank is None else page.rank, row.ordinal,
        )
        for row in rows
        if row.state in live and row.id
    ]  # fmt: skip
