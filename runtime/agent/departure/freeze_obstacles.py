# SPDX-License-Identifier: Apache-2.0
"""What may appear in a capsule at any moment, and would make CRIU or the restore fail or lose data:
file locks, closed files that an epoll set still holds, closed connections with data under way,
processes for which their parents have not waited. The source waits a short time for their end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from ....criu_glue.capsule.mounts import Placement
from ....criu_glue.capsule.sandboxes import Sandbox
from ....criu_glue.capsule.tree import in_order
from ....criu_glue.images import file_locks
from ....criu_glue.survey import epoll_sets, undelivered, unwaited
from ....criu_glue.survey.epoll_sets import EpollEntry
from ....criu_glue.survey.survey import passing
from ....errors import StepFailed
from ..host.running_capsule import ROOT_PID

UNLOCKED_S, UNLOCKED_FROZEN_S = 3.0, 0.2
"""The source waits at most this many seconds for a moment in which the capsule holds no file lock
that keeps it here: before its ranks come to a boundary, and again after that."""
UNLOCKED_POLL_S = 0.005


def wait_unlocked(
    sandbox: Sandbox, placement: Placement, until: float, given_up: Callable[[], bool]
) -> list[tuple[str, str]]:
    """What keeps the capsule here at ``until`` (monotonic seconds), and what to do about it.
    Returns [] at the first moment at which nothing does, or once ``given_up`` returns True."""
    with contextlib.suppress(ProcessLookupError):  # it has ended; a later step reports that
        while (held := passing(sandbox, placement)) and not given_up():
            if time.monotonic() > until:
                return held
            time.sleep(UNLOCKED_POLL_S)
    return []


def check_before_dump(
    sandbox: Sandbox, placement: Placement, given_up: Callable[[], bool]
) -> list[EpollEntry]:
    """Raise StepFailed for what has appeared since the pre-copy. Return the epoll entries that CRIU
    cannot dump."""
    until = time.monotonic() + UNLOCKED_FROZEN_S
    if held := wait_unlocked(sandbox, placement, until, given_up):
        text, remedy = held[0]
        raise StepFailed("freeze", f"at that moment {text}", hint=remedy)
    entries, stale = epoll_sets.find(in_order(sandbox, ROOT_PID))
    if stale:
        stale = file_locks.lasting(stale, lambda: epoll_sets.find(in_order(sandbox, ROOT_PID))[1])
        entries, _ = epoll_sets.find(in_order(sandbox, ROOT_PID))
    if stale:
        raise StepFailed("freeze", stale[0][0], hint=stale[0][1])
    return entries


def check_after_dump(sandbox: Sandbox) -> None:
    """Raise StepFailed if a connection was closed after the lock, which keeps its end from the
    peer, or if a process has ended since :func:`check_before_dump` in a way that CRIU alters."""
    if found := undelivered.find(sandbox.init) or unwaited.find(sandbox):
        raise StepFailed("freeze", f"at that moment {found[0][0]}", hint=found[0][1])
