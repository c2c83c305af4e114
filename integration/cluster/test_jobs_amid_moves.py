# SPDX-License-Identifier: Apache-2.0
"""What happens in and around a job at the very moment when one of its capsules moves: a signal for
all ranks comes while one is frozen, and a connection is opened that the survey has not seen."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_matrix.held import Held, holding
from held_moves import held_at
from lab_session import LabSession, NewLab, eventually
from outside_server import PORT, outside_server

from liveshift.launcher.client.client import Client
from liveshift.runtime.messages import SignalJob

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180)]

FROZEN = "source.dumped"


@pytest.fixture(scope="module")
def held(place: Path) -> Iterator[Held]:
    with holding(place / "faultpoints-amid-moves") as made:
        yield made


@pytest.fixture(scope="module")
def free_lab(held: Held, new_lab: NewLab) -> LabSession:
    """Another one, with a spare for a job of two. A signal waits as long as ``grace`` for a capsule
    that is frozen."""
    return new_lab("--hosts", "3", "--timeouts", "grace=60")


HEARS_WHEN = """
import os, signal, sys, time
rank = os.environ["RANK"]
def hear(*_):
    with open(f"{sys.argv[1]}/heard{rank}", "x") as file: file.write(str(time.time()))
signal.signal(signal.SIGUSR1, hear)
open(f"{sys.argv[1]}/ready{rank}", "x").close()
while True: time.sleep(0.02)
"""


@pytest.mark.parametrize("frozen", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_signal_reaches_all_ranks_together(free_lab: LabSession, held: Held, frozen: int) -> None:
    """The rank that trains on does not hear it before the frozen one can."""
    lab, place = free_lab, free_lab.place / f"heard-{frozen}"
    place.mkdir()
    job = lab.start(f"all-{frozen}", ("python", "-c", HEARS_WHEN, str(place)), nnodes=2)
    eventually(lambda: len(list(place.glob("ready*"))) == 2, "both ranks to run")
    with held_at(held, FROZEN, job, capsule=frozen) as go_on, Client(lab.lab.socket) as client:
        client.request(SignalJob(job.name, signal.SIGUSR1))  # it waits for a few seconds
        assert lab.status().moving, "the move is held still"
        assert not list(place.glob("heard*")), "one of them cannot take it yet"
        released = time.time()
        code, said = go_on()
    assert code == 0, said
    eventually(lambda: len(list(place.glob("heard*"))) == 2, "both to hear it")
    times = [float((place / f"heard{rank}").read_text()) for rank in (0, 1)]
    assert min(times) > released, "the other one did not hear it before"
    assert job.migrations()[-1].state == "done"
    lab.cli("stop", job.name)


REACHES = f"""
import os, socket, sys, time
PORT = {PORT}
print("runs", flush=True)
while not os.path.exists(sys.argv[2]): time.sleep(0.02)
held = socket.create_connection((sys.argv[1], PORT))
while True: time.sleep(0.1)
"""


@pytest.mark.long
def test_a_connection_that_is_opened_after_the_survey_is_told(
    free_lab: LabSession, held: Held
) -> None:
    go = free_lab.place / "reach"
    with outside_server(free_lab) as (address, met):
        job = free_lab.start("late", (sys.executable, "-c", REACHES, address, str(go)))
        eventually(lambda: "runs" in job.output(), "the job to run")
        with held_at(held, "orchestrator.prepared", job) as go_on:
            go.touch()
            met()
            code, said = go_on()
        assert code == 0, said
        (warning,) = (e.text for e in free_lab.history(job.name) if "breaks" in e.text)
        assert warning.startswith(
            f"breaks a new connection to outside the cluster: {address}:{PORT}, of process"
        )
        free_lab.cli("stop", job.name)
