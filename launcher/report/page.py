# SPDX-License-Identifier: Apache-2.0
"""Makes a report into one HTML file that needs no other file, and writes it and the JSON.

All text from outside (names, reasons, commands) passes through :func:`text` on its way into the
page.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from . import charts
from . import quantities as q
from .document import as_json
from .evidence import hosts_of, unseen
from .headline import headline
from .record import DowntimeReport, ReportedMigration, ReportVerdict
from .timeline import timeline


def render(report: DowntimeReport) -> str:
    """Return the page. It loads no script, font or picture from elsewhere."""
    folder = resources.files(__package__)
    rank = report.move.ranks[0]
    event, _, result = headline(report).partition(": ")
    return Template((folder / "page.html").read_text("utf-8")).substitute(
        style=(folder / "page.css").read_text("utf-8"),
        title=text(report.title),
        headline=f"{text(event)} <small>{text(result[:1].upper() + result[1:])}</small>",
        outcome=f'<p class="lead">{text(report.outcome)}</p>' if report.outcome else "",
        how=figure(),
        tiles=tiles(report),
        losses=charts.loss_chart(report, rank),
        pace=charts.pace_chart(report, rank),
        rank=rank,
        migration=migration_section(report),
        ranks=rank_table(report),
        command=text(report.command),
        reproduce=text("\n".join(report.reproduce)),
        environment=pairs(report.environment.items()),
    )


def write(report: DowntimeReport, directory: Path) -> None:
    """Write ``report.html`` and ``report.json``. Each is renamed into place, so a reader never sees
    half a file."""
    directory.mkdir(parents=True, exist_ok=True)
    document = json.dumps(as_json(report), indent=1, allow_nan=False) + "\n"
    for name, content in (("report.html", render(report)), ("report.json", document)):
        staged = directory / f".{name}.new"
        staged.write_text(content, "utf-8")
        os.replace(staged, directory / name)


def tiles(report: DowntimeReport) -> str:
    """Return the verdict at a glance."""
    verdicts, move = report.verdicts, report.move
    equal, total = sum(v.equal for v in verdicts), sum(v.steps for v in verdicts)
    hashes = sum(v.sha256_equal for v in verdicts)
    found = f"{equal}/{total} losses, {hashes}/{len(verdicts)} digests"
    good = report.bit_identical
    usual = f"usually {q.seconds(report.median_step_s)}"
    if move.freeze is None:
        shown = tile("Pause", "None", "the job was never frozen")
    elif report.gap is None or unseen(report):
        shown = tile("Pause", "Not seen", "its steps do not confirm the move", "bad")
    else:
        shown = tile("Pause", q.pause(report.gap.seconds), f"from one step to the next; {usual}")
    lost = "Not measured" if move.lost_s is None else q.pause(move.lost_s)  # with the pause
    copied = f"{q.size(move.image_bytes)} in the pause"
    if move.ahead_bytes:
        copied = f"{q.size(move.ahead_bytes)} while it trained, {copied}"
    trained = f"the job trained for {q.seconds(max(0.0, move.total_s - move.frozen_s))} of it"
    made = [
        tile("Bit-identical", "Yes" if good else "No", found, "good" if good else "bad"),
        shown,
        *([tile("Training lost", lost, move.cost)] if move.cost else []),
        tile("Copied", q.size(move.ahead_bytes + move.image_bytes), copied),
        tile("Whole move", q.seconds(move.total_s), trained),
    ]
    return "".join(made)


def tile(name: str, value: str, below: str, kind: str = "") -> str:
    return (
        f'<div class="tile {kind}"><p>{text(name)}</p>'
        f'<p class="value">{text(value)}</p><p>{text(below)}</p></div>'
    )


def migration_section(report: DowntimeReport) -> str:
    """Return the migration: its facts, its phases as bars, and all numbers folded away."""
    move = report.move
    facts = [
        f"{move.capsule}, epoch {move.epoch}",
        f"reason: {move.reason}",
        f"asked for at {q.instant(move.requested_at)}",
    ]
    legend = (
        '<p class="legend"><span><i class="key runs"></i>the job trains</span><span>'
        '<i class="key still"></i>the job is frozen</span><span><i class="key gap"></i>'
        "from one step to the next</span></p>"
    )
    name = text(f"The move: {move.source} → {move.destination}")
    return (
        f'<section><h2>{name}</h2><p class="facts">{text(" · ".join(facts))}</p>'
        f"<p>{text(pause(report))}</p>{legend}{timeline(report)}"
        f"<details><summary>All phases as a table</summary>{phase_rows(move)}</details>"
        f"{expected_rows(move)}</section>"
    )


def pause(report: DowntimeReport) -> str:
    """Say how long the pause was. If the frozen or the predicted time differs, name that too."""
    move = report.move
    if move.freeze is None:
        return "The job was never frozen."
    frozen = q.pause(move.frozen_s)
    if report.gap is None or unseen(report):
        text = f"It was frozen for {frozen}, and no pause between two of its steps shows that"
        more = []
    else:
        whole = q.pause(report.gap.seconds)
        text = f"The job paused for {whole}: that is the time from the last step before the freeze"
        text += " to the first one after it"
        more = [f"it was frozen for {frozen} of it"] if frozen != whole else []
    if expected := move.expected:
        # predicted_s and seen_s count the way to the boundary too, unlike frozen_s.
        predicted = q.pause(expected.predicted_s)
        seen = frozen if expected.seen_s is None else q.pause(expected.seen_s)
        way = "" if seen == frozen else f" with the way to the boundary, which took {seen}"
        if predicted != seen:
            more.append(f"{predicted} had been predicted for the freeze{way}")
    return ". ".join(each[:1].upper() + each[1:] for each in [text, "; ".join(more)] if each) + "."


def phase_rows(move: ReportedMigration) -> str:
    total = move.total_s
    rows = [
        row(
            "",
            phase_cell(p.name, p.frozen, p.detail),
            number(q.seconds(p.seconds)),
            number(q.share(p.seconds, total)),
            number(q.size(p.bytes)),
        )
        for p in move.phases
    ]
    rows.append(
        row(
            "rest",
            phase_cell("unaccounted", False, "time that no phase covers"),
            number(q.seconds(move.unaccounted_s)),
            number(q.share(move.unaccounted_s, total)),
            number(""),
        )
    )
    size = number(q.size(move.ahead_bytes + move.image_bytes))
    rows.append(row("sum", "<td>total</td>", number(q.seconds(total)), number("100 %"), size))
    head = '<th>phase</th><th class="num">time</th><th class="num">share</th>'
    head += '<th class="num">bytes</th>'
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def expected_rows(move: ReportedMigration) -> str:
    """Return the freeze as it was predicted, beside what was seen of each part."""
    if (expected := move.expected) is None:
        return ""
    rows = [
        row(
            "",
            phase_cell(p.name, True, p.detail),
            number("?" if p.predicted_s is None else q.seconds(p.predicted_s)),
            number(q.seconds(p.seen_s or 0.0)),
        )
        for p in expected.parts
    ]
    both = number(q.seconds(expected.predicted_s)), number(q.seconds(expected.seen_s or 0.0))
    rows.append(row("sum", "<td>total</td>", *both))
    head = '<th>part</th><th class="num">predicted</th><th class="num">seen</th>'
    note = f'<p class="facts">{text(f"by {expected.by} · {expected.grounds}")}</p>'
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    summary = "The freeze as predicted and as seen, with the way to the boundary"
    return f"<details><summary>{summary}</summary>{table}{note}</details>"


def phase_cell(name: str, frozen: bool, detail: str) -> str:
    named = f'<span class="{"still" if frozen else "runs"}">{text(name)}</span>'
    small = f"<small>{text(detail)}</small>" if detail else ""
    return f'<td><div class="phase">{named}{small}</div></td>'


def rank_table(report: DowntimeReport) -> str:
    """Return a table of the ranks: where each ran, what was compared, both digests, the verdict."""
    names = ("rank", "ran on", "steps", "equal losses", "SHA-256", "identical")
    rows = "".join(rank_row(report, verdict, names) for verdict in report.verdicts)
    head = "".join(f"<th>{name}</th>" for name in names)
    return f'<table class="ranks"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def rank_row(report: DowntimeReport, verdict: ReportVerdict, names: tuple[str, ...]) -> str:
    reference = charts.run_of(report.reference, verdict.rank)
    moved = charts.run_of(report.moved, verdict.rank)
    digests = "".join(
        f'<span class="hash"><em>{name}</em>{text(run.sha256 or "none")}</span>'
        for name, run in (("reference", reference), ("moved", moved))
    )
    good = verdict.identical
    made_on = [f"{host} ({count} steps)" for host, count in hosts_of(moved)]
    where = text(" → ".join(made_on) or "unknown")
    answer = f'<b class="{"good" if good else "bad"}">{"yes" if good else "no"}</b>'
    cells = (
        str(verdict.rank),
        where,
        str(verdict.steps),
        str(verdict.equal),
        f"<span>{digests}</span>",
        answer,
    )
    made = (f'<td data-name="{n}">{cell}</td>' for n, cell in zip(names, cells, strict=True))
    return f"<tr>{''.join(made)}</tr>"


def figure() -> str:
    """Return the drawing of how it works, which the README shows too. In a page it needs no
    namespace."""
    drawn = (resources.files(__package__) / "how-it-works.svg").read_text("utf-8")
    return drawn.replace(' xmlns="http://www.w3.org/2000/svg"', "")


def row(kind: str, *cells: str) -> str:
    return f'<tr class="{kind}">{"".join(cells)}</tr>' if kind else f"<tr>{''.join(cells)}</tr>"


def number(value: str) -> str:
    return f'<td class="num">{text(value)}</td>'


def pairs(items: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in items)


def text(value: str) -> str:
    """Escape for the page, in attributes too."""
    return escape(value, quote=True)
