# SPDX-License-Identifier: Apache-2.0
"""The figures as a page with bars, one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from string import Template

from bench_page import framed, number, or_dash, write_page

from liveshift.launcher.report import quantities as q

from . import bars
from .bars import ratio
from .cases import KINDS, LINKS
from .moves import AROUND
from .record import Drain, Result, Run

FILE = "bench-move.html"
_BODY = Template("""<section>
<h2>All cases</h2>
<div class="wide">$overview</div>
</section>
$cases
$drains
<section class="two">
<div>
<h2>What is held against what</h2>
<p><b>Lost</b>: the time that the job took for its steps from the request for a move until two
seconds after its end, less what as many steps take before and after, from the step log.
<b>Empty</b>: until the source had nothing of the job any more. <b>CPU</b>: seconds of both agents
and CRIU per GB of memory; the bare loop copies, hashes and seals the same on both sides.</p>
<p>The downtime is the gap between the ends of two steps that holds the freeze, less a median step;
everywhere from the step log of the same program. Bars are medians.</p>
<p><b>Limit</b>: the bytes that had to go while the job was paused, at the rate that a bare copy
over four TCP streams reaches on the same link (warm memory to warm memory, no hash, no encryption,
the best of three), and CRIU's dump and restore of an interpreter that has imported torch and idles
with its own memory and threads. Strict: the same with that of <code>sleep</code>. Both are measured
anew for each case.</p>
<p><b>By hand</b>: <code>criu dump</code> to a tmpfs, its files by four TCP streams with sendfile
over the same link to the other host's tmpfs, <code>criu restore</code>; namespace, both ends of the
copy and CRIU's cache made ready before. Nothing is encrypted, checked, or could be undone.</p>
<p><b>Checkpoint and restart</b>: the same program with <code>torch.save</code> every $every steps,
killed again and again between two checkpoints, at points evenly apart, and started on the other
host at once: the time until the step that it had reached. The checkpoint lies in this machine's
page cache, the link is not in the way, and what saving costs meanwhile is not counted.</p>
</div>
<div>
<h2>Where</h2>
<dl>$where</dl>
<p>Two hosts of a lab on this one machine: source, destination, copy and job share its cores. Read
ratios, not seconds.</p>
</div>
</section>
""")


def write(run: Run, out: Path) -> None:
    write_page(out / FILE, render(run))


def render(run: Run) -> str:
    body = _BODY.substitute(
        overview=_overview(run),
        cases="".join(_section(run, result) for result in run.cases),
        drains=_drains(run.drains),
        every=run.effort.every,
        where=_where(run),
    )
    return framed(
        "what a move costs",
        "make bench-move",
        run.goals,
        _moves(run),
        body,
        "The same numbers, and every single move: bench-move.json beside this page.",
        complete=run.complete,
    )


def _moves(run: Run) -> str:
    moves = sum(len(result.moves) for result in run.cases)
    same = [r.bit_identical for r in run.cases if r.bit_identical is not None]
    bits = "all equal to the bit" if same and all(same) else "NOT all equal to the bit"
    cases = f"{len(run.cases)} case{'s' * (len(run.cases) != 1)}"
    return f"{moves} moves in {cases}" + (f", {bits}" if same else "")


def _overview(run: Run) -> str:
    columns = (
        "lost",
        "as liveshift says",
        "by hand",
        "restart",
        "empty",
        "CPU s/GB",
        "bare loop",
        "sent per byte",
        "downtime",
        "predicted",
        "predicted lost",
        "× limit",
        "(strict)",
        "by hand ×",
        "restart ×",
        "slower",
        "sent before",
        "sent standing",
        "changed",
        "full speed",
        "same bits",
    )
    head = "<th>case</th>" + "".join(f'<th class="num">{name}</th>' for name in columns)
    rows = "".join(_overview_row(result) for result in run.cases)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _overview_row(result: Result) -> str:
    if not result.moves:
        why = f"skipped: {result.skipped.get('ours', '')}"
        why = f"failed: {result.failed['ours']}" if "ours" in result.failed else why
        return f'<tr><td>{_called(result)}</td><td colspan="21">{escape(why)}</td></tr>'
    slower = None if result.slow_down is None else f"{100 * result.slow_down:.0f} %"
    cells = [
        or_dash(result.lost_s, q.seconds),
        or_dash(result.measured_s, q.seconds),
        or_dash(result.by_hand_lost_s, q.seconds),
        or_dash(result.restart_lost_s, q.seconds),
        or_dash(result.empty_s, q.seconds),
        or_dash(result.cpu_s_per_gb, q.figures),
        or_dash(result.cpu_limit_s_per_gb, q.figures),
        or_dash(result.sent_share, q.figures),
        or_dash(result.downtime_s, q.seconds),
        or_dash(result.predicted_s, q.seconds),
        or_dash(result.predicted_lost_s, q.seconds),
        or_dash(result.ratio_to_limit, ratio),
        or_dash(result.ratio_to_limit_strict, ratio),
        or_dash(result.ratio_by_hand, ratio),
        or_dash(result.ratio_checkpoint_restart, ratio),
        slower or "–",
        q.size(result.bytes_before),
        q.size(result.bytes_standing),
        q.size(result.delta_bytes),
        or_dash(result.time_to_full_speed_s, q.seconds),
        {True: "yes", False: "NO", None: "–"}[result.bit_identical],
    ]
    return f"<tr><td>{_called(result)}</td>{''.join(number(cell) for cell in cells)}</tr>"


def _section(run: Run, result: Result) -> str:
    """One case: its bars, and its phases as a table."""
    case = result.case
    facts = [KINDS[case.kind], f"{q.size(result.resident_bytes)} resident" * bool(result.moves)]
    facts += [f"{len(result.moves)} moves, {result.steps} steps" * bool(result.moves)]
    facts += sorted({move.way for move in result.moves})[:1]
    facts += [f"liveshift did not measure what a move cost: {why}" for why in result.not_measured]
    facts += [f"{what} skipped: {why}" for what, why in result.skipped.items()]
    facts += [f"{what} FAILED: {why}" for what, why in result.failed.items()]
    if result.limit:
        fixed = result.limit.fixed
        facts.append(f"a bare copy crosses the link at {q.rate(result.limit.rate)}")
        facts.append(
            f"CRIU takes {q.seconds(fixed.torch_s)} for an idle torch,"
            f" {q.seconds(fixed.sleep_s)} for sleep"
        )
    body = bars.drawn(result) if result.downtime_s is not None else ""
    table = _phases(result) if result.moves else ""
    return (
        f'<section id="{case.name}"><h2>{_called(result)}</h2>'
        f'<p class="facts">{escape(" · ".join(filter(None, facts)))}</p>{body}{table}</section>'
    )


def _phases(result: Result) -> str:
    total = result.downtime_s or 0.0
    rows = [
        f"<tr><td>{escape(row.name)}{_why(row.name)}</td>"
        + f"<td>{'stands' if row.frozen else 'trains'}</td>"
        + number(q.seconds(row.seconds))
        + number(_signed(row.own_s) if row.own_s else "")
        + number(q.share(row.own_s, total) if row.own_s > 0 else "")
        + number(q.size(row.bytes) if row.bytes is not None else "")
        + "</tr>"
        for row in result.phases
    ]
    left = result.unaccounted_s or 0.0
    rows.append(
        '<tr class="rest"><td>unaccounted <small>between the phases</small></td><td></td>'
        + number("")
        + number(_signed(left))
        + number(q.share(max(0.0, left), total))
        + number("")
        + "</tr>"
    )
    rows.append(
        '<tr class="sum"><td>downtime</td><td></td>'
        + number("")
        + number(q.seconds(total))
        + number("100 %")
        + number("")
        + "</tr>"
    )
    head = "<th>phase</th><th>the job</th>" + "".join(
        f'<th class="num">{name}</th>' for name in ("takes", "of the downtime", "share", "bytes")
    )
    return (
        "<details><summary>Phases, in the median</summary>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></details>"
    )


def _drains(drains: Sequence[Drain]) -> str:
    if not drains:
        return ""
    rows = [
        (
            str(drain.capsules),
            q.seconds(drain.within_s),
            q.seconds(drain.planned_s),
            str(drain.late) if drain.late else "–",
            q.seconds(drain.empty_s),
            "in time" if drain.in_time else "late",
        )
        for drain in drains
    ]
    body = "".join(f"<tr>{''.join(map(number, row))}</tr>" for row in rows)
    names = ("capsules", "within", "planned", "late by the plan", "empty after", "")
    head = "".join(f'<th class="num">{name}</th>' for name in names)
    return (
        "<section><h2>Drains with a deadline</h2>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></section>"
    )


def _where(run: Run) -> str:
    facts = {
        "begun": f"{datetime.fromtimestamp(run.began, UTC):%Y-%m-%d %H:%M} UTC",
        "took": q.seconds(run.seconds),
        "cores, memory": f"{run.cores}, {q.size(run.memory)}",
        "kernel": run.kernel,
        "torch, CRIU": f"{run.torch}, {run.criu}",
        "liveshift": f"{run.liveshift}, files {run.product}",
        "moves of a case": str(run.effort.moves),
        "threads of the job": str(run.effort.threads),
        "load before": f"{run.load_before:.2f}",
    }
    return "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())


def _why(name: str) -> str:
    why = {
        AROUND: "what it took more than a usual one, before and after the pause",
    }
    return f"<small>{why[name]}</small>" if name in why else ""


def _signed(seconds: float) -> str:
    return q.seconds(seconds) if seconds >= 0 else f"-{q.seconds(-seconds)}"


def _called(result: Result) -> str:
    case = result.case
    rate = {"none": "unlimited"}.get(LINKS[case.link], LINKS[case.link].replace("gbit", " Gbit/s"))
    forced = "" if case.way == "auto" else f", way {case.way}"
    return escape(f"{case.gb:g} GB {case.kind}, {rate}{forced}")
