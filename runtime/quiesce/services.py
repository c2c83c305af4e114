# SPDX-License-Identifier: Apache-2.0
"""Orders the service threads of a host's ranks to drain, tear down and rebuild communicators.

Only processes with NCCL communicators have a service thread. The agent writes an order into the
process's interposer page and waits for ``done_*``. The interposer keeps to the time limit of the
order, so nothing here waits longer than that limit and LATE_S.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress

from ...errors import StepFailed
from ...interposer.layout import CommunicatorState, Library, WantedState, text_of
from ...interposer.orders import OrderedPage
from ...interposer.page import Communicator, PageError
from .. import messages
from ..config.timeouts import LONGEST_STANDSTILL_S

log = logging.getLogger("liveshift.gates")

POLL_S = 0.001
LATE_S = 2.0
"""A service thread may answer this many seconds after its limit: it may have to wait for a core."""


async def drained(pages: Collection[OrderedPage], attempt: int) -> list[str]:
    """Wait until the streams that carried communication are idle; return in words what prevents a
    teardown. The caller has closed the gates already."""
    served = [page for page in pages if _of_nccl(page)]
    results = await asyncio.gather(*(_done(page, attempt, WantedState.CLOSED) for page in served))
    return [problem for problem in results if problem]


def draining(pages: Collection[OrderedPage], attempt: int) -> list[OrderedPage]:
    """List the pages whose service thread has not reported yet that its streams are idle."""
    found = []
    for page in pages:
        with suppress(PageError):
            answer = page.answer()
            done = answer["done_attempt"], answer["done_want"]
            if _of_nccl(page) and done != (attempt, WantedState.CLOSED):
                found.append(page)
    return found


async def torn_down(pages: Collection[OrderedPage], attempt: int) -> messages.TornDown:
    """Tear down all communicators. Raises StepFailed if a rank could not; others may be down then.

    Raises StepFailed before any teardown if a gate is open: that rank is not at the boundary any
    more, and a teardown would silently cut off its running operations.
    """
    served = [page for page in pages if _of_nccl(page)]
    if gone := [who(page.rank, page.pid) for page in served if _is_passing(page)]:
        raise StepFailed("teardown", f"{', '.join(gone)} left the boundary too early")
    await _all(served, attempt, WantedState.TEARDOWN)
    slowest = max((int(page.answer()["torn_down_ns"]) for page in served), default=0)
    return messages.TornDown([key for page in served for key in _down(page)], slowest / 1e9)


async def fresh_ids(pages: Collection[OrderedPage], attempt: int) -> messages.Fresh:
    """Return new unique ids of the communicators whose rank 0 is on this host."""
    served = [page for page in pages if page.answer()["down"]]
    await _all(served, attempt, WantedState.FRESH_IDS)
    ids = {
        row.id: row.fresh_id
        for page in served
        for row in _of_nccl(page)
        if row.rank == 0 and row.fresh_attempt == attempt
    }
    sizes = {row.id: row.size for page in served for row in _of_nccl(page)}
    return messages.Fresh(ids, [key for page in served for key in _down(page)], sizes)


async def rebuilt(
    pages: Collection[OrderedPage], attempt: int, ids: Mapping[int, tuple[int, bytes]]
) -> messages.TornDown:
    """Rebuild communicators in the order that is the same on all hosts. Raises StepFailed. One that
    has no id in ``ids`` stays down: its page may hold an older order, so that is cleared."""
    served = [page for page in pages if page.answer()["down"]]
    for page in served:
        for row in _of_nccl(page):
            if row.state == CommunicatorState.DOWN:
                page.set_rebuild(row.row, *ids.get(row.id, (0, bytes(128))))
    await _all(served, attempt, WantedState.REBUILD)
    slowest = max((int(page.answer()["rebuilt_ns"]) for page in served), default=0)
    return messages.TornDown([key for page in served for key in _down(page)], slowest / 1e9)


def opened(page: OrderedPage) -> list[tuple[int, int]]:
    """Open a gate. If communicators are down, leave it closed and return them."""
    try:
        if page.answer()["down"]:
            return _down(page)
        if page.order()["want"] != WantedState.OPEN:
            page.open()
    except PageError as error:
        log.warning("%s", error)
    return []


async def _all(served: list[OrderedPage], attempt: int, want: WantedState) -> None:
    for page in served:
        page.give(want, attempt, 0)
    results = await asyncio.gather(*(_done(page, attempt, want) for page in served))
    problem = [text for text in results if text]
    if problem:
        raise StepFailed(want.name.lower().replace("_", " "), "; ".join(problem))


async def _done(page: OrderedPage, attempt: int, want: WantedState) -> str:
    """Wait until the service thread has answered; return its error as text, "" if it has none."""
    whose = who(page.rank, page.pid)
    order = page.order()
    asked = (attempt, order["version"], want)
    began = time.monotonic()
    # The job's user can change the limit in the page, so cap it.
    limit = min(order["limit_ms"] / 1000, LONGEST_STANDSTILL_S) + LATE_S
    while True:
        answer = page.answer()
        if (answer["done_attempt"], answer["done_version"], answer["done_want"]) == asked:
            code, text = answer["done_result"], text_of(answer["message"])
            return f"{whose}: {text or _error(code)}" if code else ""
        waited = time.monotonic() - began
        if waited > limit:
            return f"{whose}: its service thread does not answer"
        await asyncio.sleep(POLL_S + min(waited, 1.0) / 50)


def _error(number: int) -> str:
    """An errno in words. The job's user can write another number into the page, and os.strerror
    takes none that is larger than an int."""
    return os.strerror(number) if number < 4096 else f"error {number}"


def _of_nccl(page: OrderedPage) -> list[Communicator]:
    live = (CommunicatorState.LIVE, CommunicatorState.DOWN)
    return [r for r in page.communicators() if r.library is Library.NCCL and r.state in live]


def who(rank: int | None, pid: int) -> str:
    """Name a process by its rank, or by its pid if it has none."""
    return f"rank {rank}" if rank is not None else f"process {pid}"


def _is_passing(page: OrderedPage) -> bool:
    order, answer = page.order(), page.answer()
    return not answer["down"] and (
        order["want"] < WantedState.CLOSED or answer["reopened"] == order["attempt"]
    )


def _down(page: OrderedPage) -> list[tuple[int, int]]:
    return [(r.id, r.ordinal) for r in _of_nccl(page) if r.state == CommunicatorState.DOWN]
