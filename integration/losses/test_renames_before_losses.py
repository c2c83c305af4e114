# SPDX-License-Identifier: Apache-2.0
"""A snapshot falls into the writing of a checkpoint on a shared path, which is renamed later. The
job goes back, and writes the same checkpoint to its end."""

from __future__ import annotations

import pytest
from lab_session import NewLab, eventually
from protected_job import events, wait_protected

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180)]

LINES = 200  # of a checkpoint
PROGRAM = f"""\
import os, sys, time

def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.02)

os.chdir(sys.argv[1])
for number in range(1, int(sys.argv[2]) + 1):
    with open("checkpoint.tmp", "w") as file:
        for line in range({LINES}):
            if line == {LINES // 2}:
                file.flush()
                wait_for("go-%d" % number)
            file.write("%d %d\\n" % (number, line))
    os.replace("checkpoint.tmp", "checkpoint-%d" % number)
wait_for("end")
"""
"""This program writes each checkpoint under another name, and renames it when it is complete, as
many programs do. Half-way, and at the end, it waits for a file that lets it go on."""


def lines(number: int, count: int = LINES) -> str:
    return "".join(f"{number} {line}\n" for line in range(count))


@pytest.mark.parametrize("next_begun", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_checkpoint_that_was_renamed_since_is_written_again(
    new_lab: NewLab, next_begun: bool
) -> None:
    """``next_begun``: the next checkpoint has the name by then."""
    lab = new_lab("--hosts", "2", "--snapshots", "every=15")
    last = 3 if next_begun else 2
    job = lab.start("renaming", ("python", "-c", PROGRAM, "{out}", str(last)))
    tmp = job.out / "checkpoint.tmp"

    def halfway(number: int) -> None:
        half = lines(number, LINES // 2)
        eventually(lambda: tmp.exists() and tmp.read_text() == half, f"half of {number}")

    halfway(1)
    (job.out / "go-1").touch()
    halfway(2)
    wait_protected(job)
    wait_protected(job)  # this one has begun since
    (job.out / "go-2").touch()
    if next_begun:
        halfway(3)
    else:
        eventually((job.out / "checkpoint-2").exists, "it to be complete")
    lab.cli("rewind", "renaming", "--yes")
    for name in ("go-3", "end"):
        (job.out / name).touch()
    assert job.wait_end(30) == 0
    assert len(events(job, "rewound")) == 1
    text = "checkpoint.tmp (made again from checkpoint-2"
    assert any(text in event.text for event in lab.history("renaming"))
    found = {path.name: path.read_text() for path in job.out.glob("checkpoint*")}
    kept = {"checkpoint.tmp.before-rewind-1": lines(3, LINES // 2)} if next_begun else {}
    assert found == {f"checkpoint-{n}": lines(n) for n in range(1, last + 1)} | kept
