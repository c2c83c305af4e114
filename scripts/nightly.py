#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `make nightly` runs: all that takes hours, one part after the other, and one page about it.

``scripts/nightly.py [--parts NAME,…] [--short]``. Each part is a make target with a time limit of
its own and a log in build/nightly/. A part that fails or takes too long does not keep the next one
from running. After each part the page is written again: build/nightly/index.html and nightly.md. It
ends with 1 unless all parts passed, and with 130 after an interruption, once the part is down.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import html
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "nightly"
GRACE_S = 120.0
"""An interrupted part has this long to take its labs down."""
INTERRUPTED = 130


@dataclass(frozen=True)
class Part:
    """``figures``: of the log, the last match of each of these patterns is shown."""

    name: str
    command: tuple[str, ...]
    short: tuple[str, ...]
    limit_s: float
    figures: tuple[str, ...]
    about: str


@dataclass(frozen=True)
class Outcome:
    """``outcome`` is "passed", "failed (exit status)", "took too long" or "interrupted"."""

    part: Part
    command: tuple[str, ...]
    outcome: str
    figures: str
    seconds: float


def parts(seed: int) -> tuple[Part, ...]:
    hour = 3600.0
    pytest = (r"\d+ (?:passed|failed).* in [\d.]+s.*",)
    fuzz = ("make", "fuzz", f"SEED={seed}")
    return (
        Part(
            "long",
            ("make", "test-long"),
            ("make", "test-long", "STATES=2000", "ARGS=-k ownership_model"),
            4 * hour,
            pytest,
            "further cases of what shorter tests show too",
        ),
        Part(
            "fault-matrix",
            ("make", "fault-matrix"),
            ("make", "fault-matrix", "ARGS=--short"),
            6 * hour,
            (r"\d+ of \d+ cells passed",),
            "every harm at every boundary of a migration",
        ),
        Part(
            "soak",
            ("make", "soak", "SECONDS=3600"),
            ("make", "soak", "SECONDS=60"),
            1.5 * hour,
            (r"moves +\d+ in .*", r"the job was frozen +.*", r"steps +\d+, .*"),
            "an hour of moves with pre-copy, and what they leave behind",
        ),
        Part(
            "fuzz",
            (*fuzz, "SECONDS=3600"),
            (*fuzz, "SECONDS=30"),
            1.5 * hour,
            (r"^all +[\d,]+ .*",),
            "every parser, with a seed that is another each day",
        ),
        Part(
            "compat",
            ("make", "compat"),
            ("make", "compat"),
            hour,
            (r"\d+ of \d+ worlds are good",),
            "the interposer on other glibcs and Pythons",
        ),
    )


def main(arguments: Sequence[str], all_parts: Sequence[Part], out: Path = OUT) -> int:
    parser = argparse.ArgumentParser(prog="make nightly", description=__doc__)
    names = [part.name for part in all_parts]
    parser.add_argument("--parts", default="", help=f"some of {', '.join(names)}")
    parser.add_argument("--short", action="store_true", help="each in a form of about a minute")
    asked = parser.parse_args(arguments)
    wanted = re.split(r"[,\s]+", asked.parts.strip()) if asked.parts.strip() else names
    if unknown := set(wanted) - set(names):
        parser.error(f"no part is named {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    out.mkdir(parents=True, exist_ok=True)
    began = datetime.datetime.now().astimezone()
    outcomes: list[Outcome] = []
    with _interruptible() as interrupted:
        for part in all_parts:
            if part.name in wanted and not interrupted():
                command = part.short if asked.short else part.command
                print(f"{part.name}: {shlex.join(command)} …", flush=True)
                outcomes.append(run(part, command, out / f"{part.name}.log", interrupted))
                done = outcomes[-1]
                print(f"    {done.outcome} in {done.seconds:.0f} s; {done.figures}", flush=True)
                write(out, began, outcomes)
    print(out / "index.html")
    if interrupted():
        return INTERRUPTED
    return int(any(each.outcome != "passed" for each in outcomes))


def run(
    part: Part, command: tuple[str, ...], log: Path, interrupted: Callable[[], bool]
) -> Outcome:
    """Run one part; what it prints goes to its log."""
    began = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all of it can be ended
            env=os.environ | {"COLUMNS": "140"},
        )
        outcome = ""
        while process.poll() is None and not outcome:
            if interrupted():
                outcome = "interrupted"
            elif time.monotonic() - began > part.limit_s:
                outcome = "took too long"
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
        _end(process)
    if not outcome:
        code = process.returncode
        outcome = "passed" if code == 0 else f"failed ({code})"
    said = figures(part, log.read_text(errors="replace"))
    return Outcome(part, command, outcome, said, time.monotonic() - began)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a part: it is interrupted first, as labs are taken down then."""
    for number, seconds in ((signal.SIGINT, GRACE_S), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            if process.poll() is None or number == signal.SIGKILL:
                os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether SIGINT or SIGTERM has come."""
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda which, _: came.append(which)) for number in numbers]
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def figures(part: Part, said: str) -> str:
    """The last match of each of the part's patterns, without a terminal's colours."""
    plain = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", said)
    found = [list(re.finditer(pattern, plain, re.MULTILINE)) for pattern in part.figures]
    return "; ".join(re.sub(r"\s+", " ", each[-1][0]).strip(" =") for each in found if each)


HEAD = ("part", "outcome", "figures", "seconds", "to repeat it")


def rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    return [
        (o.part.name, o.outcome, o.figures, f"{o.seconds:,.0f}", shlex.join(o.command))
        for o in outcomes
    ]


def write(out: Path, began: datetime.datetime, outcomes: Sequence[Outcome]) -> None:
    """The page, for a browser and as text."""
    title = f"Nightly of {began:%Y-%m-%d %H:%M %Z}, at {_commit()}"
    failed = [each.part.name for each in outcomes if each.outcome != "passed"]
    word = f"Failed: {', '.join(failed)}" if failed else "All parts passed."
    table = rows(outcomes)
    lines = [f"# {title}", "", word, ""]
    lines += [f"| {' | '.join(HEAD)} |", "|" + " --- |" * len(HEAD)]
    for row in table:
        cells = [cell.replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join([*cells[:-1], f'`{cells[-1]}`'])} |")
    (out / "nightly.md").write_text("\n".join(lines) + "\n")

    body = ["<table>", _row("th", map(html.escape, HEAD))]
    for outcome, row in zip(outcomes, table, strict=True):
        name, *middle, command = map(html.escape, row)
        link = f'<a href="{name}.log" title="{html.escape(outcome.part.about)}">{name}</a>'
        kind = "good" if outcome.outcome == "passed" else "bad"
        body.append(_row("td", [link, *middle, f"<code>{command}</code>"], kind))
    page = PAGE.format(title=html.escape(title), word=html.escape(word), body="\n".join(body))
    (out / "index.html").write_text(page)


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
</style>
<h1>{title}</h1>
<p>{word}</p>
{body}
</table>
"""


def _commit() -> str:
    words = ["git", "-c", f"safe.directory={ROOT}", "describe", "--always", "--dirty"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "an unknown commit"


def seed_of_today() -> int:
    return int(f"{datetime.date.today():%Y%m%d}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], parts(seed_of_today())))
