# SPDX-License-Identifier: Apache-2.0
"""A host of a job and the only holder of its image lose their power at once, so no memory has that
image any more. A snapshot in a directory is offered then."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab_session import LONG, NewLab, eventually
from moving_job import AFTER
from protected_job import events, wait_protected
from reference_runs import References

from liveshift.launcher import lab as labs

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]


@pytest.mark.long
def test_the_job_ends_in_words_and_goes_on_from_a_directory(
    new_lab: NewLab, place: Path, references: References
) -> None:
    lab = new_lab("--hosts", "3", "--snapshots", "every=2", "--timeouts", "suspicion=1")
    (kept := place / "kept-twice").mkdir()
    job = lab.start("twice", LONG, nnodes=2)
    job.wait_step(10)
    lab.json("snapshot", job.name, "--to", str(kept))
    wait_protected(job)
    owner, holder = job.seen(1).host, "h2"
    assert job.protection().holders == [holder]
    labs.kill_host(lab.lab, owner)
    labs.kill_host(lab.lab, holder)

    def offers() -> bool:
        return any(str(kept) in event.text for event in events(job, "rewinding"))

    eventually(offers, "the job to say that it waits, and where it was saved", 60)
    for host in (holder, owner):
        lab.boot(host)
    assert job.wait_end(60) == 137
    assert str(kept) in lab.history(job.name)[-1].text
    lab.json("resume", job.name, "--from", str(kept))
    job.go_on(AFTER)
    job.assert_begins_like_never_moved(references)
    job.stop()
