# SPDX-License-Identifier: Apache-2.0
"""Publishes the address books: for each job, which host has which capsule under which epoch."""

from __future__ import annotations

import asyncio
import logging

from .. import messages
from ..control.link import Switchboard
from ..daemon.tasks import Tasks
from ..model.jobs import Job
from .fleet import Fleet

log = logging.getLogger("liveshift.address_book")

HOSTS_AT_ONCE, BOOKS_AT_ONCE = 50, 4
"""Limits for hosts whose answer no job waits for: the orchestrator sends one address book to 50
hosts at a time, and 4 books at a time."""


class AddressBook:
    """The orchestrator has one instance, which sends the address books of all jobs. If a host does
    not get a book, the instance sets HostState.books_current of that host to False. The host then
    registers again, and gets all books."""

    def __init__(self, fleet: Fleet, switchboard: Switchboard) -> None:
        self._fleet = fleet
        self._switchboard = switchboard
        self._tasks = Tasks()
        self._sending = asyncio.Semaphore(BOOKS_AT_ONCE)

    async def publish(self, job: Job) -> None:
        """Send the job's address book to every host; a host that is away gets it when it registers.

        Returns once the job's own hosts have answered. The other hosts have no capsule that talks
        to the job; they get the book a few at a time, so that heartbeats are not delayed.
        """
        book, up = messages.Locate(job.book()), self._fleet.up()
        for host in self._fleet.hosts.keys() - set(up):
            self._fleet.hosts[host].books_current = False
        own = {capsule.host for capsule in job.capsules.values()}
        self._tasks.spawn(self._send_slowly([name for name in up if name not in own], book))
        await self._send([name for name in up if name in own], book)

    async def _send_slowly(self, hosts: list[str], book: messages.Locate) -> None:
        async with self._sending:
            for first in range(0, len(hosts), HOSTS_AT_ONCE):
                await self._send(hosts[first : first + HOSTS_AT_ONCE], book)

    async def _send(self, hosts: list[str], book: messages.Locate) -> None:
        limit = self._fleet.cluster.timeouts.suspicion  # a silent host counts as up for this long
        requests = (self._switchboard.request(host, book, limit) for host in hosts)
        done = await asyncio.gather(*requests, return_exceptions=True)
        for host, result in zip(hosts, done, strict=True):
            if isinstance(result, BaseException):
                self._fleet.hosts[host].books_current = False
                log.warning("address book of %s at %s: %s", book.book.job, host, result)
