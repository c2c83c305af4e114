# SPDX-License-Identifier: Apache-2.0
"""The figures as a page with bars, one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from string import Template

from bench_page import framed, number, or_dash, write_page
from bench_record import middle

from liveshift.launcher.report import quantities as q

from .cases import NEEDS, RANKS, WAYS
from .failures import Kind
from .record import Result, Run

FILE = "bench-failure.html"
HURT = {"processes": Kind.PROCESS, "hosts": Kind.HOST}
FALSE = ", false alarm"
_MET = Template("""<section>
<h2>A job that meets failures</h2>
<p>$steps steps of $pace s at least. On average $mean s after the job is whole, a rank's process is
killed, or, once in five times, the power of its host is cut (seed $seed).</p>
<div class="wide">$schedule</div>
</section>""")

_BODY = Template("""<section>
<h2>Lost by the loss of a host</h2>
$bars
</section>
<section>
<h2>While a host is lost</h2>
<p>The medians of each case, and its worst kill. Times begin with the cut.</p>
<div class="wide">$losses</div>
</section>
<section>
<h2>While nothing fails</h2>
<div class="wide">$steady</div>
</section>
$met
<section>
<h2>Every kill, and every false alarm</h2>
<p>For a false alarm a host is cut off for a second longer than it may be silent. Its rank goes back
to the snapshot on another host, though it still ran.</p>
<div class="wide">$kills</div>
</section>
<section class="two">
<div>
<h2>What is held against what</h2>
<p>A job of two ranks, or as many as are named (DDP over Gloo), each on a host of a lab. One host
more stands by. A host's power is cut: its link goes down, then all its processes end. All ways have
the same model and the same moments (seed $seed). The times come from the ranks' own records, and
begin just before the cut.</p>
<p><b>First step</b>: until all ranks had made a step again. <b>Lost</b>: until they had made all
steps that they had made before, those that had to be repeated included. <b>Noticed</b>: until
liveshift wrote the rewind, or the first new worker began.</p>
$ways
<p><b>Steady cost</b>: by how much the job is slower than untouched when no host dies and nothing
sets its pace. All hosts share the cores of this machine.</p>
</div>
<div>
<h2>Where</h2>
<dl>$where</dl>
<p>All hosts are on this one machine. Read ratios, not seconds.</p>
</div>
</section>
""")


def write(run: Run, out: Path) -> None:
    write_page(out / FILE, render(run))


def render(run: Run) -> str:
    kills = sum(len(result.kills) for result in run.cases)
    ways = "".join(
        f"<p><b>{escape(way)}</b>: {escape(what)}. It needs {escape(NEEDS[way])}.</p>"
        for way, what in WAYS.items()
    )
    body = _BODY.substitute(
        bars=_bars(run.cases),
        losses=_table(run.cases, _losses),
        steady=_table(run.cases, _steady),
        met=_met(run),
        kills=_kills(run.cases),
        ways=ways,
        seed=run.effort.seed,
        where=_where(run),
    )
    return framed(
        "what the loss of a host costs",
        "make bench-failure",
        run.goals,
        f"{kills} hosts killed",
        body,
        "The same numbers: bench-failure.json beside this page.",
        complete=run.complete,
    )


def called(result: Result) -> str:
    case = result.case
    after = f", {case.suspicion:g} s of silence" if case.suspicion else ""
    ranks = f"{case.ranks} ranks of " if case.ranks != RANKS[0] else ""
    return escape(f"{case.way}, {ranks}{case.each} GB{after}")


def _bars(cases: Sequence[Result]) -> str:
    """Medians: until noticed, until the first step, repeated steps."""
    shown = [result for result in cases if result.kills]
    longest = max((result.lost_s or 0.0 for result in shown), default=1.0)
    rows = []
    for result in shown:
        first, lost = result.first_step_s or 0.0, result.lost_s or 0.0
        noticed = min(first, result.noticed_s or 0.0)
        pieces = (
            ("noticed", noticed, "c8"),
            ("until the first step", first - noticed, "c3"),
            ("repeated", lost - first, "c1"),
        )
        drawn = "".join(
            f'<i class="{colour}" style="width:{100 * max(0.0, long) / longest:.2f}%"'
            f' title="{what} {q.seconds(max(0.0, long))}"></i>'
            for what, long, colour in pieces
        )
        rows.append(
            f'<div class="row"><span class="name">{called(result)}</span>'
            f'<div class="track">{drawn}</div><span class="num">{q.seconds(lost)}</span></div>'
        )
    keys = (
        '<div class="keys"><span><i class="c8"></i>until noticed</span>'
        '<span><i class="c3"></i>until the first step</span>'
        '<span><i class="c1"></i>steps repeated</span></div>'
    )
    return f'<div class="bars">{"".join(rows)}</div>{keys}'


def _table(cases: Sequence[Result], columns: Callable[[Result], dict[str, str]]) -> str:
    """A row for each case, with what ``columns`` gives for it, by the name of the column."""
    names = columns(cases[0]) if cases else {}
    head = "<th>case</th>" + "".join(f'<th class="num">{name}</th>' for name in names)
    rows = []
    for result in cases:
        name = called(result)
        if result.skipped:
            why = escape(f"skipped: {result.skipped}")
            rows.append(f'<tr><td>{name}</td><td colspan="{len(names)}">{why}</td></tr>')
            continue
        failed = "".join(
            f"<small>{escape(what)} FAILED: {escape(why.splitlines()[0])}</small>"
            for what, why in result.failed.items()
        )
        cells = "".join(map(number, columns(result).values()))
        rows.append(f"<tr><td>{name}{failed}</td>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _losses(result: Result) -> dict[str, str]:
    return {
        "kills": str(len(result.kills)),
        "noticed": or_dash(result.noticed_s, q.seconds),
        "first step": or_dash(result.first_step_s, q.seconds),
        "worst first step": or_dash(result.first_step_most_s, q.seconds),
        "lost": or_dash(result.lost_s, q.seconds),
        "worst lost": or_dash(result.lost_most_s, q.seconds),
        "repeated": or_dash(result.repeated_s, q.seconds),
        "same bits": {True: "yes", False: "NO", None: "–"}[result.identical],
    }


def _steady(result: Result) -> dict[str, str]:
    return {
        "snapshots": str(result.snapshots) if result.snapshots else "–",
        "pause": or_dash(result.pause_s, q.seconds),
        "longest pause": or_dash(max(result.pauses, default=None), q.seconds),
        "CPU of one": or_dash(result.snapshot_cpu_s, q.seconds),
        "image": or_dash(result.image_bytes, q.size),
        "steps/s": or_dash(result.steps_per_s, q.figures),
        "steady cost": or_dash(result.steady_cost, lambda share: f"{100 * share:.1f} %"),
    }


def _met(run: Run) -> str:
    """The section about jobs that meet failures; "" if the run had none."""
    cases = [each for each in run.cases if each.job_s is not None]
    if not cases:
        return ""
    return _MET.substitute(
        schedule=_table(cases, _schedule),
        steps=run.effort.steps,
        pace=f"{run.effort.pace:g}",
        mean=f"{run.effort.mean:g}",
        seed=run.effort.seed,
    )


def _schedule(result: Result) -> dict[str, str]:
    lost = [each.lost_s for each in result.met]
    hurt = {name: sum(each.kind is kind for each in result.met) for name, kind in HURT.items()}
    return {
        **{name: str(count) for name, count in hurt.items()},
        "lost by one": or_dash(middle(lost), q.seconds),
        "worst": or_dash(max(lost, default=None), q.seconds),
        "repeated": f"{sum(each.repeated for each in result.met)} steps",
        "took": or_dash(result.job_s, q.seconds),
        "× untouched": or_dash(result.job_ratio, lambda ratio: f"{ratio:.2f}"),
    }


def _kills(cases: Sequence[Result]) -> str:
    columns = ("step", "rank", "host", "to", "late", "noticed", "first step", "lost", "repeated")
    head = "<th>case</th>" + "".join(f'<th class="num">{name}</th>' for name in columns)
    rows = []
    for result in cases:
        shown = [*((each, "") for each in result.kills), *((e, FALSE) for e in result.alarms)]
        for each, what in shown:
            cells = [
                *(str(each.step), str(each.rank), escape(each.host), escape(each.to)),
                q.seconds(each.late_s),
                or_dash(each.noticed_s, q.seconds),
                q.seconds(each.first_step_s),
                q.seconds(each.lost_s),
                f"{each.repeated} steps",
            ]
            rows.append(f"<tr><td>{called(result)}{what}</td>{''.join(map(number, cells))}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _where(run: Run) -> str:
    facts = {
        "begun": f"{datetime.fromtimestamp(run.began, UTC):%Y-%m-%d %H:%M} UTC",
        "took": q.seconds(run.seconds),
        "cores, memory": f"{run.cores}, {q.size(run.memory)}",
        "kernel": run.kernel,
        "torch, CRIU": f"{run.torch}, {run.criu}",
        "torchft": run.torchft or "none",
        "liveshift": f"{run.liveshift}, files {run.product}",
        "snapshots": f"every {run.effort.every:g} s",
        "checkpoints": f"every {run.effort.steps_every} steps",
        "a step of the jobs that lose hosts": f"{run.effort.pace:g} s at least",
        "load before": f"{run.load_before:.2f}",
    }
    return "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
