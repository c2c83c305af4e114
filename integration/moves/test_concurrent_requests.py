# SPDX-License-Identifier: Apache-2.0
"""What people, watchers and jobs do while a capsule is on its way: each has a defined outcome.

Migrations are held at a named point, so that "while" is exact. One job of two ranks lives through
what leaves it alive, and computes in the end what one that nobody touched computes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_matrix.held import Held, holding
from held_moves import held_at
from lab_session import CHAIN, LONG, LabSession, NewLab, eventually
from moving_job import AFTER, OVER, Job, Seen
from reference_runs import References
from whereabouts import where

from liveshift.criu_glue.capsule.sandboxes import PAGES
from liveshift.interposer.layout import WantedState
from liveshift.interposer.page import opened
from liveshift.launcher import lab as labs
from liveshift.launcher.client.client import Client
from liveshift.runtime.messages import MigrationRow, SignalJob

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180)]

EARLY, LATE = "orchestrator.precopied", "orchestrator.committed"
AT_EARLY = pytest.mark.parametrize("point", [EARLY, pytest.param(LATE, marks=pytest.mark.long)])
AT_LATE = pytest.mark.parametrize("point", [pytest.param(EARLY, marks=pytest.mark.long), LATE])
"""At the other point the same code decides, or the tests of the orchestrator show what it does."""


@pytest.fixture(scope="module")
def held(place: Path) -> Iterator[Held]:
    with holding(place / "faultpoints-concurrent") as made:
        yield made


@pytest.fixture(scope="module")
def lab(held: Held, new_lab: NewLab) -> LabSession:
    return new_lab("--hosts", "4", "--local", "/scratch")


@pytest.fixture(scope="module")
def long_job(lab: LabSession) -> Job:
    job = lab.start("long", LONG, nnodes=2)
    job.wait_step(5)
    return job


@pytest.fixture
def long(lab: LabSession, long_job: Job, held: Held) -> Iterator[Job]:
    """The job with rank 1 on h1 and nothing tainted; it trains before and after the test."""
    if long_job.seen(1).host != "h1":
        long_job.migrate(1, "h1")
    yield long_job
    held.clear()
    eventually(lambda: not lab.status().moving, "nothing to be under way", 30)
    for row in lab.status().hosts:
        if row.taint:
            lab.cli("untaint", "host", row.name)
    for rank in (0, 1):
        long_job.go_on(3, rank)


@pytest.fixture
def under_way(
    lab: LabSession, long: Job, held: Held, point: str
) -> Iterator[subprocess.Popen[bytes]]:
    """`liveshift migrate long/1 --to h2`, held at ``point``; released after the test."""
    held.arm(point)
    with lab.popen("migrate", "long/1", "--to", "h2", "-o", "json") as command:
        held.wait(point)
        yield command
        held.release(point)
        command.communicate(timeout=60)


def ended(job: Job) -> int:
    """How many migrations are over; the one under way may be in the history already."""
    return sum(row.state in OVER for row in job.migrations())


def over(lab: LabSession, job: Job, count: int) -> list[MigrationRow]:
    """The job's migrations, as its history has them, once ``count`` are over and none is under
    way."""

    def look() -> list[MigrationRow]:
        rows = job.migrations()
        whole = len(rows) >= count and all(row.state in OVER for row in rows)
        return rows if whole and not lab.status().moving else []

    return eventually(look, f"{count} migrations to be over, now {job.migrations()}", 60)


@AT_LATE
def test_its_source_is_tainted_the_move_is_the_evacuation(
    lab: LabSession, long: Job, held: Held, under_way: subprocess.Popen[bytes], point: str
) -> None:
    before = ended(long)
    lab.cli("taint", "host", "h1", "--reason", "ECC errors")
    held.release(point)
    rows = over(lab, long, before + 1)
    assert len(rows) == before + 1, "no second move"
    assert (rows[-1].state, long.seen(1).host) == ("done", "h2")


@pytest.mark.long
@AT_LATE
def test_its_destination_is_tainted_it_arrives_and_moves_on(
    lab: LabSession, long: Job, held: Held, under_way: subprocess.Popen[bytes], point: str
) -> None:
    before = ended(long)
    lab.cli("taint", "host", "h2", "--reason", "ECC errors")
    held.release(point)
    rows = over(lab, long, before + 2)
    assert [(row.source, row.destination, row.state) for row in rows[before:]] == [
        ("h1", "h2", "done"),
        ("h2", rows[-1].destination, "done"),
    ]
    assert long.seen(1).host == rows[-1].destination


@pytest.mark.long
@AT_LATE
def test_both_are_drained_it_ends_up_on_neither(
    lab: LabSession, long: Job, held: Held, under_way: subprocess.Popen[bytes], point: str
) -> None:
    before = ended(long)
    with (
        lab.popen("drain", "h1", "--reason", "one") as one,
        lab.popen("drain", "h2", "--reason", "two") as two,
    ):
        eventually(lambda: all(lab.host(h).taint for h in ("h1", "h2")), "both to be tainted")
        held.release(point)
        ends = [one.communicate(timeout=60), two.communicate(timeout=60)]
    assert (one.returncode, two.returncode) == (0, 0), ends
    over(lab, long, before + 1)
    assert long.seen(1).host == "h3"


@pytest.mark.long
@AT_EARLY
def test_two_taints_the_later_reason_counts_and_one_move_is_made(
    lab: LabSession, long: Job, held: Held, point: str
) -> None:
    before = ended(long)
    held.arm(point)
    lab.cli("taint", "host", "h1", "--reason", "first")
    held.wait(point)
    lab.cli("taint", "host", "h1", "--reason", "second")
    assert lab.host("h1").taint == "second"
    held.release(point)
    rows = over(lab, long, before + 1)
    assert len(rows) == before + 1
    assert rows[-1].state == "done"
    assert "first" in rows[-1].reason


@pytest.mark.long
@AT_EARLY
def test_untaint_lets_a_move_that_is_under_way_end_as_it_would(
    lab: LabSession, long: Job, held: Held, point: str
) -> None:
    before = ended(long)
    held.arm(point)
    lab.cli("taint", "host", "h1", "--reason", "a mistake")
    held.wait(point)
    lab.cli("untaint", "host", "h1")
    held.release(point)
    assert over(lab, long, before + 1)[-1].state == "done"
    assert long.seen(1).host != "h1"


@pytest.mark.long
@AT_EARLY
def test_a_second_migrate_of_it_is_refused(
    lab: LabSession, long: Job, held: Held, under_way: subprocess.Popen[bytes], point: str
) -> None:
    said = lab.refused("migrate", "long/1", "--to", "h3")
    assert "long/1 is moving already" in said
    held.release(point)
    under_way.wait(60)
    assert under_way.returncode == 0
    assert long.seen(1).host == "h2"


HEARS = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: print("heard", flush=True))
for step in range(10**6):
    print(step, flush=True)
    time.sleep(0.02)
"""
FROZEN = "source.dumped"


@pytest.mark.parametrize("point", [pytest.param(EARLY, marks=pytest.mark.long), FROZEN])
def test_a_signal_reaches_what_trains_at_once_and_what_is_frozen_where_it_comes_to_run(
    lab: LabSession, held: Held, long: Job, point: str
) -> None:
    job = lab.start(f"hears-{point.partition('.')[2]}", ("python", "-c", HEARS))
    eventually(lambda: job.output().count("\n") > 20, "the job to run")
    with held_at(held, point, job) as go_on, Client(lab.lab.socket) as client:
        client.request(SignalJob(job.name, signal.SIGUSR1))
        if point == EARLY:
            eventually(lambda: "heard" in job.output(), "the signal to be heard")
        assert (point == EARLY) == ("heard" in job.output())
        assert lab.status().moving, "the move is held still"
        code, said = go_on()
    assert code == 0, said
    eventually(lambda: "heard" in job.output(), "the signal to be heard")
    lab.cli("stop", job.name)
    assert job.output().count("heard") == 1
    lines = job.output().split()
    numbers = [int(line) for line in lines if line.isdigit()]
    assert numbers == list(range(len(numbers)))
    if point == FROZEN:
        assert job.migrations()[-1].state == "done"


ENDS = [
    (FROZEN, signal.SIGTERM),
    (EARLY, signal.SIGKILL),
    *(pytest.param(point, signal.SIGTERM, marks=pytest.mark.long) for point in (EARLY, LATE)),
    pytest.param(FROZEN, signal.SIGKILL, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("point", "signum"), ENDS)
def test_stop_ends_the_job_and_its_move(
    lab: LabSession, held: Held, long: Job, point: str, signum: signal.Signals
) -> None:
    """Before the commit both end at once, where the job is; after it the job ends where it comes
    to run."""
    job = lab.start(f"{signum.name[3:].lower()}-{point.partition('.')[2]}", CHAIN)
    job.wait_step(5)
    with held_at(held, point, job) as go_on:
        if signum == signal.SIGKILL:
            with Client(lab.lab.socket) as client:
                client.request(SignalJob(job.name, signum))
            if point == EARLY:
                assert job.wait_end(10) == 128 + signum
            go_on()
        elif point == EARLY:
            lab.cli("stop", job.name, timeout=10)
            assert not lab.status().moving
            go_on()
        else:
            with lab.popen("stop", job.name) as stopping:
                eventually(lambda: lab.status().jobs[-1].state == "ending", "the wish to be known")
                go_on()
                stopping.communicate(timeout=60)
    assert job.wait_end(30) == 128 + signum
    row = job.migrations()[-1]
    if point == LATE:
        assert row.state == "done"
    else:
        assert row.state in ("failed", "job ended"), "which of the two was over first"


@pytest.mark.parametrize(
    "point", [EARLY, pytest.param(FROZEN, marks=pytest.mark.long), "orchestrator.frozen"]
)
def test_a_move_is_cancelled_and_the_job_trains_on_where_it_is(
    lab: LabSession, held: Held, long: Job, point: str
) -> None:
    tasks = long.seen(1).tasks
    with held_at(held, point, long, "--to", "h2", capsule=1) as go_on:
        name = lab.status().moving[0].name
        with lab.popen("cancel", name) as cancelling:
            if point == FROZEN:  # its agent is held
                eventually(lambda: lab.status().moving[0].state == "rolling back", "the rollback")
                held.release(point)
            out, err = cancelling.communicate(timeout=30)
        assert out.decode() == f"{name} is cancelled: long/1 stays on h1\n", err
        code, said = go_on()
    assert code == (5 if point == EARLY else 1)
    assert "long/1 did not move h1 → h2: cancelled by root" in said
    assert long.seen(1) == Seen("h1", tasks, long.seen(1).users), "the very same processes"
    for rank in (0, 1):
        long.go_on(3, rank)
    assert "is over: failed" in lab.refused("cancel", name)
    long.migrate(1, "h2")


def test_a_committed_move_is_not_cancelled(lab: LabSession, held: Held, long: Job) -> None:
    with held_at(held, LATE, long, "--to", "h2", capsule=1) as go_on:
        name = lab.status().moving[0].name
        assert f"{name} is committed: too late to cancel it" in lab.refused("cancel", name)
        assert go_on()[0] == 0
    assert long.seen(1).host == "h2"


@pytest.mark.long
def test_a_rank_that_has_arrived_waits_for_one_that_is_still_frozen(
    lab: LabSession, held: Held, long: Job
) -> None:
    """They share a boundary, so the gates of the first one are not opened before the second one has
    arrived. They must not open by themselves either, after the lease of 10 s."""
    with held_at(held, "orchestrator.frozen", long, "--to", "h2", capsule=1) as go_on:
        lab.cli("migrate", "long/0", "--to", "h3")
        time.sleep(12)
        ((inner, pid),) = long.seen(0).tasks.items()
        with opened(Path(f"/proc/{pid}/root{PAGES}/{inner}")) as page:
            order, answer = page.order(), page.answer()
        assert (order["want"], order["lease_ms"]) == (WantedState.CLOSED, 10_000)
        assert answer["reopened"] != order["attempt"], "it has begun a collective alone"
        code, said = go_on()
    assert code == 0, said
    assert [row.state for row in long.migrations()[-2:]] == ["done", "done"]


@pytest.mark.long
def test_a_cancelled_evacuation_is_not_tried_again_by_itself(
    lab: LabSession, held: Held, long: Job
) -> None:
    held.arm(EARLY)
    lab.cli("taint", "host", "h1")
    held.wait(EARLY)
    count = ended(long)
    lab.cli("cancel", lab.status().moving[0].name)
    held.clear()
    long.go_on(20)
    assert ended(long) == count + 1
    assert lab.host("h1").taint == "by hand"
    lab.cli("drain", "h1", "--reason", "now it is time")
    assert long.seen(1).host != "h1"


@pytest.mark.parametrize(
    ("how", "point"),
    [
        ("crashes", EARLY),
        pytest.param("ends", "orchestrator.prepared", marks=pytest.mark.long),
        pytest.param("ends", EARLY, marks=pytest.mark.long),
        pytest.param("crashes", "orchestrator.prepared", marks=pytest.mark.long),
    ],
)
def test_a_job_that_ends_by_itself_while_it_is_about_to_move(
    lab: LabSession, long: Job, held: Held, point: str, how: str
) -> None:
    argv = ("sh", "-c", 'echo "$@" begins; exec "$@"', "sh", *CHAIN)
    job = lab.start(f"{how}-{point.partition('.')[2]}", argv)
    job.wait_step(5)
    held.arm(point)
    with lab.popen("migrate", f"{job.name}/0") as moving:
        held.wait(point)
        if how == "ends":
            (job.out / "enough").touch()
        else:
            for pid in job.seen(0).tasks.values():
                os.kill(pid, signal.SIGKILL)
        eventually(lambda: job.capsule(0).code is not None, "the command to end", 30)
        held.release(point)
        moving.communicate(timeout=60)
    assert moving.returncode != 0
    assert job.wait_end(30) == (0 if how == "ends" else 137)
    row = job.migrations()[-1]
    words = f"{job.name}/0 ended with code {job.code()} before it could move"
    assert (row.state, row.error) == ("job ended", f"{words} {row.source} → {row.destination}")
    assert moving.returncode == 5
    assert f"--enough {job.out}/enough begins" in job.output(), "its output stays readable"


def test_in_the_end_the_job_is_whole(long_job: Job, references: References) -> None:
    long_job.assert_begins_like_never_moved(references)


def test_a_destination_that_cannot_restore_passes_the_image_on(lab: LabSession, held: Held) -> None:
    """A file that the job has open goes bad on h2 only, after the preflight has looked."""
    for host in ("h0", "h1", "h2", "h3"):
        lab.own(host, Path("/scratch/data")).write_bytes(b"x" * 4096)
    code = "import sys, time; data = open('/scratch/data', 'rb'); data.read(1)\n"
    code += "for n in range(10**6): print(n, flush=True); time.sleep(0.02)"
    job = lab.start("reader", ("python", "-c", code))
    source = job.seen(0).host
    eventually(lambda: job.output().count("\n") > 20, "the job to read")
    spare = next(h for h in ("h1", "h2", "h3") if h != source and not lab.host(h).used)
    held.arm("orchestrator.precopied")
    with lab.popen("migrate", f"{job.name}/0", "--to", spare) as moving:
        held.wait("orchestrator.precopied")
        lab.own(spare, Path("/scratch/data")).write_bytes(b"shorter")
        held.release("orchestrator.precopied")
        _, err = moving.communicate(timeout=60)
    assert moving.returncode == 0, err
    row = job.migrations()[-1]
    assert row.state == "done"
    assert row.destination not in (source, spare)
    assert job.seen(0).host == row.destination
    assert "pass on" in [phase.name for phase in row.phases]
    lab.cli("stop", job.name)
    job.wait_end(30)
    numbers = [int(line) for line in job.output().splitlines() if line.isdigit()]
    assert numbers == list(range(len(numbers)))


def test_a_suspension_waits_for_the_move_that_is_under_way(
    lab: LabSession, held: Held, references: References
) -> None:
    job = lab.start("tired", LONG, nnodes=2)
    job.wait_step(5)
    with held_at(held, EARLY, job, capsule=1) as go_on:
        before = job.seen(1)
        with lab.popen("suspend", job.name, "-o", "json") as ordered:

            def waits() -> bool:
                said = [e.text for e in lab.history(job.name) if e.kind == "suspending"]
                return any("waits for the end of m" in text for text in said)

            eventually(waits, "the order to wait")
            job.go_on(3)
            assert go_on()[0] == 0, "the move came to its end"
            out, err = ordered.communicate(timeout=90)
    assert ordered.returncode == 0, err
    assert json.loads(out)["state"] == "suspended"
    (moved,) = job.migrations()
    assert (moved.state, moved.source) == ("done", before.host)
    assert not any(where(lab.lab, f"{job.name}/{index}") for index in range(2))
    lab.json("resume", job.name)
    job.go_on(AFTER)
    job.assert_begins_like_never_moved(references)


def test_nothing_is_left_of_any_move(lab: LabSession, long_job: Job) -> None:
    """An image's memory is given back beside the move that has ended, not before it ends."""
    for host in ("h0", "h1", "h2", "h3"):
        inside = labs.entry(lab.lab.machine(host))
        script = "ls /run/liveshift/images; nft list tables | grep lock; true"

        def empty(command: tuple[str, ...] = (*inside, "sh", "-c", script)) -> bool:
            return not subprocess.run(command, capture_output=True, text=True).stdout.split()

        eventually(empty, f"nothing left on {host}", timeout=10.0)
