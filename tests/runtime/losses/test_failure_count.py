# SPDX-License-Identifier: Apache-2.0
"""What the orchestrator sees of the failures of its hosts: their hours, and what is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from snapshot_stage import a_job

from liveshift.errors import LiveshiftError
from liveshift.runtime.journal.journal import Journal
from liveshift.runtime.losses import failure_count
from liveshift.runtime.losses.failure_count import FailureCount
from liveshift.runtime.model.failures import FailuresSeen
from liveshift.runtime.model.jobs import Job
from liveshift.runtime.model.snapshots import Generation

HOUR = 3600.0


class Scene:
    """A protected job on three hosts, and a clock that a test sets."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.journal = Journal(path / "journal.sqlite")
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.job = a_job()
        owners = {c.name: (c.host, c.epoch) for c in self.job.capsules.values()}
        self.job.newest = Generation(17, "gpt", "", 0.0, 0, owners, {})
        self.jobs: list[Job] = [self.job]
        self.up = {"h0", "h1", "h2", "h3"}
        self.begin()

    def begin(self) -> None:
        """An orchestrator begins."""
        table = self.journal.failures
        self.count = FailureCount(table, lambda: self.jobs, lambda host: host in self.up)

    def looks(self, hours: float) -> FailuresSeen:
        self.now += hours * HOUR
        self.count.add_time()
        return self.count.seen


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(tmp_path, monkeypatch)
    yield made
    made.journal.file.close()


def test_the_hours_of_hosts_that_run_a_protected_job_count(scene: Scene) -> None:
    assert scene.looks(0.5).hours == pytest.approx(1.5)
    scene.jobs.append(scene.job)  # a second job on the same hosts
    assert scene.looks(0.5).hours == pytest.approx(3.0)
    scene.up.remove("h1")
    assert scene.looks(0.5).hours == pytest.approx(4.0)


@pytest.mark.parametrize("change", ["unprotected", "suspended", "none"])
def test_hours_without_a_protected_job_do_not_count(scene: Scene, change: str) -> None:
    """What dies then leads to no rewind, and is not seen either."""
    if change == "unprotected":
        scene.job.newest = None
    elif change == "suspended":
        scene.job.state = "suspended"
    else:
        scene.jobs.clear()
    assert scene.looks(5.0) == FailuresSeen()
    assert scene.journal.failures.seen() == FailuresSeen()


def test_losses_of_one_host_within_minutes_are_one_fault(scene: Scene) -> None:
    """Each job that ran there has lost it; and its ranks may die before it does."""
    scene.count.lost({"h1"})
    scene.count.lost({"h1", "h2"})
    scene.count.lost(())
    assert scene.count.seen.losses == 2
    scene.now += failure_count.ONE_FAULT_S
    scene.count.lost({"h1"})
    assert scene.count.seen.losses == 3


def test_what_was_seen_outlives_the_orchestrator(scene: Scene) -> None:
    scene.count.lost({"h1"})
    assert scene.journal.failures.seen().losses == 1, "at once"
    scene.looks(0.1)
    assert scene.journal.failures.seen().hours == 0, "the disk has rest"
    scene.looks(0.1)
    scene.begin()
    assert scene.count.seen.losses == 1
    assert scene.count.seen.hours == pytest.approx(0.6)
    scene.looks(1.0)
    assert scene.count.seen.hours == pytest.approx(3.6), "not since the boot of the machine"


def test_a_journal_that_cannot_be_written_loses_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: FailuresSeen) -> None:
        raise LiveshiftError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(scene.journal.failures, "write", full)
        scene.count.lost({"h1"})
    scene.looks(1.0)
    assert scene.journal.failures.seen() == scene.count.seen
    assert scene.count.seen.losses == 1
