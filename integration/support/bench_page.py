# SPDX-License-Identifier: Apache-2.0
"""How benchmarks show their figures: parts of their pages, and lines on the terminal."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from bench_record import Goal
from rich.console import Console
from rich.table import Table


def style() -> str:
    """Of a page: that of the demo's report, and of bars and tables."""
    report = resources.files("liveshift.launcher.report") / "page.css"
    own = Path(__file__).with_name("bench_page.css")
    return report.read_text("utf-8") + own.read_text("utf-8")


def write_page(path: Path, html: str) -> None:
    """A reader never sees half of it."""
    staged = path.with_name(f".{path.name}.new")
    staged.write_text(html, "utf-8")
    os.replace(staged, path)


def goals_table(goals: Sequence[Goal]) -> str:
    rows = []
    for goal in goals:
        kind, word = {True: ("met", "met"), False: ("missed", "missed"), None: ("", "not told")}[
            goal.met
        ]
        reasons = "".join(f"<small>{escape(each)}</small>" for each in goal.reason.split("; "))
        rows.append(
            f"<tr><td>{escape(goal.name)}{reasons}</td>"
            f'<td class="short">{escape(goal.wanted)}</td>'
            f'<td class="short">{escape(goal.seen)}</td><td class="{kind}">{word}</td></tr>'
        )
    head = "<th>goal</th><th>wanted</th><th>seen</th><th></th>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def or_dash(value: float | None, shown: Callable[[float], str]) -> str:
    return "–" if value is None else shown(value)


def number(text: str) -> str:
    return f'<td class="num">{text}</td>'


def print_goals(console: Console, goals: Sequence[Goal]) -> None:
    table = Table("goal", "wanted", "met by", "")
    for goal in goals:
        verdict = "" if goal.met is None else "[green]met" if goal.met else "[red]missed"
        table.add_row(goal.name, goal.wanted, goal.seen, verdict)
    wide = console if console.is_terminal else Console(stderr=True, highlight=False, width=100)
    wide.print(table)


def long_time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
