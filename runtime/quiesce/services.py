# SPDX-License-Identifier: Apache-2.0
"""What the service threads of a host's ranks are asked to do: drain, tear down, build again.

Only processes with NCCL communicators have such a thread. An order is written into their pages and
``done_*`` is waited for; the interposer keeps the limit that the order names, so nothing here waits
for longer than that and a little.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress

from ...errors import StepFailed
from ...interposer.layout import CommunicatorState, Library, Want, text_of
from ...interposer.orders import OrderedPage
from ...interposer.page import Communicator, PageError
from .. import messages
from ..config.timeouts import LONGEST_STANDSTILL_S

log = logging.getLogger("liveshift.gatekeeper")

POLL_S = 0.001
LATE_S = 2.0
"""A service thread may answer this much after its own limit: it may have to wait for a core."""


async def drained(pages: Collection[OrderedPage], attempt: int) -> list[str]:
    """Wait until streams that carried communication are idle; returns what stands in the way of
    taking communicators down, in words. The gates are closed already."""
    served = [page for page in pages if _nccl(page)]
    results = await asyncio.gather(*(_done(page, attempt, Want.CLOSED) for page in served))
    return [trouble for trouble in results if trouble]


def draining(pages: Collection[OrderedPage], attempt: int) -> list[OrderedPage]:
    """Those whose service thread has not said yet that its streams are idle."""
    found = []
    for page in pages:
        with suppress(PageError):
            answer = page.answer()
            done = answer["done_attempt"], answer["done_want"]
            if _nccl(page) and done != (attempt, Want.CLOSED):
                found.append(page)
    return found


async def torn_down(pages: Collection[OrderedPage], attempt: int) -> messages.TornDown:
    """Raises StepFailed, in words, when a rank could not; others may be down then.

    Nothing is taken down where a gate is open: it is not at a boundary any more, what is under way
    would be cut off, and nobody would hear of it.
    """
    served = [page for page in pages if _nccl(page)]
    if gone := [_who(page) for page in served if _is_passing(page)]:
        raise StepFailed("teardown", f"{', '.join(gone)} left the boundary too early")
    await _all(served, attempt, Want.TEARDOWN)
    slowest = max((int(page.answer()["torn_down_ns"]) for page in served), default=0)
    return messages.TornDown([key for page in served for key in _down(page)], slowest / 1e9)


async def fresh_ids(pages: Collection[OrderedPage], attempt: int) -> messages.Fresh:
    """New unique ids of the communicators whose rank 0 is here."""
    served = [page for page in pages if page.answer()["down"]]
    await _all(served, attempt, Want.FRESH_IDS)
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
    """Make communicators again, in the one order of the job; raises StepFailed, in words. One that
    has no id stays down, where it may have an order from a time before."""
    served = [page for page in pages if page.answer()["down"]]
    for page in served:
        for row in _of_nccl(page):
            if row.state == CommunicatorState.DOWN:
                page.set_rebuild(row.row, *ids.get(row.id, (0, bytes(128))))
    await _all(served, attempt, Want.REBUILD)
    slowest = max((int(page.answer()["rebuilt_ns"]) for page in served), default=0)
    return messages.TornDown([key for page in served for key in _down(page)], slowest / 1e9)


def opened(page: OrderedPage) -> list[tuple[int, int]]:
    """Open a gate; where communicators are down it stays closed, and these are returned."""
    try:
        if page.answer()["down"]:
            return _down(page)
        if page.order()["want"] != Want.OPEN:
            page.open()
    except PageError as error:
        log.warning("%s", error)
    return []


async def _all(served: list[OrderedPage], attempt: int, want: Want) -> None:
    for page in served:
        page.give(want, attempt, 0)
    results = await asyncio.gather(*(_done(page, attempt, want) for page in served))
    trouble = [words for words in results if words]
    if trouble:
        raise StepFailed(want.name.lower().replace("_", " "), "; ".join(trouble))


async def _done(page: OrderedPage, attempt: int, want: Want) -> str:
    """Wait for the service thread; returns its trouble in words, or ""."""
    who = _who(page)
    order = page.order()
    asked = (attempt, order["version"], want)
    began = time.monotonic()
    # What stands in the page is the job's user's to change.
    limit = min(order["limit_ms"] / 1000, LONGEST_STANDSTILL_S) + LATE_S
    while True:
        answer = page.answer()
        if (answer["done_attempt"], answer["done_version"], answer["done_want"]) == asked:
            code, words = answer["done_result"], text_of(answer["trouble"])
            return f"{who}: {words or os.strerror(code)}" if code else ""
        waited = time.monotonic() - began
        if waited > limit:
            return f"{who}: its service thread does not answer"
        await asyncio.sleep(POLL_S + min(waited, 1.0) / 50)


def _of_nccl(page: OrderedPage) -> list[Communicator]:
    live = (CommunicatorState.LIVE, CommunicatorState.DOWN)
    return [r for r in page.communicators() if r.library is Library.NCCL and r.state in live]


def _who(page: OrderedPage) -> str:
    return f"rank {page.rank}" if page.rank is not None else f"process {page.pid}"


def _is_passing(page: OrderedPage) -> bool:
    order, answer = page.order(), page.answer()
    return not answer["down"] and (
        order["want"] < Want.CLOSED or answer["reopened"] == order["attempt"]
    )


def _nccl(page: OrderedPage) -> bool:
    return bool(_of_nccl(page))


def _down(page: OrderedPage) -> list[tuple[int, int]]:
    return [(r.id, r.ordinal) for r in _of_nccl(page) if r.state == CommunicatorState.DOWN]
