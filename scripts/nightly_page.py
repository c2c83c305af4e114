# SPDX-License-Identifier: Apache-2.0
"""The page of `make nightly`: what came of each part, at which commit, and how to repeat it."""

from __future__ import annotations

import datetime
import html
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nightly_record import INTERRUPTED, PASSED, Outcome

HEAD = ("part", "outcome", "figures", "seconds", "commit", "began", "to repeat it")


@dataclass(frozen=True)
class Row:
    """One part in the form that the call asked for. ``outcome`` None: it was not run yet.
    ``counts``: it passed with the code that the checkout has now."""

    name: str
    about: str
    command: tuple[str, ...]
    log: str
    outcome: Outcome | None
    counts: bool

    def cells(self) -> tuple[str, ...]:
        if (o := self.outcome) is None:
            return (self.name, "not run", "", "", "", "", shlex.join(self.command))
        seconds, began = f"{o.seconds:,.0f}", minute(o.began)
        return (self.name, o.outcome, o.figures, seconds, o.commit, began, shlex.join(o.command))


def minute(when: datetime.datetime) -> str:
    return f"{when.astimezone():%Y-%m-%d %H:%M %Z}"


def title(rows: Sequence[Row]) -> str:
    """From when to when: the parts of one page can come from several calls."""
    known = [row.outcome for row in rows if row.outcome is not None]
    if not known:
        return "Nightly: no part was run yet"
    first = min(each.began for each in known)
    last = max(each.began + datetime.timedelta(seconds=each.seconds) for each in known)
    return f"Nightly from {minute(first)} to {minute(last)}"


def headline(rows: Sequence[Row]) -> str:
    failed, other, missing = [], [], []
    for row in rows:
        if row.outcome is None or row.outcome.outcome == INTERRUPTED:
            missing.append(row.name)
        elif row.outcome.outcome != PASSED:
            failed.append(row.name)
        elif not row.counts:
            other.append(row.name)
    kinds = (
        ("Failed", failed),
        ("Not run", missing),
        ("Passed with other code than the checkout's, or with uncommitted changes", other),
    )
    said = [f"{kind}: {', '.join(names)}." for kind, names in kinds if names]
    return " ".join(said) or "All parts passed."


def write(out: Path, rows: Sequence[Row]) -> None:
    """The page, for a browser and as text."""
    top, word = title(rows), headline(rows)
    lines = [f"# {top}", "", word, ""]
    lines += [f"| {' | '.join(HEAD)} |", "|" + " --- |" * len(HEAD)]
    for row in rows:
        cells = [cell.replace("|", "\\|") for cell in row.cells()]
        lines.append(f"| {' | '.join([*cells[:-1], f'`{cells[-1]}`'])} |")
    (out / "nightly.md").write_text("\n".join(lines) + "\n")

    body = ["<table>", _row("th", map(html.escape, HEAD))]
    for row in rows:
        name, *middle, command = map(html.escape, row.cells())
        about = html.escape(row.about)
        if row.outcome is None:
            shown = f'<span title="{about}">{name}</span>'
        else:
            shown = f'<a href="{html.escape(row.log)}" title="{about}">{name}</a>'
        body.append(_row("td", [shown, *middle, f"<code>{command}</code>"], _kind(row)))
    page = PAGE.format(title=html.escape(top), word=html.escape(word), body="\n".join(body))
    (out / "index.html").write_text(page)


def _kind(row: Row) -> str:
    """Neither good nor bad: what says nothing of the code that the checkout has."""
    if row.counts:
        return "good"
    without = row.outcome is None or row.outcome.outcome in (PASSED, INTERRUPTED)
    return "open" if without else "bad"


def _row(tag: str, cells: Iterable[str], kind: str = "") -> str:
    return f'<tr class="{kind}">' + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"


PAGE = """<!doctype html>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 sans-serif; margin: 2em }}
table {{ border-collapse: collapse }}
th, td {{ border-bottom: 1px solid #ccc; padding: .3em 1em .3em 0; text-align: left;
         vertical-align: top }}
.good td:nth-child(2) {{ color: #060 }} .bad td:nth-child(2) {{ color: #a00; font-weight: bold }}
.open td:nth-child(2) {{ color: #850 }}
</style>
<h1>{title}</h1>
<p>{word}</p>
{body}
</table>
"""
