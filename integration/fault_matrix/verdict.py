# SPDX-License-Identifier: Apache-2.0
"""What became of a cell, and how often it is played until something was seen of it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from .stage import HEARTBEAT_S, Stage

TRIES = 3
"""Of a cell whose watcher was starved, or whose point was not reached."""

NOT_SHOWN = "not shown"
"""What a cell comes to whose watcher could not look often enough."""

LONGEST_GAP_S = HEARTBEAT_S / 2
"""An agent asks what becomes of a copy every heartbeat: so long at least a wrong one is there."""


class AnyCell(Protocol):
    """A cell of any table. ``table``: the name of the table. ``point``: its column. ``expected``:
    what it must come to, or EITHER for ``reason``. ``short``: it belongs to the short form."""

    @property
    def table(self) -> str: ...
    @property
    def point(self) -> str: ...
    @property
    def fault(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def expected(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def short(self) -> bool: ...


@dataclass
class Verdict:
    """What became of a cell. ``gap_s`` is the longest time between two steps of a rank, which need
    not be the pause of a move: a fault may hold a rank up too. ``told``: what people read of a harm
    that cannot be undone."""

    table: str
    point: str
    fault: str
    expected: str
    outcome: str = "unknown"
    passed: bool = False
    gap_s: float = 0.0
    seconds: float = 0.0
    told: str = ""
    error: str = ""
    trace: str = ""


Run = Callable[[Verdict], str]
"""Plays a cell once on a scene that is prepared. Returns why nothing was shown although nothing was
wrong, or ""; raises what was wrong."""


def judge(cell: AnyCell, scene: Stage, run: Run) -> Verdict:
    """Play a cell on a scene. Never raises: what was wrong is in the verdict, and the scene has
    been struck then. A cell that nothing was seen of is played again; then it is NOT_SHOWN."""
    for _ in range(TRIES):
        verdict = _judge_once(cell, scene, run)
        if verdict.outcome != NOT_SHOWN:
            break
    return verdict


def _judge_once(cell: AnyCell, scene: Stage, run: Run) -> Verdict:
    verdict = Verdict(cell.table, cell.point, cell.fault, cell.expected)
    began = time.monotonic()
    try:
        scene.prepare()
        not_shown = run(verdict)
        verdict.passed = not not_shown
        if not_shown:
            verdict.outcome, verdict.error = NOT_SHOWN, not_shown
    except Exception as error:
        verdict.error = str(error) or type(error).__name__
        if not isinstance(error, AssertionError):
            verdict.error = traceback.format_exc()
        with suppress(Exception):
            verdict.trace += scene.session.last_words()
        scene.strike()
    verdict.seconds = time.monotonic() - began
    return verdict
