# SPDX-License-Identifier: Apache-2.0
"""A rank of a job is killed and the job goes back to its snapshot, on the hosts where it is; a job
that fails by itself, or again and again, ends. And a person takes a job back."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import psutil
import pytest
from lab_session import LONG, TORCHRUN, LabSession, NewLab, eventually
from moving_job import AFTER, Job, Step
from reference_runs import References

from liveshift.runtime.messages import Event

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]

EVERY_S = 2.0
_numbers = itertools.count()
Start = Callable[..., Job]


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    """Two hosts run a job, the third one holds its images."""
    return new_lab("--hosts", "3", "--snapshots", f"every={EVERY_S:g}")


@pytest.fixture
def start(lab: LabSession) -> Iterator[Start]:
    """Starts a DDP job of two, and waits for its first snapshot. No job is left afterwards."""
    started = []

    def begin(argv: Sequence[str] = LONG, *options: str) -> Job:
        job = lab.start(f"killed{next(_numbers)}", argv, nnodes=2, options=options)
        started.append(job)
        job.wait_step(10)
        eventually(lambda: events(job, "protected"), "the first snapshot", 30)
        return job

    yield begin
    for job in started:
        if job.code() is None:
            lab.cli("stop", job.name)


def events(job: Job, kind: str) -> list[Event]:
    return [event for event in job.session.history(job.name) if event.kind == kind]


def rank_pid(job: Job, index: int) -> int:
    """The pid of the capsule's rank: torchrun, if there is one, is its parent."""
    pids = set(job.seen(index).tasks.values())
    if len(pids) > 1:
        pids = {pid for pid in pids if psutil.Process(pid).ppid() in pids}
    (pid,) = pids
    return pid


def steps_since(job: Job, rank: int, since: float) -> list[Step]:
    """The whole steps of after that time in the rank's file. A rewind may be cutting it back."""
    found = []
    for line in (job.out / f"rank{rank}.jsonl").read_text(errors="replace").splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [step for step in found if isinstance(step, dict) and step.get("time", 0.0) > since]


def wait_steps(job: Job, since: float, beyond: int) -> None:
    """Wait until both ranks have made a step beyond this one, after that time."""

    def made(rank: int) -> bool:
        return any(step["step"] > beyond for step in steps_since(job, rank, since))

    for rank in range(2):
        eventually(partial(made, rank), f"rank {rank} beyond step {beyond}")


def kill(job: Job, index: int, times: int) -> None:
    """Kill a rank, and wait for the rewind that follows: its ``times``-th one."""
    hosts = [job.seen(each).host for each in range(2)]
    pid, last, began = rank_pid(job, index), job.steps()[-1]["step"], time.time()
    os.kill(pid, signal.SIGKILL)
    rewound = eventually(lambda: events(job, "rewound")[times - 1 :], "the rewind")
    why = [event.text for event in events(job, "rewinding") if "goes back" in event.text]
    assert "was ended by SIGKILL" in why[-1]
    noticed = re.search(r"([0-9.]+) s until noticed", rewound[-1].text)
    assert noticed is not None, rewound[-1].text
    assert 0 < float(noticed[1]) < rewound[-1].time - began
    assert [job.seen(each).host for each in range(2)] == hosts, "all are back where they were"
    wait_steps(job, rewound[-1].time, max(last + AFTER, 40))
    first = min(steps_since(job, index, rewound[-1].time)[0]["time"], time.time())
    print(f"{first - began:.2f} s from the kill to a new step; {rewound[-1].text}")


@pytest.mark.long  # test_snapshot_harms.py kills one each time
def test_a_job_of_which_a_rank_is_killed_goes_on(start: Start, references: References) -> None:
    job = start()
    kill(job, 1, 1)
    job.assert_begins_like_never_moved(references)


def test_a_rank_below_torchrun_may_be_killed(start: Start) -> None:
    """torchrun itself ends with 1 then, as it does for each failure of a rank."""
    job = start((*TORCHRUN, *LONG[1:]))
    kill(job, 0, 1)
    job.stop()


@pytest.mark.long
def test_a_job_that_is_killed_more_often_than_it_may_be_ends_in_words(start: Start) -> None:
    job = start(LONG, "--max-rewinds", "1")
    kill(job, 1, 1)
    os.kill(rank_pid(job, 0), signal.SIGKILL)
    assert job.wait_end() == 128 + signal.SIGKILL
    (why,) = events(job, "not rewound")
    assert why.text.endswith("max_rewinds is 1")
    assert len(events(job, "rewound")) == 1


@pytest.mark.long
def test_a_rank_that_ends_by_itself_ends_its_job(start: Start) -> None:
    """Its peer fails of that, which is no fault either."""
    job = start((*LONG, "--fail", "{out}/fail"))
    (job.out / "fail").touch()
    assert job.wait_end() == 3
    assert not events(job, "rewinding")


@pytest.mark.long
def test_a_job_that_asks_for_it_is_taken_back_whatever_code_a_rank_ends_with(
    start: Start, references: References
) -> None:
    seldom = ("--snapshot-every", "15s")  # none is taken while the rank ends
    job = start((*LONG, "--fail", "{out}/fail"), "--rewind-on", "any", *seldom)
    rank, last = psutil.Process(rank_pid(job, 1)), job.steps()[-1]["step"]
    (job.out / "fail").touch()
    rank.wait(30)
    (job.out / "fail").unlink()  # before the rank is back
    (rewound,) = eventually(lambda: events(job, "rewound"), "the rewind")
    wait_steps(job, rewound.time, max(last + AFTER, 40))
    (why,) = [e.text for e in events(job, "rewinding") if "goes back" in e.text]
    assert "ended with code 3" in why
    job.assert_begins_like_never_moved(references)


@pytest.mark.long
def test_a_rank_that_kills_itself_at_one_step_does_so_once_more_only(start: Start) -> None:
    job = start((*LONG, "--kill-at", "80"))
    assert job.wait_end() == 128 + signal.SIGKILL
    (why,) = events(job, "not rewound")
    assert "twice in a row after collective" in why.text
    assert len(events(job, "rewound")) == 1


@pytest.mark.long
def test_a_person_takes_a_job_back(lab: LabSession, start: Start) -> None:
    job = start()
    said = lab.refused("rewind", job.name, code=2)
    assert "stdin is no terminal" in said
    lost = ("--lost", job.seen(0).host)
    assert "it is not dead, it answers" in lab.refused("rewind", job.name, "--yes", *lost)
    hosts = {f"{job.name}/{index}": job.seen(index).host for index in range(2)}
    last = job.steps()[-1]["step"]
    done = lab.json("rewind", job.name, "--yes")
    assert (done["state"], done["where"]) == ("rewound", hosts)
    (rewound,) = events(job, "rewound")
    assert done["text"] == rewound.text
    wait_steps(job, rewound.time, last + AFTER)
    job.stop()
    assert "it has ended" in lab.refused("rewind", job.name, "--yes")


@pytest.mark.long
def test_a_job_without_a_snapshot_is_not_taken_back(lab: LabSession) -> None:
    job = lab.start("bare", LONG, nnodes=2, options=("--snapshot-every", "off"))
    job.wait_step(5)
    assert "it has no complete snapshot" in lab.refused("rewind", job.name, "--yes")
    os.kill(rank_pid(job, 1), signal.SIGKILL)
    assert job.wait_end() == 128 + signal.SIGKILL, "and ends as ever"
