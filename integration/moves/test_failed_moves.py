# SPDX-License-Identifier: Apache-2.0
"""A move that fails on its way, frozen or even committed, leaves the job training at its source.

One DDP job lives through all of it: after every failure it goes on where it was, nothing of the
attempt is left at the destination, the next move works, and in the end every loss is that of a run
that nobody disturbed.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from lab_session import LONG, LabSession, NewLab, eventually
from moving_job import Job
from reference_runs import References

from liveshift.launcher import lab as labs
from liveshift.launcher.client.client import Client
from liveshift.runtime.messages import GetMigration, MigrationDetails, MigrationRow

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180)]

SOURCE, DESTINATION = "h1", "h2"
SLOW = "300mbit"
"""So that a dump takes some seconds, in which a test can do harm."""

_failed: list[str] = []
"""Moves that tests have seen fail."""


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    # All of the memory goes while the job stands: then there is time to do harm.
    return new_lab("--hosts", "3", "--precopy", "enabled=false")


@pytest.fixture(scope="module")
def long_job(lab: LabSession) -> Job:
    job = lab.start("long", LONG, nnodes=2)
    job.wait_step(5)
    return job


@pytest.fixture
def long(lab: LabSession, long_job: Job) -> Iterator[Job]:
    """The job, which survives what the test does; afterwards a move there and back works."""
    tasks = long_job.seen(1).tasks
    yield long_job
    seen = long_job.seen(1)
    assert (seen.host, seen.tasks) == (SOURCE, tasks), "the very same processes, where they were"
    for rank in (0, 1):
        long_job.go_on(3, rank)
    assert_nothing_of_a_move(lab, DESTINATION)
    for to in (DESTINATION, SOURCE):
        long_job.migrate(1, to)
        long_job.go_on(2)
    assert_nothing_of_a_move(lab, DESTINATION)


def assert_nothing_of_a_move(lab: LabSession, host: str) -> None:
    """No sandbox, no network, no image: nothing of a capsule that is not there (any more)."""
    inside = labs.entry(lab.lab.machine(host))

    def left() -> list[str]:
        script = "ip netns list; ip -o link | grep -o 'lsv[^:@]*'; cd /run/liveshift; ls images"
        script += "; cd /var/lib/liveshift; ls capsules; nft list tables | grep lock; true"
        said = subprocess.run([*inside, "sh", "-c", script], capture_output=True, text=True)
        return said.stdout.split()

    eventually(lambda: not left(), f"{host} to be empty, but for {left()}", 20)


def on_its_way(lab: LabSession, state: str) -> MigrationRow | None:
    """The migration under way, once it has come to ``state`` and bytes flow."""
    for row in lab.status().moving:
        with Client(lab.lab.socket) as client:
            now = client.get(MigrationDetails, GetMigration(row.name)).row
        if now.state == state and now.bytes > 4 << 20:
            return now
    return None


@contextmanager
def slow_link(lab: LabSession) -> Iterator[None]:
    lab.cli("lab", "link", DESTINATION, "--rate", SLOW)
    try:
        yield
    finally:
        lab.cli("lab", "link", DESTINATION, "--rate", "none", "--mend")


def fails(
    lab: LabSession, job: Job, harm: Callable[[], object] | None = None, code: int = 1
) -> str:
    """Move rank 1, do ``harm`` while its image flows, and see the move fail; what it said.
    ``code`` 5: before anything was stopped."""
    with lab.popen("migrate", "long/1", "--to", DESTINATION) as moving:
        try:
            if harm is not None:
                eventually(lambda: on_its_way(lab, "freezing"), "the image to flow", 20)
                harm()
            out, err = moving.communicate(timeout=60)
        finally:
            moving.kill()
    said = " ".join(err.decode().split())
    assert (moving.returncode, out) == (code, b""), said
    row = job.migrations()[-1]
    assert row.state == "failed"
    assert row.error
    assert " ".join(row.error.split()) in said
    _failed.append(row.name)
    return said


def test_no_room_for_the_image(lab: LabSession, long: Job) -> None:
    """Where there is none before, nothing is stopped; where it is taken while the image flows, the
    move is rolled back."""
    with lab.images_full(DESTINATION):
        said = fails(lab, long, code=5)
    assert "the memory file system for images, /run/liveshift/images of h2, is too full" in said
    assert not any(phase.frozen for phase in long.migrations()[-1].phases)
    with slow_link(lab), ExitStack() as stack:
        said = fails(lab, long, lambda: stack.enter_context(lab.images_full(DESTINATION)))
    assert "No space left on device" in said


@pytest.mark.long
def test_link_cut_while_frozen(lab: LabSession, long: Job) -> None:
    with slow_link(lab):
        said = fails(lab, long, lambda: lab.cli("lab", "link", DESTINATION, "--cut"))
        assert "h2 has taken no image bytes" in said
        long.go_on(3)
    eventually(lambda: lab.host(DESTINATION).state == "up", "h2 to be up again", 20)


@pytest.mark.long
def test_destination_agent_killed_while_frozen(lab: LabSession, long: Job) -> None:
    with slow_link(lab):
        fails(lab, long, lambda: lab.stop_agent(DESTINATION))
        long.go_on(3)
    lab.start_agent(DESTINATION)


@pytest.mark.long
def test_destination_agent_restarted_while_frozen(lab: LabSession, long: Job) -> None:
    def restart() -> None:
        lab.stop_agent(DESTINATION)
        lab.start_agent(DESTINATION)

    with slow_link(lab):
        fails(lab, long, restart)


def test_restore_fails_after_the_commit(lab: LabSession, long: Job) -> None:
    """Each attempt to restore has an epoch of its own, and so has the return."""
    inside = labs.entry(lab.lab.machine(DESTINATION))
    epoch = long.capsule(1).epoch
    # Those of pages at least; the small ones come in one stream, last.
    spoil = [*inside, "sh", "-c", "rm -v /run/liveshift/images/*/*.img >&2"]
    with slow_link(lab):
        said = fails(lab, long, lambda: subprocess.run(spoil, check=True))
    assert "restore: CRIU could not restore long-1" in said
    assert long.capsule(1).epoch == epoch + 4


def test_the_command_killed_the_move_goes_on(lab: LabSession, long_job: Job) -> None:
    with slow_link(lab), lab.popen("migrate", "long/1", "--to", DESTINATION) as moving:
        eventually(lambda: on_its_way(lab, "freezing"), "the image to flow", 20)
        moving.kill()
    eventually(lambda: not lab.status().moving, "the move to end", 60)
    assert long_job.migrations()[-1].state == "done"
    assert long_job.seen(1).host == DESTINATION
    long_job.migrate(1, to=SOURCE)


def test_in_the_end_the_job_is_whole(long_job: Job, references: References) -> None:
    failed = [row.name for row in long_job.migrations() if row.state == "failed"]
    assert failed == _failed != []
    long_job.assert_begins_like_never_moved(references)
