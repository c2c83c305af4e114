# SPDX-License-Identifier: Apache-2.0
"""A command ends before its peer has read what it has sent; the peer gets it all, as without
liveshift."""

from __future__ import annotations

import subprocess

import pytest
from lab_session import LabSession, NewLab, eventually

from liveshift.launcher import lab as labs

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180)]

SENT = 2_000_000
PROGRAM = f"""\
import os, socket, sys, time
if os.environ["RANK"] == "0":
    connection = socket.create_server(("", 7171)).accept()[0]
    connection.sendall(bytes({SENT}))
    os._exit(0)
while True:
    try:
        connection = socket.create_connection((os.environ["MASTER_ADDR"], 7171))
        break
    except OSError:
        time.sleep(0.05)
connection.settimeout(20)
time.sleep(1)
got = 0
while chunk := connection.recv(1 << 14):
    got += len(chunk)
    if not os.path.exists(sys.argv[1]):
        time.sleep(0.2)
print("got", got, flush=True)
"""
"""Rank 0 sends more than a connection holds, and ends as soon as the kernel has taken it. Rank 1
takes 24 s to read it. It reads at full speed as soon as the file exists that its argument names."""


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    return new_lab("--hosts", "3")


@pytest.mark.parametrize("moved", [False, True])
def test_a_slow_reader_gets_all_that_was_sent(lab: LabSession, moved: bool) -> None:
    """Also if it moves meanwhile."""
    name = f"tail{moved:d}"
    hurry = lab.place / f"{lab.name}-{name}-hurry"
    job = lab.start(name, ("python", "-c", PROGRAM, str(hurry)), nnodes=2)
    sender = job.capsule(0).host
    eventually(lambda: job.capsule(0).code == 0, "rank 0 to end", 30)
    if moved:
        lab.cli("migrate", f"{name}/1")
    hurry.touch()
    assert job.wait_end(60) == 0
    assert f"got {SENT}\n" in job.output()
    eventually(lambda: not _networks(lab, sender, name), "its network to be removed", 30)


def _networks(lab: LabSession, host: str, job: str) -> list[str]:
    inside = labs.entry(lab.lab.machine(host))
    words = [*inside, "ip", "netns", "list"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if job in line]
