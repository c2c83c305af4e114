# SPDX-License-Identifier: Apache-2.0
"""Taints and cordons of hosts: who may set them, and who may remove them.

A taint moves every capsule off a host, by a deadline if one is given. A cordon only keeps new
capsules away. Root of a host may mark that host. To remove another person's mark takes the role
"operate".
"""

from __future__ import annotations

import time

from ...errors import Refused
from ...texts import shortened
from .. import messages
from ..config.access import Principal, Role
from ..config.choices import Severity
from ..fleet.fleet import Fleet
from ..fleet.rights import Rights
from .evacuation import Evacuation


class HostMarks:
    """The ApiServer has one instance. Each public method answers one kind of request, for the
    caller ``who``. It raises NotFound for an unknown host, NotPermitted if ``who`` may not do that,
    Refused for an unknown severity, and JournalError if the journal cannot be written."""

    def __init__(self, fleet: Fleet, rights: Rights, evacuation: Evacuation) -> None:
        self._fleet = fleet
        self._rights = rights
        self._evacuation = evacuation

    async def set_taint(
        self, who: Principal, request: messages.SetTaint
    ) -> messages.Evacuating | None:
        self._fleet.cluster.host(request.host)
        # A new taint takes the place of the earlier one, with its setter and its deadline.
        self._need_for_taint(who, "taint", request.host)
        within = self._within(request)
        reason = shortened(request.reason)
        with self._fleet.journal.together():
            self._fleet.journal.set_taint(request.host, reason, who.shown)
            until = time.time() + within if within else None  # for a later orchestrator
            self._fleet.journal.set_deadline(request.host, until)
            self._fleet.journal.add_event(request.host, "tainted", f"tainted: {reason}", who.shown)
        self._fleet.taints[request.host] = (reason, who.shown)
        self._fleet.deadlines.pop(request.host, None)
        if within:
            self._fleet.deadlines[request.host] = time.monotonic() + within
        self._evacuation.retry(request.host)
        return await self._evacuation.plan(request.host, within) if within else None

    async def plan_evacuation(
        self, who: Principal, request: messages.PlanEvacuation
    ) -> messages.Evacuating:
        self._fleet.cluster.host(request.host)
        if who.rules != request.host:
            self._rights.need(who, Role.OPERATE, f"plan a drain of {request.host}")
        return await self._evacuation.forecast(request.host, self._within(request))

    def _within(self, request: messages.SetTaint | messages.PlanEvacuation) -> float:
        """Seconds until the host must be empty; 0: there is no deadline."""
        if request.severity and request.severity not in set(Severity):
            raise Refused(
                f'there is no severity "{request.severity}"', hint=f"known: {', '.join(Severity)}"
            )
        if request.within > 0:
            return request.within
        return self._fleet.cluster.within.of(request.severity)

    async def untaint(self, who: Principal, request: messages.Untaint) -> None:
        self._fleet.cluster.host(request.host)
        self._need_for_taint(who, "untaint", request.host)
        self._take_taint_away(who, request.host)

    async def cordon(self, who: Principal, request: messages.Cordon) -> None:
        fleet = self._fleet
        fleet.cluster.host(request.host)
        if who.rules != request.host:
            self._rights.need(who, Role.OPERATE, f"cordon {request.host}")
        if request.host in fleet.cordons:
            return
        with fleet.journal.together():
            fleet.journal.set_cordon(request.host, who.shown)
            fleet.journal.add_event(request.host, "cordoned", "cordoned", who.shown)
        fleet.cordons[request.host] = who.shown

    async def uncordon(self, who: Principal, request: messages.Uncordon) -> None:
        """Remove a cordon, and the taint as well, because a drain sets both."""
        fleet, host = self._fleet, request.host
        fleet.cluster.host(host)
        by = fleet.cordons.get(host)
        if who.rules != host:
            self._rights.need(who, Role.OPERATE, f"uncordon {host}")
        elif by and by != who.shown:
            self._rights.need(who, Role.OPERATE, f"uncordon {host}, which {by} cordoned")
        self._need_for_taint(who, "untaint", host)
        if by is not None:
            with fleet.journal.together():
                fleet.journal.clear_cordon(host)
                fleet.journal.add_event(host, "uncordoned", "uncordoned", who.shown)
            del fleet.cordons[host]
        self._take_taint_away(who, host)
        self._evacuation.wake()

    def _need_for_taint(self, who: Principal, what: str, host: str) -> None:
        """Raise NotPermitted unless ``who`` may set or remove (``what``) the host's taint."""
        taint = self._fleet.taints.get(host)
        if who.rules != host:
            self._rights.need(who, Role.OPERATE, f"{what} {host}")
        elif taint and taint[1] != who.shown:  # a host must not change a taint that another set
            self._rights.need(who, Role.OPERATE, f"{what} {host}, which {taint[1]} tainted")

    def _take_taint_away(self, who: Principal, host: str) -> None:
        """Remove the taint, if there is one."""
        if host in self._fleet.taints:
            with self._fleet.journal.together():
                self._fleet.journal.clear_taint(host)
                self._fleet.journal.add_event(host, "untainted", "untainted", who.shown)
            del self._fleet.taints[host]
            self._fleet.deadlines.pop(host, None)
            self._evacuation.wake()
