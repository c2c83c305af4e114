# SPDX-License-Identifier: Apache-2.0
"""A capsule that comes back to a host where its memory was kept brings only what has changed."""

from __future__ import annotations

import json
import re

import psutil
import pytest
from lab_session import LabSession, NewLab, eventually
from reference_runs import References
from test_precopy import COLD, STEPS, command, phase

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    return new_lab("--hosts", "3", "--precopy", "keep=1GiB")


def copies(lab: LabSession) -> int:
    """Bytes resident in what holds them, on all hosts of the lab."""
    daemons = {machine.daemon.pid for machine in lab.lab.machines if machine.daemon is not None}
    return sum(
        process.info["memory_info"].rss
        for process in psutil.process_iter(["name", "ppid", "memory_info"])
        if process.info["name"] == "earlier-copy" and process.info["ppid"] in daemons
    )


def test_the_way_back_is_short(lab: LabSession, references: References) -> None:
    job = lab.start("back", command(STEPS), nnodes=2)
    job.wait_step(20)
    home = job.seen(1).host
    away = job.migrate(1)
    assert (phase(away, "pre-copy").bytes or 0) > COLD
    eventually(lambda: copies(lab) > COLD, "its memory to be kept at home", 10)
    job.go_on(10)
    back = job.migrate(1, to=home)
    ahead = phase(back, "pre-copy")
    named = re.search(r"(\d+) MB only named", ahead.detail)
    assert named is not None, ahead
    assert int(named[1]) > 0.9 * COLD / 1e6, ahead
    assert (ahead.bytes or 0) + back.image_bytes < COLD / 2, back
    assert (phase(back, "restore").bytes or 0) > COLD, "and yet all of it was put in place"
    eventually(
        lambda: COLD < copies(lab) < 2 * COLD, "only the copy where it came from to be kept", 20
    )
    job.assert_same_as_never_moved(references, 2)
    reference = references.directory(job.argv, 2)
    for rank in (0, 1):
        found = json.loads((job.out / f"final{rank}.json").read_text())["cold"]
        assert found == json.loads((reference / f"final{rank}.json").read_text())["cold"]
    eventually(lambda: copies(lab) == 0, "nothing to be kept of a job that has ended", 20)
