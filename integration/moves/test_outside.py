# SPDX-License-Identifier: Apache-2.0
"""Hosts outside the cluster, with ``[network] outside = "relay"``: they see nothing of a move. A
rewind closes connections to them, since they have gone on; so does a resumption, as they may have
given up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lab_session import CHAIN, JOBS, NewLab
from protected_job import events, wait_protected

from liveshift.launcher import lab as labs
from liveshift.runtime.config.cluster import load

pytestmark = pytest.mark.lab


def test_a_connection_to_outside_the_cluster_outlasts_moves(new_lab: NewLab, place: Path) -> None:
    """The orchestrator's machine is no host of the lab's cluster, so it lies outside. The capsule
    moves between two hosts that do not relay, then to the one that does."""
    session = new_lab("--hosts", "3", "--network", "outside=relay,relay=h2")
    outside, report = session.lab.machine("ctl"), place / "relayed-server.json"
    serve = [sys.executable, str(JOBS / "counting_server.py"), outside.address, "7070", str(report)]
    with subprocess.Popen(
        [*labs.entry(outside), *serve], stdout=subprocess.PIPE
    ) as server:  # it ends with the connection
        assert server.stdout is not None
        assert server.stdout.readline() == b"listening\n"
        job = session.start("talking", (*CHAIN, "--talk", f"{outside.address}:7070"))
        job.wait_step(5)
        assert job.capsule(0).host == "h0"
        plan = session.json("migrate", "talking/0", "--to", "h1", "--dry-run")
        assert "breaks" not in json.dumps(plan["checks"])
        for host in ("h1", "h2"):
            before = job.seen(0)
            job.assert_moved(before, job.migrate(0, to=host))
            job.go_on(20)
        job.stop()
        assert job.wait_end() == 0
    talked = json.loads(report.read_text())
    assert talked["problem"] == "none"
    assert talked["blocks"] == len(job.steps()) > 40
    assert talked["peer"] == load(session.lab.config).host("h2").address
    assert not any("breaks" in event.text for event in session.history("talking"))


@pytest.mark.machine("SOCK_DESTROY")
@pytest.mark.parametrize("way", ["rewind", pytest.param("resume", marks=pytest.mark.long)])
def test_a_connection_to_outside_the_cluster_is_closed_in_a_rewind(
    new_lab: NewLab, place: Path, way: str
) -> None:
    """The program has sent blocks since the snapshot, and would wait for their answers for ever.
    While a job is suspended, the server may give the connection up, and nobody tells it."""
    network = ("--network", "outside=relay,relay=h2")
    session = new_lab("--hosts", "3", *network, "--snapshots", "every=2")
    outside, report = session.lab.machine("ctl"), place / "rewound-server.json"
    serve = [sys.executable, str(JOBS / "counting_server.py"), outside.address, "7070", str(report)]
    server = subprocess.Popen([*labs.entry(outside), *serve], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"listening\n"
        job = session.start("talking", (*CHAIN, "--talk", f"{outside.address}:7070"))
        job.wait_step(5)
        wait_protected(job)
        job.go_on(10)
        if way == "rewind":
            session.cli("rewind", "talking", "--yes")
        else:
            session.cli("suspend", "talking")
            session.cli("resume", "talking")
        assert job.wait_end(30) == 1
    finally:  # the server is told nothing of the end of its connection; it ends with the lab
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()
    assert len(events(job, "rewound" if way == "rewind" else "resumed")) == 1
    assert "ConnectionAbortedError" in job.output()
