# SPDX-License-Identifier: Apache-2.0
"""With precopy.post_copy a rank goes on before all of its memory is there, and comes to have it."""

from __future__ import annotations

import json
import subprocess

import pytest
from lab_session import JOBS, LabSession, NewLab, eventually
from reference_runs import References

from liveshift.launcher import lab as labs

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180)]

COLD = 128 << 20


def images(lab: LabSession) -> str:
    """Those that the lab's hosts hold."""
    find = ("find", "/run/liveshift/images", "-mindepth", "1", "-maxdepth", "1")
    said = [
        subprocess.run([*labs.entry(lab.lab.machine(host)), *find], capture_output=True, text=True)
        for host in lab.lab.hosts
    ]
    return "".join(each.stdout for each in said)


def test_it_has_all_of_it_in_the_end(new_lab: NewLab, references: References) -> None:
    lab = new_lab("--hosts", "3", "--precopy", "slow_down=0.9,post_copy=true,way=rounds")
    words = ("python", str(JOBS / "cold.py"), "--out", "{out}", "--cold", str(COLD))
    job = lab.start("later", (*words, "--steps", "900", "--pace", "0.05"), nnodes=2)
    job.wait_step(20)
    for _ in range(2):
        row = job.migrate(1)
        restore = next(phase for phase in row.phases if phase.name == "restore")
        assert "not all of its memory yet (precopy.post_copy)" in restore.detail
        assert images(lab), "from them it is filled"
    eventually(lambda: not images(lab), "the images to be let go", 30)
    job.assert_same_as_never_moved(references, 2)
    reference = references.directory(job.argv, 2)
    for rank in (0, 1):
        found, untouched = (json.loads((out / f"final{rank}.json").read_text())["cold"]
                            for out in (job.out, reference))  # fmt: skip
        assert found == untouched
