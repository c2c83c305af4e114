# SPDX-License-Identifier: Apache-2.0
"""`make demo`: train twice on virtual hosts, once undisturbed, once while a host is emptied.

Everything is done by the commands that a person would type, which are shown; what is compared
afterwards is what the training script itself wrote. Ends with 1 unless every loss of every rank
and the final parameters are equal to the bit.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .. import __version__
from ..criu_glue import tool
from ..errors import LiveshiftError, Refused
from ..runtime.messages import Events, GetEvents, GetStatus, JobRow, MigrationRow, Status
from . import forecast, report
from .client import Client
from .context import find_socket

LAB = "demo"
RUNNING = Path("/run/liveshift-demo.lock")
STEPS = 200
TAINT_AT = 80
"""The step after which the host of rank 1 is tainted."""
HOST = "h1"
REASON = "ECC errors rising"
RANKS = 2
OUT = Path("build/demo")
SCRIPT = Path("examples/train_gpt.py")
STUCK_S = 120.0
"""A run that makes no step for so long has failed."""

console = Console(stderr=True)


def main() -> int:
    """Run the demo; returns the exit code."""
    argparse.ArgumentParser(
        prog="make demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    ).parse_args()
    try:
        with _alone():
            return demo()
    except LiveshiftError as error:
        console.print(f"error: {error}", style="red", markup=False)
        if error.hint:
            console.print(f"hint: {error.hint}", markup=False)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def demo() -> int:
    """The demo as a story: a lab, a run left alone, a run that is moved, a page."""
    if not SCRIPT.is_file():
        raise LiveshiftError(
            f"{SCRIPT} is not here", hint="run the demo from liveshift's checkout: make demo"
        )
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    began = time.monotonic()
    with _lab() as client:
        _say("A run that nobody touches")
        _train(client, "reference")
        _say(f"The same run; its host {HOST} fails slowly after step {TAINT_AT}")
        hosts = _train(client, "moved", taint=True)
        row = _migration(client)
    finished = _report(row, hosts)
    report.write(finished, OUT)
    _conclude(finished, time.monotonic() - began)
    return 0 if finished.bit_identical else 1


@contextmanager
def _alone() -> Iterator[None]:
    """One demo at a time: the next one takes away the lab of what it takes for a killed one."""
    try:
        lock = RUNNING.open("w")
    except PermissionError:  # `lab up` says who may
        yield
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(
                "a demo runs on this machine already", hint="wait for its end, or interrupt it"
            ) from None
        yield


@contextmanager
def _lab() -> Iterator[Client]:
    _command("lab", "down", LAB, quiet=True)  # what a demo that was killed has left
    _command("lab", "up", LAB, "--hosts", "3")
    os.environ["LIVESHIFT_LAB"] = LAB
    try:
        with Client(find_socket(lab=LAB)) as client:
            yield client
    except BaseException:
        _command("lab", "down", LAB, quiet=True)  # what went wrong before is what is told
        raise
    _command("lab", "down", LAB)


def _train(client: Client, name: str, taint: bool = False) -> dict[int, str]:
    """One run to its end, with progress; returns which host each rank began on."""
    folder = OUT / name
    train = ["torchrun", "--nproc-per-node", "1", str(SCRIPT)]
    train += ["--steps", str(STEPS), "--out", str(folder)]
    _command("run", "--nnodes", str(RANKS), "--name", name, "--detach", "--", *train)
    hosts = {c.index: c.host for c in _job(client, name).capsules}
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn())
    shown = console.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not shown) as bar:
        task = bar.add_task("starting torch on two hosts", total=STEPS)
        step, moved_at = 0, time.monotonic()
        while (job := _job(client, name)).state != "ended":
            now = _steps(folder)
            if now != step:
                step, moved_at = now, time.monotonic()
            if time.monotonic() - moved_at > STUCK_S:
                raise LiveshiftError(f"{name} has made no step for {STUCK_S:g} s, at step {step}")
            if taint and step >= TAINT_AT:
                taint = False
                _command("taint", "host", HOST, "--reason", REASON)
            where = " ".join(f"{c.index}:{c.host}" for c in job.capsules)
            bar.update(task, completed=step, description=f"training, rank:host {where}")
            time.sleep(0.1)
        bar.update(task, completed=_steps(folder), description="trained")
    if job.code != 0:
        raise LiveshiftError(f"{name} ended with code {job.code}: {_last_words(name)}")
    return hosts


def _migration(client: Client) -> MigrationRow:
    """The move that the taint set off; raises LiveshiftError when there was none."""
    events = client.get(Events, GetEvents("moved", 0)).events
    rows = [event.migration for event in events if event.migration]
    done = [row for row in rows if row.state == "done"]
    if not done:
        why = rows[-1].error if rows else "no migration began"
        raise LiveshiftError(f"nothing moved off {HOST}: {why}")
    return done[-1]


def _report(row: MigrationRow, hosts: dict[int, str]) -> report.Report:
    reference = tuple(report.read_rank(OUT / "reference", rank) for rank in range(RANKS))
    moved = tuple(report.read_rank(OUT / "moved", rank) for rank in range(RANKS))
    phases = tuple(
        report.Phase(p.name, p.seconds, p.start, p.bytes, p.frozen, p.detail) for p in row.phases
    )
    rank = int(row.capsule.partition("/")[2])
    covered = report.Migration(
        row.capsule, row.source, row.destination, row.reason, row.epoch, row.asked, row.asked,
        phases, 0.0, 0.0, row.image_bytes, row.link_rate, (rank,), expected=forecast.compared(row),
    )  # fmt: skip
    gap = report.measured_downtime(moved, row.asked, row.asked + row.seconds)
    migration = replace(
        covered, unaccounted_s=max(0.0, row.seconds - covered.total_s), downtime_s=gap
    )
    # The script prints its capsule's hostname, which moves with it: name the hosts instead.
    thawed = row.asked + max((p.start + p.seconds for p in phases if p.frozen), default=0.0)
    moved = tuple(
        replace(
            run,
            steps=tuple(
                replace(
                    s,
                    host=row.destination if run.rank == rank and s.time > thawed
                    else hosts[run.rank],
                )
                for s in run.steps
            ),
        )
        for run in moved
    )  # fmt: skip
    return report.Report(
        title=f"liveshift demo: {row.source} emptied while a GPT trained on it",
        command=f"torchrun --nproc-per-node 1 {SCRIPT} --steps {STEPS}",
        reference=reference,
        moved=moved,
        migrations=(migration,),
        environment=_environment(),
    )


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


def _conclude(finished: report.Report, seconds: float) -> None:
    for migration in finished.migrations:
        console.print(report.phase_table(migration))
    console.print(report.headline(finished), style="bold", markup=False)
    for verdict in finished.verdicts:
        digest = "equal" if verdict.sha256_equal else "DIFFERENT"
        console.print(
            f"rank {verdict.rank}: {verdict.equal} of {verdict.steps} losses equal to the bit, "
            f"SHA-256 of the final parameters {digest}"
        )
    console.print(f"{OUT}/report.html and {OUT}/report.json written; {seconds:.0f} s in all")


def _job(client: Client, name: str) -> JobRow:
    jobs = client.get(Status, GetStatus()).jobs
    return next(job for job in jobs if job.name == name)


def _steps(folder: Path) -> int:
    try:
        return (folder / "rank0.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _command(*words: str, quiet: bool = False) -> None:
    """Run a command of ours as a person would, shown first; raises LiveshiftError if it fails."""
    shown = " ".join(f'"{w}"' if " " in w else w for w in words)
    if not quiet:
        console.print(f"$ liveshift {shown}", style="cyan", markup=False, highlight=False)
    command = [sys.executable, "-m", "liveshift.launcher", *words]
    # What the job runs (torchrun) is this environment's, whether or not it is activated.
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


def _last_words(job: str) -> str:
    command = [sys.executable, "-m", "liveshift.launcher", "logs", job]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return " / ".join((done.stdout + done.stderr).splitlines()[-5:])


def _say(text: str) -> None:
    console.print(f"\n{text}", style="bold")


if __name__ == "__main__":
    sys.exit(main())
