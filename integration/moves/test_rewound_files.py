# SPDX-License-Identifier: Apache-2.0
"""Files go back with their job: a log on a carried path that was open is again what it was, on the
same host and on another one. What others have in the same directory stays. And a file to which all
capsules append has each line once."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from lab_session import JOBS, LabSession, NewLab, eventually
from moving_job import AFTER, Job
from protected_job import events, kill_rank, wait_protected, wait_rewound
from reference_runs import References

from liveshift.launcher import lab as labs

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

STEPS, SAVED, OTHER = 900, 10, 64201
CARRIED = "/var/tmp/rewound"


APPENDS = """
import itertools, os, pathlib, sys, time
out, rank = pathlib.Path(sys.argv[1]), os.environ["LIVESHIFT_CAPSULE"].rpartition("/")[2]
log = os.open(out / "common.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
for number in itertools.count():
    if (out / "enough").exists():
        break
    os.write(log, f"{rank} {number}\\n".encode())
    time.sleep(0.001)
"""
"""Appends numbered lines to one file that all capsules of the job share, some hundred a second."""


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    """Two hosts run the job, two may hold its images."""
    return new_lab("--hosts", "4", "--snapshots", "every=2")


def own(lab: LabSession, host: str) -> Path:
    """The carried directory of a host, as this machine sees it."""
    return lab.lab.directory / host / "var-tmp" / "rewound"


def lines(lab: LabSession, host: str) -> int:
    """How many lines the log there has; they are of all steps, once each."""
    text = (own(lab, host) / "train.log").read_text()
    steps = [int(line.split()[1]) for line in text.splitlines() if line.count(" ") == 3]
    assert steps == list(range(1, len(steps) + 1))
    return len(steps)


def places(job: Job) -> list[str]:
    return [job.seen(rank).host for rank in range(2)]


def further(lab: LabSession, hosts: list[str], before: list[int]) -> bool:
    return all(lines(lab, hosts[rank]) > before[rank] + AFTER for rank in range(2))


def test_a_log_and_checkpoints_on_a_carried_path_go_back_with_the_job(
    lab: LabSession, references: References, place: Path
) -> None:
    argv = (
        *("python", str(JOBS / "carried.py"), "--out", "{out}"),
        *("--steps", str(STEPS), "--pace", "0.05", "--own"),
    )
    job = lab.start("files", (*argv, CARRIED), nnodes=2)
    job.wait_step(3 * SAVED)
    eventually(lambda: events(job, "protected"), "the first snapshot", 30)
    hosts = places(job)

    beside = own(lab, hosts[1]).parent
    (beside / "other").mkdir(mode=0o700)
    (beside / "other/notes").write_text("before")
    for path in (beside / "other", beside / "other/notes"):
        os.chown(path, OTHER, OTHER)
    wait_protected(job)
    wait_protected(job)  # this one has begun since, and so has the other user's file
    before = [lines(lab, host) for host in hosts]
    (beside / "other/notes").write_text("after")
    (beside / "rewound/another job's").touch()
    kill_rank(job, 1)
    wait_rewound(job, 1)
    assert places(job) == hosts, "in place"
    assert (beside / "other/notes").read_text() == "after"
    (beside / "rewound/another job's").unlink()
    eventually(partial(further, lab, hosts, before), "both logs to be longer than ever")

    wait_protected(job)
    before = [lines(lab, host) for host in hosts]
    labs.kill_host(lab.lab, hosts[1])
    wait_rewound(job, 2)
    now = places(job)
    assert now[0] == hosts[0]
    assert now[1] not in hosts
    eventually(partial(further, lab, now, before), "both logs to be longer than ever")

    elsewhere = (*argv, str(place / "files-reference-RANK"))
    job.result(ranks=2).assert_equals(references.of(elsewhere, 2, 2))
    for host in now:
        assert lines(lab, host) == STEPS
        there = own(lab, host)
        kept = sorted(path.name for path in there.iterdir())
        last = (STEPS - SAVED, STEPS)
        assert kept == [*(f"checkpoint-{n}.pt" for n in last), "train.log"]
        assert torch.load(there / f"checkpoint-{STEPS}.pt")["step"] == STEPS
    lab.boot(hosts[1])


def test_a_file_to_which_all_capsules_append_has_each_line_once(lab: LabSession) -> None:
    """Each capsule is dumped at its own moment, and the others may write until theirs. No gate
    holds these back, as the job has no collectives."""
    job = lab.start("common", ("python", "-c", APPENDS, "{out}"), nnodes=2)
    for times in range(1, 5):
        wait_protected(job)
        kill_rank(job, times % 2)
        wait_rewound(job, times)
    wait_protected(job)
    cut = [e.text for e in events(job, "rewinding") if "cut back" in e.text]
    assert all("common.log" in text for text in cut)
    assert len(cut) == 4, "both had written since, each time"
    job.stop()
    written = [line.split() for line in (job.out / "common.log").read_text().splitlines()]
    for rank in range(2):
        numbers = [int(number) for who, number in written if who == str(rank)]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) > 1000
