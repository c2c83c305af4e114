# SPDX-License-Identifier: Apache-2.0
"""``liveshift drain --dry-run``: where each capsule of a host would go, and what prevents it.

Each capsule is planned as if it was the only one. Whether there are slots for all of them together
is counted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import LiveshiftError, Refused, no_such
from ..report import quantities as q
from . import render
from .deadline import lines

if TYPE_CHECKING:
    from ...runtime.messages import Evacuating, HostRow, Planned, Status
    from ..client.client import Client

PLAN_S = 180.0


@dataclass
class Plan:
    """What a drain would do; ``refused``: capsule → (why, what to do). ``deadline``: how the host
    would become empty by its deadline, if it has one."""

    host: str
    moves: list[Planned]
    refused: dict[str, tuple[str, str | None]]
    slots: int
    deadline: Evacuating | None = None

    @property
    def lacking(self) -> int:
        """The number of slots that the capsules need beyond the free ones."""
        return max(0, len(self.moves) + len(self.refused) - self.slots)

    def as_data(self) -> dict[str, Any]:
        """Return the plan as ``-o json`` prints it."""
        moves = [render.plain(plan) for plan in self.moves]
        reasons = {name: {"error": why, "hint": hint} for name, (why, hint) in self.refused.items()}
        return {
            "host": self.host,
            "moves": moves,
            "refused": reasons,
            "free_slots": self.slots,
            "lacking_slots": self.lacking,
            "empty_s": self.empty_s,
            "deadline": render.plain(self.deadline),
        }

    def print(self) -> None:
        """Print a line for each capsule, and one for each warning."""
        to = render.out()
        if not self.moves and not self.refused:
            to.print(f"{self.host} is empty (nothing is done)", soft_wrap=True)
        for plan in self.moves:
            why, pause = dict(plan.checks).get("destination", plan.destination), ""
            if plan.prediction is not None:
                pause = f", predicted pause {q.pause(plan.prediction.seconds)}"
                if plan.prediction.lost_s:
                    pause += f", {q.pause(plan.prediction.lost_s)} of training lost"
            way = f"{plan.source} → {why}"
            to.print(f"{plan.capsule} would move {way}{pause} (nothing is done)", soft_wrap=True)
            for what, found in plan.checks:
                if what == "warning":
                    to.print(f"warning: {plan.capsule}: {found}", soft_wrap=True)
        if self.deadline is not None:
            for line in lines(self.deadline, "would"):
                to.print(line, soft_wrap=True)
        elif empty := self.empty_s:
            to.print(f"{self.host} would be empty after about {q.pause(empty)}", soft_wrap=True)

    @property
    def empty_s(self) -> float | None:
        """Seconds until the capsules that can leave have left, one by one; None: not known."""
        found = [plan.prediction.empty_s for plan in self.moves if plan.prediction is not None]
        return sum(found) or None

    def raise_if_refused(self) -> None:
        """Raise Refused if some capsule cannot leave, or not all of them together."""
        reasons = [why for why, _ in self.refused.values()]
        hints = dict.fromkeys(hint for _, hint in self.refused.values() if hint)
        if self.lacking:
            there = render.count(
                len(self.moves) + len(self.refused), "capsule has", "capsules have"
            )
            reasons.append(f"{there} {render.count(self.slots, 'free slot')} elsewhere")
            hints["add a host, uncordon one, or raise its slots in the cluster file"] = None
        if reasons:
            raise Refused(
                f"{self.host} would not become empty: {'; '.join(reasons)}",
                hint="; ".join(hints) or None,
            )


def make_plan(client: Client, host: str, reason: str) -> Plan:
    """Plan every capsule of a host; changes nothing. Raises NotFound for an unknown host."""
    from ...runtime.messages import GetStatus, Migrate, Planned, Status

    status = client.get(Status, GetStatus())
    row = next((row for row in status.hosts if row.name == host), None)
    if row is None:
        names = [row.name for row in status.hosts]
        raise no_such(f'no host "{host}" in this cluster', host, names, "its hosts are")
    plan = Plan(host, [], {}, _free_slots(status, row))
    for capsule in row.capsules:
        try:
            request = Migrate(capsule, "", reason, True)
            plan.moves.append(client.get(Planned, request, PLAN_S))
        except LiveshiftError as error:
            plan.refused[capsule] = str(error), error.hint
    return plan


def _free_slots(status: Status, leaving: HostRow) -> int:
    """Count the free slots of other hosts, as runtime/model/spares.py counts them."""
    able = (
        row
        for row in status.hosts
        if row is not leaving and row.state == "up" and row.spare != "none"
        if row.taint is None and row.cordon is None
    )
    return sum(max(0, row.slots - row.used) for row in able)
