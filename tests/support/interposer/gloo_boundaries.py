# SPDX-License-Identifier: Apache-2.0
"""Ranks on gloo are brought to a boundary, and it is checked that they are at one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from liveshift.interposer.layout import WantedState
from liveshift.interposer.orders import OrderedPage
from liveshift.runtime.model.collective_clock import CollectiveClock
from liveshift.runtime.quiesce.host_gate import HostGate

PATIENCE_S = 60.0
LEASE_MS = 60_000


def still(gate: HostGate) -> bool:
    """Whether a gate that was closed is at its targets, and stays there.

    False may mean that a thread was about to pass beyond a target. A report tells the number to the
    orchestrator, whose next targets let the thread pass.
    """
    return gate.want == WantedState.CLOSED and gate.report().reached


def armed(pages: Iterable[OrderedPage], attempt: int, lease_ms: int = LEASE_MS) -> HostGate:
    gate = HostGate(attempt, lease_ms, 1000)
    for page in pages:
        gate.admit(page)
    return gate


def close_at_boundary(pages: list[OrderedPage], attempt: int, running: Callable[[], bool]) -> bool:
    """Arm each rank and bring all to a boundary; False where one has ended before there was one."""
    gates = [armed([page], attempt) for page in pages]
    clock = CollectiveClock([str(n) for n in range(len(gates))])
    named = {str(n): gate for n, gate in enumerate(gates)}
    unheard = list(named)
    deadline = time.monotonic() + PATIENCE_S
    while running():
        for name in list(unheard):
            report = named[name].announced()
            if report is not None:
                clock.add_report(name, report)
                unheard.remove(name)
        if clock.version:
            for name in clock.due():
                aim = clock.aim(name)
                named[name].aim(aim.version, aim.targets, aim.pairs)
            for name, gate in named.items():
                clock.add_report(name, gate.report())
        if clock.converged and not clock.due():
            for gate in gates:
                gate.close()
            for name, gate in named.items():
                clock.add_report(name, gate.report())
            if clock.converged and all(still(gate) for gate in gates):
                return True
        assert time.monotonic() < deadline, "\n".join(
            f"{name}: {what}"
            for name, gate in named.items()
            for what in (
                *gate.pending_returns(lambda _: None),
                *gate.obstacles(),
                gate.pages[0].clocks(),
            )
        )
        time.sleep(0.001)
    return False


def assert_boundary(pages: list[OrderedPage]) -> None:
    """What has begun anywhere has come back everywhere, and nothing moves."""
    numbers: dict[int, int] = {}
    before = [p.clocks() for p in pages]
    for clock in (clock for clocks in before for clock in clocks):
        assert clock.returned == numbers.setdefault(clock.id, clock.returned)
    for _ in range(5):
        time.sleep(0.002)  # not awaited: shows whether something still moves
        for p, clocks in zip(pages, before, strict=True):
            then = {clock.id: clock.returned for clock in clocks}
            # Ending a communicator isn't held up, nor making one that has none to wait for.
            assert all(c.returned == then.get(c.id, 0) for c in p.clocks())
