# SPDX-License-Identifier: Apache-2.0
"""How benchmarks show their figures: parts of their pages, and lines on the terminal."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from bench_record import Goal
from rich.console import Console
from rich.table import Table

_FRAME = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>liveshift: $title</title>
<style>
$style
</style>
</head>
<body>
<main>
<header>
<p class="over">liveshift · $command</p>
<h1>$headline</h1>
<p class="lead">$lead</p>
</header>
<section>
<h2>Goals</h2>
$goals
</section>
$body
<footer>$footer</footer>
</main>
</body>
</html>
""")


def framed(
    title: str,
    command: str,
    goals: Sequence[Goal],
    second: str,
    body: str,
    footer: str,
    *,
    complete: bool,
) -> str:
    """The page of a benchmark. ``second``: what stands beside the number of goals that are met;
    ``body`` and ``footer`` are HTML."""
    told = [goal for goal in goals if goal.met is not None]
    met = sum(goal.met is True for goal in told)
    return _FRAME.substitute(
        title=escape(title),
        style=_style(),
        command=escape(command),
        headline=f"{met} of {len(told)} goals met <small>{escape(second)}</small>",
        lead="" if complete else "Not complete: this is what was measured until now.",
        goals=_goals_table(goals),
        body=body,
        footer=footer,
    )


def _style() -> str:
    """Of a page: that of the demo's report, and of bars and tables."""
    report = resources.files("liveshift.launcher.report") / "page.css"
    own = Path(__file__).with_name("bench_page.css")
    return report.read_text("utf-8") + own.read_text("utf-8")


def write_page(path: Path, html: str) -> None:
    """A reader never sees half of it."""
    staged = path.with_name(f".{path.name}.new")
    staged.write_text(html, "utf-8")
    os.replace(staged, path)


def _goals_table(goals: Sequence[Goal]) -> str:
    rows = []
    for goal in goals:
        kind, word = {True: ("met", "met"), False: ("missed", "missed"), None: ("", "not told")}[
            goal.met
        ]
        reasons = "".join(f"<small>{escape(each)}</small>" for each in goal.reason.split("; "))
        rows.append(
            f"<tr><td>{escape(goal.name)}{reasons}</td>"
            f'<td class="short">{escape(goal.wanted)}</td>'
            f'<td>{escape(goal.seen)}</td><td class="{kind}">{word}</td></tr>'
        )
    head = "<th>goal</th><th>wanted</th><th>seen</th><th></th>"
    body = "".join(rows)
    return f'<table class="goals"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def or_dash(value: float | None, shown: Callable[[float], str]) -> str:
    return "–" if value is None else shown(value)


def number(text: str) -> str:
    return f'<td class="num">{text}</td>'


def conclude(console: Console, goals: Sequence[Goal], done: str, failed: Sequence[str]) -> int:
    """Show the goals, where the record is (``done``), and what has failed. Returns the exit code: 1
    if a goal was missed or something has failed."""
    _print_goals(console, goals)
    console.print(done)
    for line in failed:
        console.print(line, style="red", markup=False)
    return 1 if failed or any(goal.met is False for goal in goals) else 0


def _print_goals(console: Console, goals: Sequence[Goal]) -> None:
    table = Table("goal", "wanted", "met by", "")
    for goal in goals:
        verdict = "" if goal.met is None else "[green]met" if goal.met else "[red]missed"
        table.add_row(goal.name, goal.wanted, goal.seen, verdict)
    wide = console if console.is_terminal else Console(stderr=True, highlight=False, width=100)
    wide.print(table)


def long_time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
