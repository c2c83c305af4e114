# SPDX-License-Identifier: Apache-2.0
"""The downtime of a case as bars: its phases, beside the limits and the other ways to move."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from statistics import median

from liveshift.launcher.report import quantities as q

from .goals import by_hand_s, restart_s
from .moves import AROUND
from .record import Result

COLOURS = {
    "last round": "c5",
    "lock": "c6",
    "dump": "c1",
    "memory": "c2",
    "gpu memory": "c2",
    "ship": "c7",
    "files": "c4",
    "verify": "c4",
    "restore": "c3",
    "unlock": "c6",
    "reopen": "c6",
    AROUND: "c0",
}
"""The same phase has the same colour everywhere; others are grey."""
Piece = tuple[str, float, str]
"""What, seconds, the class of its colour."""


def drawn(result: Result) -> str:
    """The bars, and what their colours mean."""
    ours = _pieces(result)
    return _bars(result, ours) + _keys(ours)


def _pieces(result: Result) -> list[Piece]:
    """The downtime in its phases; those too short to be seen are together."""
    total = result.downtime_s or 0.0
    rows = [(row.name, row.own_s) for row in result.phases if row.own_s > 0]
    large = [(name, own) for name, own in rows if own >= 0.02 * total]
    found = [(name, own, COLOURS.get(name, "c7")) for name, own in large]
    rest = total - sum(own for _, own in large)
    return [*found, ("everything else", max(0.0, rest), "c8")]


def _bars(result: Result, ours: list[Piece]) -> str:
    hand, redone, limit = by_hand_s(result), restart_s(result), result.limit
    assert result.downtime_s is not None
    longest = 1.04 * max(result.downtime_s, hand or 0.0, limit.seconds if limit else 0.0)
    rows = []
    if limit:
        rows.append(
            _bar("limit, strict", [("", limit.strict_s, "strict")], longest, limit.strict_s, "")
        )
        rows.append(_bar("limit", [("", limit.seconds, "limit")], longest, limit.seconds, ""))
    beside = f"{ratio(result.ratio_to_limit)} limit" if result.ratio_to_limit else ""
    rows.append(_bar("liveshift", ours, longest, result.downtime_s, beside))
    if hand and result.ratio_by_hand:
        parts = [
            (name, median(getattr(h, key) for h in result.by_hand), colour)
            for name, key, colour in (
                ("criu dump", "dump_s", "c1"),
                ("copy", "copy_s", "c2"),
                ("criu restore", "restore_s", "c3"),
            )
        ]
        rows.append(
            _bar(
                "by hand: dump, copy, restore",
                parts,
                longest,
                hand,
                f"{ratio(result.ratio_by_hand)} ours",
            )
        )
    if redone and result.ratio_checkpoint_restart:
        rows.append(
            _bar(
                "checkpoint and restart",
                [("", redone, "c7")],
                longest,
                redone,
                f"{ratio(result.ratio_checkpoint_restart)} ours",
            )
        )
    return f'<div class="bars">{"".join(rows)}</div>'


def _bar(name: str, pieces: Iterable[Piece], longest: float, total: float, beside: str) -> str:
    """One row; a bar longer than the others is cut, its number is not."""
    drawn = "".join(
        f'<i class="{colour}" style="width:{min(100.0, 100 * long / longest):.2f}%" '
        f'title="{escape(f"{what} {q.seconds(long)}".strip())}"></i>'
        for what, long, colour in pieces
    )
    cut = " cut" if total > longest else ""
    small = f" <small>{escape(beside)}</small>" if beside else ""
    return (
        f'<div class="row"><span class="name">{escape(name)}</span>'
        f'<div class="track{cut}">{drawn}</div>'
        f'<span class="num">{q.seconds(total)}{small}</span></div>'
    )


def _keys(pieces: Iterable[Piece]) -> str:
    keys = "".join(
        f'<span><i class="{colour}"></i>{escape(name)} {q.seconds(own)}</span>'
        for name, own, colour in pieces
    )
    return f'<div class="keys">{keys}</div>'


def ratio(value: float) -> str:
    return f"{q.figures(value)} ×"
