# SPDX-License-Identifier: Apache-2.0
"""What is said of a host that must be empty soon: when it will be, and what will not make it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .report import quantities as q

if TYPE_CHECKING:
    from ..runtime.messages import Departing, Evacuating, SetTaint
    from .client import Client

TIMED_OUT = 124  # as timeout(1)
PLAN_S = 60.0
"""Beside the time that there is: every capsule of the host is surveyed."""


def set_taint(client: Client, ask: SetTaint) -> Evacuating | None:
    """Taint a host; how it will become empty, where it must be soon."""
    from ..runtime.messages import Evacuating

    if not ask.within and not ask.severity:
        client.ask(ask)
        return None
    answer = client.ask(ask, PLAN_S + ask.within)
    return answer if isinstance(answer, Evacuating) else None


def late(plan: Evacuating) -> list[Departing]:
    """What will not be gone in time."""
    return [each for each in plan.capsules if each.late]


def lines(plan: Evacuating) -> list[str]:
    """One for the host, one for each capsule that is late."""
    if not plan.capsules:
        return []
    how = "all at once" if plan.together else "one by one"
    many = f", {how}" if len(plan.capsules) > 1 else ""
    made = [f"{plan.host} will be empty after about {q.pause(plan.empty_s)}{many}"]
    for each in late(plan):
        why = each.error or f"it needs about {q.pause(each.empty_s)}, of {plan.within:g} s"
        made.append(f"{each.capsule} will not be gone in time: {why}")
    return made


def as_data(plan: Evacuating) -> dict[str, Any]:
    """For ``-o json``."""
    import msgspec

    made: dict[str, Any] = msgspec.to_builtins(plan)
    made.pop("t", None)
    return made
