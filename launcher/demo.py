# SPDX-License-Identifier: Apache-2.0
"""`make demo`: empty a host while a job trains on it, and compare the run with an undisturbed one.

The demo runs the commands that a person would type, and shows them. Afterwards it compares what the
training script itself wrote. The job trains on until it has made ``MORE`` steps after the move,
even if that takes long. Then the demo makes the same run, of as many steps, again and without a
move. It ends with 1 unless every loss of every rank and the final parameters are equal to the bit,
and every rank made those steps on the host where it should be.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .. import __version__
from ..criu_glue.criu import tool
from ..errors import LiveshiftError
from ..runtime.messages import (
    Events,
    GetEvents,
    GetInspection,
    GetStatus,
    Inspection,
    JobRow,
    MigrationRow,
    Status,
)
from ..runtime.model.steps import MigrationStep
from .alone import alone
from .client.client import Client
from .client.context import find_socket
from .report import gaps
from .report.evidence import counted, doubts, steps_by_host
from .report.headline import headline
from .report.page import write
from .report.phases import phase_table
from .report.record import DowntimeReport
from .report.training_log import read_rank
from .show import moves
from .show.visible_text import VisibleConsole

LAB = "demo"
STEPS = 100_000
"""The job is started with this number of steps, which takes hours; the demo stops it before. The
learning rate follows this number, so it hardly falls in the few steps that are made."""
TAINT_AT = 40
"""After this step the host of rank 1 is tainted."""
MORE = 40
"""Every rank makes at least this many steps after the move is over. All ranks learn of the last
step long before they come to it."""
HOST = "h1"
REASON = "ECC errors rising"
RANKS = 2
OUT = Path("build/demo")
STOP = OUT / "stop"
"""This file (the script's --stop-file) names the last step once it is known."""
SCRIPT = Path("examples/train_gpt.py")
STUCK_S = 120.0
"""A run that makes no step for this many seconds has failed."""
EMPTY_WITHIN_S = 900.0
"""If a host is not empty this many seconds after its taint, the demo fails."""
LOOK_S = 0.1

console = VisibleConsole(stderr=True)


def main() -> int:
    """Run the demo; return the exit code."""
    argparse.ArgumentParser(
        prog="make demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    ).parse_args()
    try:
        with alone("make demo"):  # a second demo would remove this one's lab
            return demo()
    except LiveshiftError as error:
        console.print(f"error: {error}", style="red", markup=False)
        if error.hint:
            console.print(f"hint: {error.hint}", markup=False)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def demo() -> int:
    """Make a lab, a run that is moved, the same run without a move, and the page. Returns the exit
    code."""
    if not SCRIPT.is_file():
        raise LiveshiftError(
            f"{SCRIPT} is not here", hint="run the demo from liveshift's checkout: make demo"
        )
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    began = time.monotonic()
    with _lab() as client:
        _say(
            f"A job trains on two hosts; one of them, {HOST}, begins to fail after step {TAINT_AT}"
        )
        move = Watched(client, "moved")
        _train(client, "moved", move.follow)
        row = move.done()
        _say("The same run again, without a move")
        _train(client, "reference")
    finished = _report(row, move.found)
    doubted = doubts(finished, MORE)
    finished = replace(finished, outcome=_outcome(finished, doubted))
    write(finished, OUT)
    _conclude(finished, time.monotonic() - began)
    if doubted:
        raise LiveshiftError(f"the steps do not confirm the move: {'; '.join(doubted)}")
    return 0 if finished.bit_identical else 1


@contextmanager
def _lab() -> Iterator[Client]:
    _command("lab", "down", LAB, quiet=True)  # left by a demo that was killed
    _command("lab", "up", LAB, "--hosts", "3", "--snapshots", "every=off")
    os.environ["LIVESHIFT_LAB"] = LAB
    try:
        with Client(find_socket(lab=LAB)) as client:
            yield client
    except BaseException:
        _command("lab", "down", LAB, quiet=True)  # quiet: the first error is the one to report
        raise
    _command("lab", "down", LAB)


class Watched:
    """The move off ``HOST``: it is started after a step, followed to its end, and then watched for
    some more steps.

    ``found``: by rank, the host whose agent has found the rank's process: before the move, after
    it, and shortly before the run's last step.
    """

    def __init__(self, client: Client, job: str) -> None:
        self._client = client
        self._job = job
        self._tainted_at: float | None = None
        self._stop = 0
        self._places: dict[str, str] = {}
        self._reported: set[str] = set()
        self.found: list[dict[int, str]] = []

    def follow(self, job: JobRow, folder: Path) -> None:
        """Do what must happen at the steps that the job has made so far."""
        steps = _steps(folder)
        if self._tainted_at is None and min(steps) >= TAINT_AT:
            self._tainted_at = time.monotonic()
            self._places = {c.name: c.host for c in job.capsules}
            self._find()
            _command("taint", "host", HOST, "--reason", REASON)
        if self._tainted_at is not None and not self._stop:
            if (row := self._over()) and _costed(row):
                self._places[row.capsule] = row.destination
                self._find()
                self._stop = max(_steps(folder)) + MORE
                _stop_after(self._stop)
            elif time.monotonic() - self._tainted_at > EMPTY_WITHIN_S:
                rows = self._rows()
                why = f"{rows[-1].name} is {rows[-1].state}" if rows else "no migration began"
                raise LiveshiftError(f"nothing moved off {HOST} in {EMPTY_WITHIN_S:g} s: {why}")
        elif self._stop and len(self.found) == 2 and min(steps) >= self._stop - MORE // 2:
            try:
                self._find()
            except LiveshiftError:
                # A rank that has ended meanwhile is on no host.
                if max(_steps(folder)) < self._stop:
                    raise

    def done(self) -> MigrationRow:
        """Return the move, once the job has ended. Raises LiveshiftError if none succeeded, with
        the outcome of the last one, or if no agent found the ranks shortly before their end."""
        if (row := self._over()) is not None:
            if len(self.found) < 3:
                raise LiveshiftError(f"no agent found the ranks in their last {MORE // 2} steps")
            return row
        rows = self._rows()
        for row in rows:
            moves.follow(self._client, row.name)  # the job may have ended before the move was over
        why = moves.outcome(self._rows()[-1]) if rows else "no migration began"
        raise LiveshiftError(f"nothing moved off {HOST}: {why}")

    def _over(self) -> MigrationRow | None:
        """Return the move that succeeded. One that did not is reported; liveshift tries again."""
        for row in self._rows():
            if row.state == MigrationStep.DONE.value:
                return row
            if moves.over(row) and row.name not in self._reported:
                self._reported.add(row.name)
                console.print(moves.outcome(row), style="yellow", markup=False)
        return None

    def _rows(self) -> list[MigrationRow]:
        events = self._client.get(Events, GetEvents(self._job, 0)).events
        return list({e.migration.name: e.migration for e in events if e.migration}.values())

    def _find(self) -> None:
        """Note the host of each rank. Raises LiveshiftError unless the agent of each host finds
        the processes of the ranks that should train there."""
        hosts = {}
        for name, host in self._places.items():
            found = self._client.get(Inspection, GetInspection(name))
            if found.host != host or not found.processes:
                raise LiveshiftError(
                    f"{name} should train on {host}, but {found.host} has"
                    f" {len(found.processes)} processes of it"
                )
            hosts[_rank(name)] = found.host
        self.found.append(hosts)


def _costed(row: MigrationRow) -> bool:
    """Whether the move's cost to the job is known, or will not be. The job must train for that."""
    return row.cost is not None or time.time() > row.asked + row.seconds + moves.COST_S


def _train(client: Client, name: str, follow: Callable[[JobRow, Path], None] | None = None) -> None:
    """Run a job to its end, with progress. ``follow`` is called again and again meanwhile."""
    folder = OUT / name
    words = ["--steps", str(STEPS), "--stop-file", str(STOP), "--out", str(folder)]
    train = ["torchrun", "--nproc-per-node", "1", str(SCRIPT), *words]
    _command("run", "--nnodes", str(RANKS), "--name", name, "--detach", "--", *train)
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn())
    shown = console.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not shown) as bar:
        task = bar.add_task("starting torch on two hosts", total=None)
        step, moved_at = 0, time.monotonic()
        while (job := _job(client, name)).state != "ended":
            now = _steps(folder)[0]
            if now != step:
                step, moved_at = now, time.monotonic()
            if time.monotonic() - moved_at > STUCK_S:
                raise LiveshiftError(f"{name} has made no step for {STUCK_S:g} s, at step {step}")
            if follow is not None:
                follow(job, folder)
            where = " ".join(f"{c.index}:{c.host}" for c in job.capsules)
            text = f"training, rank:host {where}"
            bar.update(task, completed=step, total=_last_step(), description=text)
            time.sleep(LOOK_S)
        bar.update(task, completed=_steps(folder)[0], total=_last_step(), description="trained")
    if job.code != 0:
        raise LiveshiftError(f"{name} ended with code {job.code}: {_log_end(name)}")


def _stop_after(step: int) -> None:
    """Write the step at which the script must end. A reader always finds a whole number."""
    staged = STOP.with_suffix(".new")
    staged.write_text(f"{step}\n")
    staged.rename(STOP)


def _last_step() -> int | None:
    """Return the step at which the script must end; None if that is not known yet."""
    return int(STOP.read_text()) if STOP.exists() else None


def _rank(capsule: str) -> int:
    """Return the rank of a capsule. Each capsule of the demo has one rank."""
    return int(capsule.partition("/")[2])


def _report(row: MigrationRow, found: Sequence[dict[int, str]]) -> DowntimeReport:
    """Build the report. ``found``: the hosts of the ranks before the move, after it, and at the
    end."""
    reference = tuple(read_rank(OUT / "reference", rank) for rank in range(RANKS))
    moved = tuple(read_rank(OUT / "moved", rank) for rank in range(RANKS))
    migration = replace(moves.reported(row), ranks=(_rank(row.capsule),))
    # The script prints its capsule's hostname, which moves with it. So name the host whose agent
    # found the rank instead. Before the commit nothing can run at the destination, after it nothing
    # at the source.
    passed = row.asked + (gaps.held_at(migration.phases) or 0.0)
    before, after = found[0], found[-1]
    moved = tuple(
        replace(
            run,
            steps=tuple(
                replace(s, host=(after if s.time > passed else before)[run.rank]) for s in run.steps
            ),
        )
        for run in moved
    )
    return DowntimeReport(
        title=f"demo: {row.source} emptied while a GPT trained on it",
        command=f"torchrun --nproc-per-node 1 {SCRIPT} --steps {STEPS} --stop-file {STOP}",
        reference=reference,
        moved=moved,
        move=migration,
        environment=_environment(),
    )


def _outcome(finished: DowntimeReport, doubted: list[str]) -> str:
    """Return what the steps show, or why they do not support the move, for the page."""
    if doubted:
        return f"The steps do not confirm the move: {'; '.join(doubted)}."
    made = [
        f"Rank {seen.rank} made {steps_by_host(seen.before)} before the freeze"
        f" and {steps_by_host(seen.after)} after it."
        for seen in counted(finished)
    ]
    return " ".join(made)


def _environment() -> dict[str, str]:
    processors = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((ln.partition(":")[2].strip() for ln in processors if "model name" in ln), "?")
    return {
        "liveshift": __version__,
        "kernel": platform.release(),
        "CRIU": tool.dotted(tool.find().version),
        "torch": version("torch"),
        "Python": platform.python_version(),
        "processor": f"{os.cpu_count()} × {model}",
    }


def _conclude(finished: DowntimeReport, seconds: float) -> None:
    console.print(phase_table(finished.move))
    console.print(headline(finished), style="bold", markup=False, soft_wrap=True)
    for seen in counted(finished):
        before, after = steps_by_host(seen.before), steps_by_host(seen.after)
        console.print(
            f"rank {seen.rank}: {before} before the freeze, {after} after it", soft_wrap=True
        )
    for verdict in finished.verdicts:
        digest = "equal" if verdict.sha256_equal else "DIFFERENT"
        console.print(
            f"rank {verdict.rank}: {verdict.equal} of {verdict.steps} losses equal to the bit, "
            f"SHA-256 of the final parameters {digest}",
            soft_wrap=True,
        )
    console.print(f"{OUT}/report.html and {OUT}/report.json written; {seconds:.0f} s in all")


def _job(client: Client, name: str) -> JobRow:
    jobs = client.get(Status, GetStatus()).jobs
    return next(job for job in jobs if job.name == name)


def _steps(folder: Path) -> list[int]:
    """Return how many steps each rank has made."""
    logs = (folder / f"rank{rank}.jsonl" for rank in range(RANKS))
    return [log.read_bytes().count(b"\n") if log.exists() else 0 for log in logs]


def _command(*words: str, quiet: bool = False) -> None:
    """Show a command of ours and run it, as a person would. Raises LiveshiftError if it fails,
    unless ``quiet``."""
    shown = " ".join(f'"{w}"' if " " in w else w for w in words)
    if not quiet:
        console.print(
            f"$ liveshift {shown}", style="cyan", markup=False, highlight=False, soft_wrap=True
        )
    command = [sys.executable, "-m", "liveshift.launcher", *words]
    # The job's torchrun must be this environment's, whether or not the environment is activated.
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    done = subprocess.run(
        command,
        env={**os.environ, "PATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if quiet else None,
        check=False,
    )
    if done.returncode != 0 and not quiet:
        raise LiveshiftError(f"`liveshift {shown}` ended with {done.returncode}")


def _log_end(job: str) -> str:
    command = [sys.executable, "-m", "liveshift.launcher", "logs", job]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return " / ".join((done.stdout + done.stderr).splitlines()[-5:])


def _say(text: str) -> None:
    console.print(f"\n{text}", style="bold")


if __name__ == "__main__":
    sys.exit(main())
