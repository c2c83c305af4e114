# SPDX-License-Identifier: Apache-2.0
"""What the orchestrator cannot reach or has lost: a host that is away, its journal, a whole job."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from held_moves import HASTY
from lab_session import CHAIN, LabSession, NewLab, eventually

from liveshift.errors import Unreachable
from liveshift.launcher import lab as labs
from liveshift.runtime.messages import Status
from liveshift.waiting import readable

pytestmark = [pytest.mark.lab, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    return new_lab("--hosts", "3", *HASTY)


def status(lab: LabSession) -> Status | None:
    with suppress(Unreachable):
        return lab.status()
    return None


def until_said(process: subprocess.Popen[bytes], words: str) -> str:
    """What it has written to stderr, once that has these words."""
    assert process.stderr is not None
    said = ""
    while words not in said:
        assert readable(60, process.stderr), said
        part = os.read(process.stderr.fileno(), 4096)
        assert part, said
        said += part.decode()
    return said


def state(lab: LabSession) -> Path:
    """The orchestrator's state directory as this machine sees it."""
    found = list(lab.lab.directory.rglob("journal.sqlite"))
    assert len(found) == 1, found
    return found[0].parent


def without_journal(lab: LabSession, backup: bool) -> None:
    """The orchestrator is killed, loses its journal, and is started with the backup or none."""
    where = state(lab)
    labs.stop_daemon(lab.lab, "ctl")
    for path in where.glob("journal.sqlite*"):
        path.unlink()
    if backup:
        shutil.copy(where / "journal.backup", where / "journal.sqlite")
    else:
        (where / "journal.backup").unlink()
    labs.start_daemon(lab.lab, "ctl")


def test_a_job_is_stopped_whose_host_is_away_for_longer_than_the_grace_time(
    lab: LabSession,
) -> None:
    """And over a restart of the orchestrator: that it is to end is in the journal."""
    job = lab.start("away", CHAIN)
    job.wait_step(5)
    host = job.seen(0).host
    lab.cli("lab", "link", host, "--cut")
    try:
        eventually(lambda: lab.host(host).state == "lost", f"{host} to be lost", 20)
        lab.cli("stop", "away", "--no-wait")
        labs.stop_daemon(lab.lab, "ctl")
        labs.start_daemon(lab.lab, "ctl")
        eventually(lambda: status(lab), "the orchestrator", 20)
        time.sleep(2)  # the grace time is one second
        job.go_on(5)
        with lab.popen("stop", "away") as stopping:
            said = until_said(stopping, "is back)")
            lab.cli("lab", "link", host, "--mend")
            out, err = stopping.communicate(timeout=30)
    finally:
        lab.cli("lab", "link", host, "--mend")
    said += err.decode()
    assert f"away/0 ({host} does not answer: it is ended when {host} is back)" in said
    assert out.decode() == "away has ended with code 143\n"


def test_a_backup_of_before_a_move_learns_of_it(lab: LabSession) -> None:
    job = lab.start("kept", CHAIN)
    job.wait_step(5)
    source = job.seen(0).host
    labs.stop_daemon(lab.lab, "ctl")  # the next one makes a backup at its start
    (state(lab) / "journal.backup").unlink()
    labs.start_daemon(lab.lab, "ctl")
    eventually(lambda: (state(lab) / "journal.backup").exists(), "a backup", 20)
    eventually(
        lambda: (now := status(lab)) and all(host.state == "up" for host in now.hosts),
        "all hosts to report",
        20,
    )
    row = job.migrate(0)
    seen = job.seen(0)
    assert seen.host == row.destination != source

    without_journal(lab, backup=True)
    eventually(lambda: (now := status(lab)) and not now.trouble, "all hosts to report", 30)
    assert (job.capsule(0).host, job.capsule(0).epoch) == (row.destination, row.epoch)
    assert job.seen(0) == seen, "nobody has touched it"
    job.go_on(5)
    again = job.migrate(0, source)
    assert int(again.name[1:]) > 1000
    job.stop()


def test_what_no_journal_knows_runs_on_and_is_ended_on_demand(lab: LabSession) -> None:
    job = lab.start("orphan", CHAIN)
    job.wait_step(5)
    host, steps = job.seen(0).host, len(job.steps())
    without_journal(lab, backup=False)
    eventually(lambda: (now := status(lab)) and now.unknown, "it to be seen", 30)
    eventually(lambda: len(job.steps()) > steps + 20, "it to go on", 30)
    said = " ".join(lab.cli("status").out.split())
    assert f"{host} runs orphan/0, which the journal does not know" in said
    assert "which the journal does not know" in lab.refused("run", "--", "true")
    assert lab.cli("stop", "orphan", "--unknown", host).out == f"orphan has ended on {host}\n"
    eventually(lambda: not lab.status().unknown, "it to be gone", 10)
    made = len(job.steps())
    time.sleep(1)
    assert len(job.steps()) == made
    assert lab.cli("run", "--", "echo", "a new one").out == "a new one\n"
