# SPDX-License-Identifier: Apache-2.0
"""Moves of small jobs that do what ordinary programs do: many threads, files that others use too.

h0, h1   two slots each
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chain_job import assert_whole_chain
from lab_session import CHAIN, JOBS, LabSession, NewLab, command, environment, eventually
from moving_job import Job

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180)]

Start = Callable[..., Job]


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    return new_lab("--hosts", "2", "--slots", "2")


@pytest.fixture
def start(lab: LabSession) -> Iterator[Start]:
    """Starts a small job, which must be whole when the test is over."""
    started: list[Job] = []

    def begin(*words: str) -> Job:
        started.append(lab.start(f"chain{len(lab.jobs)}", (*CHAIN, *words)))
        started[-1].wait_step(3)
        return started[-1]

    yield begin
    for job in started:
        if job.code() is None:
            job.go_on(3)
            job.stop()
        assert_whole_chain(job)


def ended_children(job: Job) -> int:
    """How many children of its processes have ended and were not waited for."""
    children: list[str] = []
    for pid in job.seen(0).tasks.values():
        children += Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [Path(f"/proc/{child}/stat").read_text().split()[2] for child in children].count("Z")


def threads(job: Job) -> int:
    return sum(len(os.listdir(f"/proc/{pid}/task")) for pid in job.seen(0).tasks.values())


STANDS_S = 30
"""With 5,000 threads 20 s were seen, on two cores with ten times as much to do as they can."""


@pytest.mark.parametrize(
    "words",
    [
        ("--threads", "1500"),
        pytest.param(("--threads", *["180"] * 8), marks=pytest.mark.long),
        pytest.param(("--ids-from", "2000", "--threads", "13"), marks=pytest.mark.long),
        pytest.param(("--threads", "5000"), marks=pytest.mark.long),
    ],
    ids=["in one process", "in eight", "few, with high ids", "five thousand"],
)
def test_many_threads(start: Start, words: tuple[str, ...]) -> None:
    job = start(*words)
    before = threads(job)
    for _ in range(2):  # the ids that CRIU takes are free the next time, too
        assert job.migrate(0).frozen_s < STANDS_S
        assert threads(job) == before
        job.go_on(3)


def test_a_child_that_was_not_waited_for(lab: LabSession) -> None:
    """It has ended, and stays in the process table until its parent asks for its exit status."""
    job = lab.start("unwaited", ("sh", "-c", f"sleep 0.3 & exec {' '.join(CHAIN)}"))
    job.wait_step(3)
    eventually(lambda: ended_children(job) == 1, "the child's end")
    job.migrate(0)
    assert ended_children(job) == 1
    job.go_on(3)
    job.stop()


def test_a_shared_file_that_somebody_makes_longer(lab: LabSession, start: Start) -> None:
    path, stop = lab.place / "growing", threading.Event()
    path.write_bytes(b"first")

    def grow() -> None:
        with path.open("ab", buffering=0) as file:
            while not stop.wait(0.005):
                file.write(b"x" * 100)

    job = start("--follow", str(path))
    writer = threading.Thread(target=grow)
    writer.start()
    try:
        for _ in range(2):
            before = path.stat().st_size
            job.migrate(0)
            assert path.stat().st_size > before
            job.go_on(3)
    finally:
        stop.set()
        writer.join()
    job.go_on(2)
    assert job.steps()[-1]["read"] == path.stat().st_size, "all of it was read, and nothing twice"


@pytest.mark.needs("mpirun")
def test_mpirun_and_its_ranks(lab: LabSession) -> None:
    """All in one capsule: they talk by shared memory, and mpirun gives each rank a terminal."""
    run = ("mpirun", "-n", "2", "--allow-run-as-root", "--oversubscribe")
    words = ("--out", "{out}", "--enough", "{out}/enough")
    job = lab.start("mpi", (*run, "python", str(JOBS / "mpi.py"), *words))
    for rank in (0, 1):
        job.wait_step(3, rank)
    for _ in range(2):
        job.migrate(0)
        for rank in (0, 1):
            job.go_on(5, rank)
    job.stop()
    for rank in (0, 1):
        steps = job.steps(rank)
        assert [(s["step"], s["sum"], s["ranks"]) for s in steps] == [
            (number, 3 * number, 2) for number in range(1, len(steps) + 1)
        ]
        final = json.loads((job.out / f"final{rank}.json").read_text())
        assert final == {"steps": len(steps)}, "it came to its end, with the other one"


def locked(path: Path) -> bool:
    with path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_lock_that_no_other_host_can_take_over(lab: LabSession, start: Start) -> None:
    path = lab.place / "locked"
    path.touch()
    job = start("--lock", "flock", "ex", str(path))
    for more in ((), ("--dry-run",)):
        said = lab.refused("migrate", f"{job.name}/0", *more)
        assert f"holds an exclusive flock(2) lock on {path}, which no other host can" in said
        assert "hint: let the program release it for a moment" in said
    assert locked(path)


def test_locks_that_it_shares_go_along(lab: LabSession, start: Start) -> None:
    path = lab.place / "read-locked"
    path.touch()
    job = start("--lock", "flock", "sh", str(path))
    row = job.migrate(0)
    assert row.frozen_s < 5
    assert locked(path)
    job.migrate(0)
    job.stop()
    assert not locked(path)


@pytest.mark.long
def test_a_lock_that_comes_and_goes(lab: LabSession, start: Start) -> None:
    """It moves at a moment without; at another one it is back at its source, and has the lock."""
    path = lab.place / "now-and-then"
    path.touch()
    job, failed, moved = start("--lock", "flock", "ex", str(path), "--lock-for", "0.6"), 0, 0
    for _ in range(40):
        lab.cli("migrate", f"{job.name}/0", "--dry-run")
        done = subprocess.run(
            command("migrate", f"{job.name}/0"),
            env=environment(LIVESHIFT_LAB=lab.name),
            capture_output=True,
            text=True,
            timeout=60,
            cwd=lab.place,
        )
        job.go_on(2)
        if done.returncode == 0:
            moved += 1
            assert job.migrations()[-1].state == "done"
            if failed:
                break
            continue
        failed += 1
        assert "at that moment process 1001 (python) holds an exclusive flock(2)" in " ".join(
            done.stderr.split()
        )
        if moved:
            break
    assert moved, "there was no moment without it"
    assert failed, "the lock was never in the way"


@pytest.mark.long
def test_ten_thousand_shared_mappings(start: Start) -> None:
    """Their 20,000 image files cross the wire together."""
    row = start("--mappings", "10000").migrate(0)
    (verify,) = [phase.detail for phase in row.phases if phase.name == "verify"]
    assert int(verify.split(" streams")[0]) < 100
    assert row.predicted is not None
    assert row.frozen_s < 20, "it stood for 25 s when each file crossed by itself"
    assert row.frozen_s / 3 < row.predicted.seconds < row.frozen_s * 3
