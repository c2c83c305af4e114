# SPDX-License-Identifier: Apache-2.0
"""Opens the interposer pages of a capsule's living processes, so that the agent can give orders."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from pathlib import Path

from .... import proc_text
from ....criu_glue.capsule import sandboxes
from ....criu_glue.capsule.tree import inner_pid, tasks
from ....criu_glue.files import below
from ....interposer.inspection import ProcessState, inspect
from ....interposer.layout import CommunicatorState
from ....interposer.orders import OrderedPage, open_ordered
from ....interposer.page import PageError
from ...messages import Member
from .mapped_pages import maps
from .running_capsule import RunningCapsule

log = logging.getLogger("liveshift.gates")


def log_page_error(path: Path, error: PageError) -> None:
    log.warning("%s", error)


def ordered_pages(
    resident: RunningCapsule,
    known: Container[tuple[int, int]] = (),
    on_error: Callable[[Path, PageError], None] = log_page_error,
) -> Iterator[tuple[OrderedPage, int]]:
    """Yield (page, pid as the host sees it) of the living processes; the caller closes each page.

    Pages whose (device, inode) is in ``known`` are left out. ``on_error`` receives pages that
    cannot be used. The job can write to the directory, so the agent follows no link that the job
    made. It does not list the directory either: pages stay there after their processes, and the
    agent would have to stop somewhere.

    A page that its process has not mapped is left out: it belongs to an ended process that had this
    pid before, or to the program before an exec. A living process has mapped its own page before
    the page gets its name (put_page in interposer/gate/process.c), so none is left out by mistake.
    """
    living = {}
    for task in tasks(resident.sandbox):
        with suppress(FileNotFoundError, ProcessLookupError):
            if lives(task.pid):
                living[inner_pid(task.pid)] = task.pid
    name = sandboxes.PAGES.lstrip("/")
    try:
        with below.opened(resident.sandbox.root) as top:
            directory = below.open_below(top, name, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return  # no rank has a page yet, or its sandbox is ending
    try:
        for inner, pid in sorted(living.items()):
            path = resident.sandbox.root / name / str(inner)
            try:
                page = _open_mapped(path, directory, inner, pid, known)
            except FileNotFoundError:
                continue
            except PageError as error:
                on_error(path, error)
                continue
            if page is not None:
                yield page, pid
    finally:
        os.close(directory)


def _open_mapped(
    path: Path, directory: int, inner: int, pid: int, known: Container[tuple[int, int]]
) -> OrderedPage | None:
    """Open a process's page. None: it is in ``known``, or the process has not mapped it. Raises
    FileNotFoundError, PageError."""
    try:
        seen = os.stat(path.name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise PageError(f"cannot look at the page {path}: {error.strerror}") from error
    if (seen.st_dev, seen.st_ino) in known:
        return None
    page = open_ordered(path, directory)
    try:
        if maps(pid, page):
            if page.pid != inner:
                raise PageError(f"{path} is damaged: it is the page of process {page.pid}")
            return page
    except BaseException:
        page.close()
        raise
    page.close()
    return None


def lives(pid: int) -> bool:
    """Whether a process still lives, by its pid on this host. A zombie does not: it has ended, but
    its parent has not waited for it yet."""
    try:
        with open(f"/proc/{pid}/statm", "rb", buffering=0) as memory:
            if memory.read(2) != b"0 ":
                return True
        state = proc_text.read(f"/proc/{pid}/stat")
        # A process whose main thread has exited looks the same, but it has other threads.
        ended = state.rpartition(")")[2].split()[0] in ("Z", "X")
        return not ended or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def states(
    resident: RunningCapsule, on_error: Callable[[Path, PageError], None] = log_page_error
) -> list[ProcessState]:
    """What the capsule's processes hold; ``on_error`` receives pages that cannot be read."""
    found = []
    for page, _ in ordered_pages(resident, on_error=on_error):
        try:
            found.append(inspect(page))
        except PageError as error:
            on_error(page.path, error)
        finally:
            page.close()
    return found


def members(page: OrderedPage) -> list[Member]:
    """The rank's parts in communicators that are live or down; empty if the page is damaged."""
    try:
        rows, unseen = page.communicators(), page.nccl_unseen()
    except PageError as error:
        log.warning("%s", error)
        return []
    live = (CommunicatorState.LIVE, CommunicatorState.DOWN)
    world_rank = -1 if page.rank is None else page.rank
    found = [
        Member(
            row.id, row.library.name.lower(), row.name, row.size, row.rank, world_rank, row.ordinal
        )
        for row in rows
        if row.state in live and row.id
    ]
    return found + ([unknown(world_rank)] if unseen else [])


def unknown(world_rank: int = -1) -> Member:
    """A member for a rank that may use NCCL unseen. With it, the rank does not count as one that
    talks over TCP only."""
    return Member(0, "nccl", "", 0, -1, world_rank, 0)
