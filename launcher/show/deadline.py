# SPDX-License-Identifier: Apache-2.0
"""When a host will be empty: the options that set a deadline, and what commands print about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import LiveshiftError
from ...runtime.config.choices import Severity
from ..report import quantities as q

if TYPE_CHECKING:
    from ...runtime.messages import Departing, Evacuating, SetTaint
    from ..client.client import Client

TIMED_OUT = 124  # as timeout(1)
PLAN_S = 60.0
"""Seconds that the orchestrator may take to plan, beside the time until the deadline. It surveys
every capsule of the host."""

EXPECTED_S = 5.0
"""A drain without a deadline waits for a plan for at most so many seconds. It needs the plan only
to say when the host will be empty."""

AsSeverity = Annotated[
    Severity | None,
    typer.Option(
        "--severity",
        help="Why the host must be empty: the cluster file's table within has the time for it.",
        show_default=False,
    ),
]
Within = Annotated[
    str,
    typer.Option(
        "--within",
        metavar="TIME",
        help="Time in which the host must be empty, such as 30s; it comes before what moves cost"
        " the jobs. 0s: no deadline.",
        show_default=False,
    ),
]


def set_taint(client: Client, request: SetTaint) -> Evacuating | None:
    """Taint a host. Returns how it will become empty; None if it has no deadline."""
    from ...runtime.messages import Evacuating

    if not request.within and not request.severity:
        client.request(request)
        return None
    answer = client.request(request, PLAN_S + request.within)
    return answer if isinstance(answer, Evacuating) else None


def plan(client: Client, host: str, within: float, severity: str) -> Evacuating:
    """Ask how a host would become empty. Changes nothing."""
    from ...runtime.messages import Evacuating, PlanEvacuation

    return client.get(Evacuating, PlanEvacuation(host, within, severity), PLAN_S + within)


def expected(client: Client, host: str) -> Evacuating | None:
    """Ask how a host without a deadline would become empty.

    Returns None if the orchestrator does not answer within EXPECTED_S, if the host is empty, or if
    a capsule cannot leave or is being moved already.
    """
    from ...runtime.messages import Evacuating, PlanEvacuation

    try:
        found = client.get(Evacuating, PlanEvacuation(host), EXPECTED_S)
    except LiveshiftError:  # the drain itself will say what is wrong
        return None
    return found if not any(each.error for each in found.capsules) and found.capsules else None


def late(plan: Evacuating) -> list[Departing]:
    """Return the capsules that may not be gone in time."""
    return [each for each in plan.capsules if each.late]


def lines(plan: Evacuating, will: str = "will") -> list[str]:
    """Return a line for the host, and one for each capsule that is late; [] for an empty host."""
    if not plan.capsules:
        return []
    how = "all at once" if plan.together else "one by one"
    many = f", {how}" if len(plan.capsules) > 1 else ""
    made = [f"{plan.host} {will} be empty after about {q.pause(plan.empty_s)}{many}"]
    for each in late(plan):
        why = each.error or f"it needs up to {q.pause(each.at_most_s)}, of {plan.within:g} s"
        made.append(f"{each.capsule} may not be gone in time: {why}")
    return made
