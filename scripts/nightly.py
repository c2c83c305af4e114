#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `make nightly` runs: all that takes hours, one part after the other, and one page about it.

``scripts/nightly.py [--parts NAME,…] [--short] [--fresh]``. Each part is a make target with a time
limit of its own and a log in build/nightly/. A part that fails or takes too long does not keep the
next one from running. After each part the record (outcomes.json) and the page (index.html and
nightly.md) are written again.

A part that the record has as passed, in this form and with this code, is not run again: so a call
goes on where an interrupted one was. ``--fresh`` forgets what the record has of the parts, and runs
them all; ``--parts`` runs those that it names, whatever the record has.

It ends with 1 unless all parts that it ran passed, with 2 if it cannot read the record, and with
130 after an interruption, once the part is down.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import nightly_page
import nightly_record
from nightly_record import INTERRUPTED, PASSED, Outcome, Record

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "nightly"
LOSSES = "ARGS=--out build/soak-losses.json"
GRACE_S = 120.0
"""An interrupted part has this long to take its labs down."""
UNREADABLE, STOPPED = 2, 130
"""Exit statuses."""


@dataclass(frozen=True)
class Part:
    """``figures``: of the log, the last match of each of these patterns is shown."""

    name: str
    command: tuple[str, ...]
    short: tuple[str, ...]
    limit_s: float
    figures: tuple[str, ...]
    about: str


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
            "coverage",
            ("make", "coverage"),
            ("make", "coverage"),
            2 * hour,
            (r"^all .* %",),
            "that the fast tests run nearly all lines of what is pure",
        ),
        Part(
            "fault-matrix",
            ("make", "fault-matrix"),
            ("make", "fault-matrix", "ARGS=--short"),
            6 * hour,
            (r"\d+ of \d+ cells passed",),
            "every harm at every boundary of moves and snapshots",
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
            "losses",
            ("make", "soak", "SECONDS=3600", "KILLS=60", f"SEED={seed}", LOSSES),
            ("make", "soak", "SECONDS=60", "KILLS=15", f"SEED={seed}", LOSSES),
            1.5 * hour,
            (r"hosts lost +\d+, .*", r"the job ran again after +.*", r"steps +\d+, .*"),
            "an hour in which a host loses its power every minute, with moves in between",
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


def main(
    arguments: Sequence[str], all_parts: Sequence[Part], out: Path = OUT, root: Path = ROOT
) -> int:
    parser = argparse.ArgumentParser(prog="make nightly", description=__doc__)
    names = [part.name for part in all_parts]
    parser.add_argument("--parts", default="", help=f"some of {', '.join(names)}")
    parser.add_argument("--short", action="store_true", help="each in a form of about a minute")
    parser.add_argument("--fresh", action="store_true", help="also those that have passed")
    asked = parser.parse_args(arguments)
    named = re.split(r"[,\s]+", asked.parts.strip()) if asked.parts.strip() else []
    if unknown := set(named) - set(names):
        parser.error(f"no part is named {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    out.mkdir(parents=True, exist_ok=True)
    path = out / "outcomes.json"
    try:
        record = nightly_record.read(path)
    except nightly_record.DamagedRecordError as error:
        if not asked.fresh:
            print(REFUSED.format(path=path, found=error), file=sys.stderr)
            return UNREADABLE
        record = Record([])
    every = [(part, part.short if asked.short else part.command) for part in all_parts]
    wanted = [(part, command) for part, command in every if not named or part.name in named]
    if asked.fresh:  # at once, so that a later call goes on with this one's parts only
        for part, command in wanted:
            record.forget(part.name, command)
        record.write(path)
    elif not named:
        wanted = [each for each in wanted if not _kept(record, *each, root)]
    write(out, every, record, root)
    ran: list[str] = []
    with _interruptible() as interrupted:
        for part, command in wanted:
            if interrupted():
                break
            print(f"{part.name}: {shlex.join(command)} …", flush=True)
            log = out / _log(part, command)
            growing = log.with_name(f"{log.name}.new")
            done = run(part, command, growing, interrupted, root)
            print(f"    {done.outcome} in {done.seconds:.0f} s; {done.figures}", flush=True)
            ran.append(done.outcome)
            if record.add(done, root):  # else the earlier outcome keeps its log
                os.replace(growing, log)
                record.write(path)
            write(out, every, record, root)
    print(out / "index.html")
    if interrupted():
        return STOPPED
    return int(any(each != PASSED for each in ran))


REFUSED = """\
error: read {path} for the parts that earlier calls ran, and found no such record: {found}
hint: the file is damaged, or another version of `make nightly` wrote it; `make nightly FRESH=1` \
replaces it and runs all parts again"""


def _kept(record: Record, part: Part, command: tuple[str, ...], root: Path) -> bool:
    """True if the part need not be run; what became of an earlier pass is said either way."""
    before = record.of(part.name, command)
    if before is None or before.outcome != PASSED:
        return False
    kept = nightly_record.counts(before, root)
    word = "not run again (FRESH=1 does)" if kept else "run again, as the code may be another"
    when = nightly_page.minute(before.began)
    print(f"{part.name}: passed at {before.commit}, {when}; {word}", flush=True)
    return kept


def _log(part: Part, command: tuple[str, ...]) -> str:
    """The forms have a log each, as they have an outcome each."""
    whole = nightly_record.form(command) == nightly_record.form(part.command)
    return f"{part.name}.log" if whole else f"{part.name}-short.log"


def write(
    out: Path, every: Sequence[tuple[Part, tuple[str, ...]]], record: Record, root: Path
) -> None:
    rows = []
    for part, command in every:
        outcome = record.of(part.name, command)
        counts = nightly_record.counts(outcome, root)
        log = _log(part, command)
        rows.append(nightly_page.Row(part.name, part.about, command, log, outcome, counts))
    nightly_page.write(out, rows)


def run(
    part: Part, command: tuple[str, ...], log: Path, interrupted: Callable[[], bool], root: Path
) -> Outcome:
    """Run one part; what it prints goes to its log."""
    commit = nightly_record.commit_of(root)
    when = datetime.datetime.now().astimezone()
    began = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all of it can be ended
            env=os.environ | {"COLUMNS": "140"},
        )
        outcome = ""
        while process.poll() is None and not outcome:
            if interrupted():
                outcome = INTERRUPTED
            elif time.monotonic() - began > part.limit_s:
                outcome = "took too long"
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
        _end(process)
    if not outcome:
        code = process.returncode
        outcome = PASSED if code == 0 else f"failed ({code})"
    seconds = round(time.monotonic() - began, 1)
    said = figures(part, log.read_text(errors="replace"))
    commit = nightly_record.marked(root, commit)  # hours have passed: somebody may have edited
    return Outcome(part.name, command, outcome, said, seconds, commit, when)


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


def seed_of_today() -> int:
    return int(f"{datetime.date.today():%Y%m%d}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], parts(seed_of_today())))
