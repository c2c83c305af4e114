#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `make test` and its like run: one whole run on a machine at a time, and no test skipped.

``scripts/whole_run.py NAME -- PYTEST-ARGUMENTS [-- PYTEST-ARGUMENTS …]`` runs pytest once for each
list of arguments, all of them whatever comes of the first. It ends with 1 unless every test of
every list passed; a test that was skipped has tested nothing, and counts as one that failed. Only
what the machine itself cannot have is excepted, and named: FACTS in tests/support/machine_needs.py.

What failed in any list is said once more at the end, in a line or two each: who sees only the end
of a long output knows from that what to look at.

It ends with 1 as well if a run has left files in the checkout, outside build/ and the environment,
or something with one of the harness's names (OURS) in a directory for temporary files.
In the end it removes labs that are still there: where a run of several processes is interrupted,
pytest-xdist kills those that are at it after some seconds, and nobody else knows of their labs.

Tests measure times and make labs, so that two whole runs at once would fail each other. The second
one is refused, also in another clone, and beside `make demo`; a pytest started by hand is not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "integration" / "support"))

import lab_place
import machine_needs

from liveshift.errors import LiveshiftError
from liveshift.launcher import lab
from liveshift.launcher.alone import alone
from liveshift.launcher.client.context import LAB_ROOT_VARIABLE

ROOT = Path(__file__).resolve().parents[1]
INTERRUPTED = 130
TEMPORARY = {Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp"), Path("/dev/shm")}
BYTECODE = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "LIVESHIFT_TEST_BYTECODE": str(ROOT / "build" / "bytecode"),
}
"""No bytecode beside the sources. What pytest makes of the tests is kept, for workers and later
runs."""
ONE_RUN = """
import sys
sys.path[0] = sys.argv.pop(1)
import whole_run
sys.exit(whole_run.one_run(sys.argv[1:]))
"""
"""For ``python -c``. Were this file the main module of the run, each process that a fork server
makes for a test would import it first, and the package with it."""
FAILED = "LIVESHIFT_TEST_FAILED"
"""The variable with the name of the file in which the runs note what has failed."""
REASON = 600
"""At most so many characters of a reason are said."""
OURS = ("corpus-", "gate-", "liveshift-", "ls-", "lsload", "place-", "reference-")
"""The names of what tests make there begin so. Others' files come and go there as they like."""


class NoSkips:
    """A plugin of pytest for which a skipped test is one that failed, unless its machine lacks one
    of the FACTS."""

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.OK and _skipped(session.config)[0]:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        count, lacking = _skipped(terminalreporter.config)
        if lacking:
            each = ", ".join(f"{fact} ({n})" for fact, n in lacking.items())
            terminalreporter.write_line(f"not tested, as this machine has none: {each}")
        if count:
            terminalreporter.write_line(
                f"error: {count} skipped: a test that is skipped has not tested (reasons above)",
                red=True,
            )
        if path := os.environ.get(FAILED):
            stats = terminalreporter.stats
            with open(path, "a") as file:
                for report in (*stats.get("failed", []), *stats.get("error", [])):
                    file.write(f"{report.nodeid}: {_reason(report)}\n")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test failed, and where, on one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        text = report.longreprtext
        return " ".join(text[-REASON:].split())
    text = f"{crash.path}:{crash.lineno}: {crash.message}"
    return " ".join(text[:REASON].split())


def _skipped(config: pytest.Config) -> tuple[int, Counter[str]]:
    """How many tests were skipped that count as failed, and the others by what they lacked."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    assert reporter is not None
    count = len(reporter.stats.get("xfailed", []))
    lacking: Counter[str] = Counter()
    for report in reporter.stats.get("skipped", []):
        if fact := machine_needs.lacked(report.longrepr[2]):
            lacking[fact] += 1
        else:
            count += 1
    return count, lacking


def lists(arguments: Iterable[str]) -> Iterator[list[str]]:
    """What stands between two ``--``."""
    part: list[str] = []
    for word in arguments:
        if word == "--":
            yield part
            part = []
        else:
            part.append(word)
    yield part


def main(arguments: Sequence[str]) -> int:
    """The exit code: 130 when it was interrupted, 5 when another run holds the machine."""
    (name,), *runs = lists(arguments)
    try:
        with alone(name):
            before = clutter() | elsewhere()
            with tempfile.TemporaryDirectory() as made, tempfile.NamedTemporaryFile("r") as failed:
                os.environ[lab_place.MADE] = made
                os.environ[FAILED] = failed.name
                try:
                    code = _run_all(runs)
                finally:
                    take_down(Path(made))
                for line in failed:
                    print(f"failed: {line}", end="", file=sys.stderr)
            left = [] if code == INTERRUPTED else sorted((clutter() | elsewhere()) - before)
            if left:
                print(f"error: the tests have left {', '.join(left)}", file=sys.stderr)
            return code or int(bool(left))
    except LiveshiftError as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code


def one_run(arguments: Sequence[str]) -> int:
    """Run pytest, and return its exit status."""
    return int(pytest.main([*arguments], plugins=[NoSkips()]))


def take_down(made: Path) -> None:
    """Remove the labs and the places whose names lie in ``made``, if they are still there."""
    places = [*made.glob("place-*")]
    for note in {*made.iterdir()}.difference(places):
        os.environ[LAB_ROOT_VARIABLE] = note.read_text()
        if note.name in lab.names():
            print(f"removing the lab {note.name}, which an interrupted test has left", flush=True)
            lab.down(note.name)
    for note in places:  # the hosts of the labs have used them
        place = Path(note.read_text())
        shutil.rmtree(place, ignore_errors=True)
        with contextlib.suppress(OSError):  # others' are there
            place.parent.rmdir()


def clutter() -> set[str]:
    """The files in this checkout that git does not know or ignores, but for those that may be left:
    build/ and the environment. Empty where there is no git, or no repository."""
    apart = ["build", os.path.relpath(sys.prefix, ROOT)]
    words = ["git", "--no-optional-locks", "-c", f"safe.directory={ROOT}", "status", "--porcelain"]
    words += ["-z", "--untracked-files=all", "--ignored", "--", "."]
    words += [f":!{each}" for each in apart if not each.startswith("..")]
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return set()
    return {line[3:] for line in done.stdout.split("\0") if line[:2] in ("??", "!!")}


def elsewhere() -> set[str]:
    """Return what has one of OURS as its name in directories for temporary files, without this
    checkout itself."""
    found = (path for place in TEMPORARY if place.is_dir() for path in place.iterdir())
    return {str(path) for path in found if path.name.startswith(OURS) and path != ROOT}


def _run_all(runs: Iterable[Sequence[str]]) -> int:
    """A process each: what one leaves in its memory is not the next one's.

    An interrupted one ends by itself, once its labs are taken down, and no other is begun.
    """
    failed = 0
    stopped = False

    def stop(signal_number: int, _: object) -> None:
        nonlocal stopped
        stopped = True
        if signal_number == signal.SIGTERM:  # Ctrl-C goes to all of the terminal's processes
            process.send_signal(signal.SIGINT)

    for arguments in runs:
        words = [sys.executable, "-c", ONE_RUN, str(Path(__file__).parent), *arguments]
        process = subprocess.Popen(words, env=os.environ | BYTECODE)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        failed |= process.wait()
        if stopped:
            return INTERRUPTED
    return int(failed != 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
