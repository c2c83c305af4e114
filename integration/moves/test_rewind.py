# SPDX-License-Identifier: Apache-2.0
"""A host of a job loses its power, and the job goes on from its newest snapshot, bit for bit.

A host that is only silent towards the orchestrator leads to no rewind. A rewind cuts the file of a
rank's steps back to what it was, and the rank writes on from there. The file may be read meanwhile.
"""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from fault_matrix.held import Held, holding
from lab_session import LONG, LabSession, NewLab, eventually
from moving_job import AFTER, Job
from protected_job import (
    events,
    steps,
    steps_since,
    wait_past,
    wait_protected,
    wait_rewound,
    wait_steps,
)
from reference_runs import References

from liveshift.launcher import lab as labs
from liveshift.runtime.config.cluster import load

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

EVERY_S = 2.0
_numbers = itertools.count()


TOLD = """#!/bin/sh
env | grep "^LIVESHIFT_" >> {place}/told-$LIVESHIFT_JOB
echo "told of $LIVESHIFT_SNAPSHOT" >&2
exit 3
"""
"""What the orchestrator runs after a rewind."""


@pytest.fixture(scope="module")
def points(place: Path) -> Iterator[Held]:
    with holding(place / "rewind-points") as made:
        yield made


@pytest.fixture(scope="module")
def lab(new_lab: NewLab, place: Path, points: Held) -> LabSession:
    """Two hosts run the job, two may hold its images. A program is told of rewinds."""
    program = place / "on-rewind"
    program.write_text(TOLD.format(place=place))
    program.chmod(0o755)
    on_rewind = f'on_rewind=["{program}"]'
    return new_lab("--hosts", "4", "--snapshots", f"every={EVERY_S:g},{on_rewind}")


@pytest.fixture
def job(lab: LabSession) -> Iterator[Job]:
    """A DDP job of two on h0 and h1, in training, with a snapshot. All hosts run afterwards."""
    started = lab.start(f"rewound{next(_numbers)}", (*LONG, "--say"), nnodes=2)
    started.wait_step(10)
    eventually(lambda: events(started, "protected"), "the first snapshot", 30)
    yield started
    for host in lab.lab.hosts:
        if lab.lab.machine(host).init is None:
            lab.boot(host)


def suspicion(lab: LabSession) -> float:
    return load(lab.lab.config).timeouts.suspicion


def printed(job: Job, rank: int, *options: str) -> tuple[list[int], list[int], str]:
    """The steps that a rank has printed, those that are marked as repeated, and what is on
    stderr."""
    said = job.session.cli("logs", f"{job.name}/{rank}", *options)
    lines = said.out.splitlines()
    once, repeated = (
        [int(found[1]) for line in lines if (found := re.fullmatch(f"{mark}step ([0-9]+)", line))]
        for mark in ("", re.escape("(repeated) "))
    )
    return once, repeated, said.err


def last_printed(job: Job, rank: int, after: int) -> int:
    """The last step that a rank has printed; 0 if it is no later one."""
    last = printed(job, rank)[0][-1]
    return last if last > after else 0


def assert_both_runs_are_shown(job: Job, rank: int, last: int) -> None:
    """``last``: a step of after the snapshot that the rank had printed when its host died."""
    once, repeated, said = printed(job, rank, "--with-repeated")
    assert once == list(range(1, len(once) + 1))
    assert repeated == list(range(repeated[0], repeated[-1] + 1))
    assert 1 < repeated[0] <= last <= repeated[-1] <= len(once), "both runs of the same steps"
    assert said.index("printed what follows on") < said.index("went on here from a snapshot")


def assert_told(job: Job, place: Path, lost: str, rewound: str) -> None:
    """The program was run once, and its end is in the job's history."""
    (event,) = eventually(lambda: events(job, "on_rewind"), "the program to end", 30)
    lines = (place / f"told-{job.name}").read_text().splitlines()
    told = dict(line.split("=", 1) for line in lines)
    assert lines.count(f"LIVESHIFT_JOB={job.name}") == 1, "it was run once"
    assert (told["LIVESHIFT_KIND"], told["LIVESHIFT_LOST_HOSTS"]) == ("rewind", lost)
    assert f"runs again from {told['LIVESHIFT_SNAPSHOT']}: " in rewound
    repeated = re.search(r"([0-9.]+) s of training are repeated", rewound)
    assert repeated is not None
    assert float(told["LIVESHIFT_REPEATED_S"]) == pytest.approx(float(repeated[1]), abs=0.06)
    assert "paused after collective" in told["LIVESHIFT_BOUNDARY"]
    assert f"for the rewind to {told['LIVESHIFT_SNAPSHOT']}, has ended with code 3" in event.text
    assert event.text.endswith(f": told of {told['LIVESHIFT_SNAPSHOT']}")


def assert_nothing_left(lab: LabSession, host: str, job: Job) -> None:
    """No sandbox, no network namespace, no process of the job is on the host."""
    inside = labs.entry(lab.lab.machine(host))
    script = "ip netns list; ls /var/lib/liveshift/capsules"

    def left() -> list[str]:
        said = subprocess.run([*inside, "sh", "-c", script], capture_output=True, text=True)
        return [line for line in said.stdout.split() if job.name in line]

    eventually(lambda: not left(), f"nothing of {job.name} to be left on {host}", 20)
    assert all(job.seen(rank).host != host for rank in range(2))


@pytest.mark.parametrize(
    ("rank", "seed"),
    [
        (1, 1),
        pytest.param(0, 2, marks=pytest.mark.long),  # rank 0 also dies in the next test
        pytest.param(1, 3, marks=pytest.mark.long),
        pytest.param(0, 4, marks=pytest.mark.long),
    ],
)
def test_a_job_goes_on_when_a_host_loses_power(
    lab: LabSession,
    job: Job,
    references: References,
    points: Held,
    place: Path,
    rank: int,
    seed: int,
) -> None:
    victim, survivor = job.seen(rank).host, job.seen(1 - rank).host
    # There is a snapshot, and no later one before the host dies: so steps are repeated.
    points.arm("snapshot.complete")
    points.wait("snapshot.complete")
    at = max(len(steps(job, each)) for each in range(2))
    job.wait_step(at + 3)
    time.sleep(random.Random(seed).uniform(0, EVERY_S))
    last = [eventually(partial(last_printed, job, each, at), "a later step") for each in range(2)]
    cut = time.time()
    labs.kill_host(lab.lab, victim)
    points.clear()
    before = len(steps(job, 0))
    (written,) = eventually(
        lambda: [e for e in events(job, "rewinding") if "goes back" in e.text], "the rewind", 30
    )
    (rewound,) = eventually(lambda: events(job, "rewound"), "the job to run again", 60)
    wait_steps(job, written.time, AFTER)
    went_on = max(steps_since(job, each, written.time)[0] for each in range(2))
    print(
        f"rank {rank} on {victim}, seed {seed}: {written.time - cut:.2f} s to the decision,"
        f" {went_on - cut:.2f} s to the first new step; {rewound.text}"
    )
    assert victim in written.text
    assert "training are repeated" in rewound.text
    now = [job.seen(each).host for each in range(2)]
    assert now[rank] not in (victim, survivor)
    assert now[1 - rank] == survivor, "it is restored in place"
    assert not [event.text for event in events(job, "rewinding") if "not back" in event.text]
    assert lab.host(victim).state == "lost"
    assert next(row for row in lab.status().jobs if row.name == job.name).state == "running"
    said = printed(job, rank, "--with-repeated")[2]
    assert "went on here from a snapshot" in said
    assert said.count(f" before it went back to a snapshot is gone: {victim} is not up]") == 1
    assert_told(job, place, victim, rewound.text)

    lab.boot(victim)
    assert_nothing_left(lab, victim, job)
    assert job.name not in " ".join(lab.host(victim).capsules)
    wait_past(job, before)
    for each in range(2):  # the host that came back has kept what it had
        assert_both_runs_are_shown(job, each, last[each])
    once, repeated, _ = printed(job, rank)
    assert (once, repeated) == (list(range(1, len(once) + 1)), []), "each line once"
    job.assert_begins_like_never_moved(references)
    kinds = [event.kind for event in lab.history(job.name)]
    assert kinds.count("rewound") == kinds.count("on_rewind") == 1, "it changed nothing"


@pytest.mark.long
def test_a_rewound_job_is_protected_again(
    lab: LabSession, job: Job, references: References
) -> None:
    """A second host dies, and so does the copy that the first rewind has made."""
    for count in (1, 2):
        victim, survivor = job.seen(0).host, job.seen(1).host
        labs.kill_host(lab.lab, victim)
        before = len(steps(job, 0))
        wait_rewound(job, count)
        wait_steps(job, time.time(), AFTER)
        assert job.seen(1).host == survivor, "it is restored in place"
        lab.boot(victim)
        wait_protected(job)
    wait_past(job, before)
    job.assert_begins_like_never_moved(references)


def test_who_is_only_silent_leads_to_no_rewind(lab: LabSession, job: Job) -> None:
    """An agent that is away, then a link to the orchestrator that is cut: of the host of rank 0 and
    of the other one."""
    lab.stop_agent("h1")
    time.sleep(2 * suspicion(lab))
    lab.start_agent("h1")
    job.go_on(AFTER)
    assert not events(job, "rewinding")
    for host in ("h0", "h1"):
        labs.separate(lab.lab, host, "ctl")
        try:
            time.sleep(2 * suspicion(lab))
            assert lab.host(host).state == "lost"
            job.go_on(AFTER)
        finally:
            labs.rejoin(lab.lab, host, "ctl")
        eventually(partial(_is_up, lab, host), f"{host} to be heard", 20)
        job.go_on(AFTER)
        assert not events(job, "rewinding")
    job.stop()


def _is_up(lab: LabSession, host: str) -> bool:
    return lab.host(host).state == "up"
