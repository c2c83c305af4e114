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

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240), pytest.mark.alone]


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    return new_lab("--hosts", "3", "--precopy", "keep=1GiB,way=rounds")


def copies(lab: LabSession) -> dict[str, int]:
    """Bytes resident in each process that holds one, by the host of the lab."""
    agents = {m.daemon.pid: m.name for m in lab.lab.machines if m.daemon is not None}
    return {
        agents[process.info["ppid"]]: process.info["memory_info"].rss
        for process in psutil.process_iter(["name", "ppid", "memory_info"])
        if process.info["name"] == "earlier-copy" and process.info["ppid"] in agents
    }


def test_the_way_back_is_short(lab: LabSession, references: References) -> None:
    job = lab.start("back", command(2 * STEPS), nnodes=2)  # two moves long, whatever else runs
    job.wait_step(20)
    home = job.seen(1).host
    away = job.migrate(1)
    assert (phase(away, "pre-copy").bytes or 0) > COLD
    eventually(lambda: copies(lab).keys() == {home}, "its memory to be kept at home", 10)
    assert copies(lab)[home] > COLD
    job.go_on(10)
    back = job.migrate(1, to=home)
    ahead = phase(back, "pre-copy")
    named = re.search(r"([0-9.]+) MB only named", ahead.detail)
    assert named is not None, ahead
    assert float(named[1]) > 0.9 * COLD / 1e6, ahead
    assert (ahead.bytes or 0) + back.image_bytes < COLD / 2, back
    assert (phase(back, "restore").bytes or 0) > COLD, "and yet all of it was put in place"
    eventually(
        lambda: copies(lab).keys() == {away.destination}, "it to be kept where it was last", 20
    )
    job.assert_same_as_never_moved(references, 2)
    reference = references.directory(job.argv, 2)
    for rank in (0, 1):
        found = json.loads((job.out / f"final{rank}.json").read_text())["cold"]
        assert found == json.loads((reference / f"final{rank}.json").read_text())["cold"]
    eventually(lambda: not copies(lab), "nothing to be kept of a job that has ended", 20)
