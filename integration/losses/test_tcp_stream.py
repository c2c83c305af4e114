# SPDX-License-Identifier: Apache-2.0
"""Two processes stream to each other over one TCP connection, and nothing holds them at a boundary:
a snapshot freezes them wherever they are, with bytes in both sockets and on their way.

A host loses its power. The job goes back to its snapshot, and each process reads on: every byte
comes once, in order.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
from lab_session import SUPPORT, LabSession, NewLab, eventually
from moving_job import Job, Step
from protected_job import events, wait_rewound
from tcp_stream import BLOCK, stream_digest

from liveshift.launcher import lab as labs

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180)]

BLOCKS = 3000
STREAM = (
    *(sys.executable, str(SUPPORT / "tcp_stream.py"), "--out", "{out}"),
    *("--blocks", str(BLOCKS), "--pace", "0.1"),
)
"""At this pace it takes 300 s, unless it is hurried."""
COUNT = 3  # snapshots of the streams before the power is cut
FURTHER = 10  # blocks that are read after the snapshot, and read again


@dataclass(frozen=True)
class Kind:
    """A job, where its snapshots find it, and which rank's host dies. Rank 0 has accepted the
    connection of rank 1."""

    argv: tuple[str, ...]
    boundary: str
    victim: int


KINDS = {
    "plain": Kind(STREAM, r"no rank has called a collective yet", 1),
    "gloo": Kind(
        ("env", "TORCH_GLOO_LAZY_INIT=1", *STREAM, "--gloo"),
        r"frozen in place: no collective boundary: .*do not agree on.*",
        0,
    ),
}


@pytest.fixture(scope="module")
def lab(new_lab: NewLab) -> LabSession:
    return new_lab("--hosts", "3", "--snapshots", "every=1", "--timeouts", "suspicion=1")


@pytest.fixture(params=KINDS)
def kind(lab: LabSession, request: pytest.FixtureRequest) -> Iterator[Kind]:
    """All hosts run afterwards."""
    yield KINDS[request.param]
    for host in lab.lab.hosts:
        if lab.lab.machine(host).init is None:
            lab.boot(host)


def blocks(job: Job, rank: int) -> list[Step]:
    """The lines of a rank's file, which a rewind cuts back while it is read."""
    file = job.out / f"rank{rank}.jsonl"
    text = file.read_text(errors="replace") if file.exists() else ""
    return [json.loads(line) for line in re.findall(r"(?m)^\{.*\}$", text)]


def snapshots(lab: LabSession, job: Job) -> list[str]:
    """Where each snapshot of the job has found it."""
    said = rf" of {job.name}: complete, .* paused for [0-9.]+ s \([^)]*\), (.*)"
    return re.findall(said, lab.lab.log("ctl").read_text())


def read_since(job: Job, rank: int, when: float) -> list[Step]:
    return [line for line in blocks(job, rank) if line["time"] > when]


def reads_on(job: Job, rank: int, since: float) -> bool:
    return len(read_since(job, rank, since)) >= FURTHER


def past_snapshot(job: Job, count: int) -> bool:
    """Whether the job has had so many snapshots, and both ranks have read on since the newest."""
    row = job.protection()
    boundary = time.time() - row.age
    enough = len(snapshots(job.session, job)) >= count
    return enough and all(reads_on(job, rank, boundary) for rank in range(2))


def test_every_byte_comes_once_after_a_rewind(lab: LabSession, kind: Kind) -> None:
    name = next(name for name, each in KINDS.items() if each is kind)
    job = lab.start(name, kind.argv, nnodes=2)
    eventually(lambda: all(reads_on(job, rank, 0.0) for rank in range(2)), "the first blocks")
    earlier = len(snapshots(lab, job)) + 1  # one may be under way
    eventually(lambda: past_snapshot(job, earlier + COUNT), "snapshots, and blocks after them")
    victim, survivor = job.seen(kind.victim).host, job.seen(1 - kind.victim).host
    labs.kill_host(lab.lab, victim)
    cut = time.time()
    before = [blocks(job, rank) for rank in range(2)]
    boundaries = snapshots(lab, job)[earlier:]
    wait_rewound(job, 1)
    for rank in range(2):
        eventually(partial(reads_on, job, rank, cut), f"new blocks of rank {rank}")
    hosts = [job.seen(rank).host for rank in range(2)]
    assert hosts[kind.victim] not in (victim, survivor)
    assert hosts[1 - kind.victim] == survivor, "it is restored in place"
    (job.out / "hurry").touch()
    assert job.wait_end(60) == 0, job.output()

    (rewound,) = events(job, "rewound")
    print(f"{len(boundaries)} snapshots of the streams; {rewound.text}")
    for text in boundaries:
        assert re.fullmatch(kind.boundary, text), text
    for rank in range(2):
        assert_read_again(job, rank, before[rank], cut)
    assert_whole(job)


def assert_read_again(job: Job, rank: int, before: list[Step], cut: float) -> None:
    """Each block is in the file once, since the rewind has cut the file back to what it was at the
    snapshot. ``before``: the lines of when the host lost its power."""
    lines = blocks(job, rank)
    assert [line["block"] for line in lines] == list(range(BLOCKS))
    assert [line["read"] for line in lines] == [BLOCK * number for number in range(1, BLOCKS + 1)]
    first = next(line for line in lines if line["time"] > cut)
    again = len(before) - first["block"]
    since = before[first["block"] - 1 :]  # from the last one before the snapshot on
    unread, unsent = ([line[what] for line in since] for what in ("unread", "unsent"))
    print(
        f"rank {rank}: {len(before)} blocks read before the cut, {again} of them again; in its"
        f" socket at the snapshot: {unread[0]} B to read, {unsent[0]} B to send"
    )
    assert again > 0
    assert min(map(sum, zip(unread, unsent, strict=True))) > 0, "bytes were on their way all along"


def assert_whole(job: Job) -> None:
    streams = [stream_digest(sender, BLOCKS) for sender in range(2)]
    for rank in range(2):
        assert json.loads((job.out / f"final{rank}.json").read_text()) == {
            "read": BLOCKS * BLOCK,
            "sent": BLOCKS * BLOCK,
            "sha256": streams[1 - rank],
            "sha256 sent": streams[rank],
        }
