# SPDX-License-Identifier: Apache-2.0
"""What is known of GPUs before a move: where a rank could go, by which GPUs, and why not.

On the doubles (gpu_lab.py). Nothing moves here.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from device_jobs import Device
from gpu_lab import GpuLab, uuid
from lab_session import NewLab, eventually
from moving_job import Job

from liveshift.interposer import layout

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180)]

TRACE = r"""
import contextlib, ctypes, pathlib, sys
words = {}
for process in pathlib.Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        words[process] = (process / "cmdline").read_bytes().split(b"\0")
[rank] = [int(p.name) for p, said in words.items() if said[1:] and said[1].endswith(b"_train.py")]
assert ctypes.CDLL(None).ptrace(0x4206, rank, 0, 0) == 0  # PTRACE_SEIZE
print("attached", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def lab(new_lab: NewLab, place: Path) -> GpuLab:
    """The job is on h0; h1 could take it; h2, h3 and h4 each lack something."""
    libraries = place / "driver-preflight"
    libraries.mkdir()
    options = ("--hosts", "5", "--timeouts", "heartbeat=0.3", "--gpu", f"libraries={libraries}")
    device = Device.built(place / "doubles")
    made = GpuLab(new_lab(*options), device, libraries)
    made.give("h0", 1024, 1024)
    made.give("h1", 1024, 1024, 2048)
    made.give("h3", 1024)
    made.describe("h2", *(f"{uuid(2, gpu)}:H200:1GiB" for gpu in (0, 1)), "driver=570.86.15")
    made.describe("h4", *(f"{uuid(4, gpu)}:H200:1GiB mig" for gpu in (0, 1)))
    made.install()
    eventually(lambda: all(host.gpus for host in made.session.status().hosts), "all helpers")
    made.wait_probed("h0")
    made.wait_probed("h1")
    return made


@pytest.fixture(scope="module")
def job(lab: GpuLab) -> Job:
    return lab.start("gpt")


def plan(lab: GpuLab, *more: str) -> dict[str, str]:
    """The rows of a plan by what they are about."""
    told = lab.session.json("migrate", "gpt/0", "--dry-run", *more)
    return dict(told["checks"])


def test_a_plan_names_gpus_and_the_way_of_their_memory(lab: GpuLab, job: Job) -> None:
    eventually(lambda: not free(lab, "h0")[0], "the job's GPU to be seen in use")
    rows = plan(lab)
    assert rows["destination"].startswith("h1, ")
    old, new = lab.where(job), lab.gpus["h1"][0]
    assert f"GPU 0 ({old[:12]}) → GPU 0 ({new[:12]}), " in rows["GPUs"], "the same PCI address"
    assert re.fullmatch(r"[\d.]+ [MG]B streamed, the rest by the driver", rows["device memory"])
    assert rows["GPU driver"].startswith("580.")


def free(lab: GpuLab, host: str) -> list[bool]:
    return [gpu.free for gpu in lab.session.host(host).gpus]


def test_status_tells_what_is_free(lab: GpuLab, job: Job) -> None:
    eventually(lambda: free(lab, "h0") == [False, True], "the job's GPU to be seen in use")
    assert free(lab, "h1") == [True, True, True]
    assert "H200 ×2 (1 free)" in lab.session.cli("status").out


@pytest.mark.parametrize(
    ("to", "words"),
    [
        ("h2", ["the driver on h2, 570.86.15, is older than 580.", "cannot restore onto another"]),
        ("h3", ["the source has 2 GPUs, the destination 1"]),
        ("h4", ["is partitioned by MIG"]),
    ],
)
def test_why_a_host_cannot_take_it(lab: GpuLab, job: Job, to: str, words: list[str]) -> None:
    said = lab.session.refused("migrate", "gpt/0", "--to", to, "--dry-run")
    assert all(part in said for part in words), said
    assert "hint:" in said


def test_an_interposer_of_another_version_is_in_the_way(lab: GpuLab, job: Job) -> None:
    """After an upgrade no boundary can be found with a rank whose page cannot be read."""
    another = layout.LAYOUT + 1
    job.write_layout(0, another)
    try:
        said = lab.session.refused("migrate", "gpt/0", "--dry-run")
        assert re.search(rf"process \d+ \(\S+\): \S+ has page layout {another};", said), said
        assert "runs with the interposer of another version of liveshift" in said
    finally:
        job.write_layout(0, layout.LAYOUT)
    assert plan(lab)["destination"].startswith("h1, ")


def test_a_debugger_is_in_the_way(lab: GpuLab, job: Job) -> None:
    with lab.somebody("h0", "attached", sys.executable, "-S", "-c", TRACE):
        said = lab.session.refused("migrate", "gpt/0", "--dry-run")
    assert re.search(r"process \d+ \(\S+\) is traced by process", said), said
    assert "detach it" in said
    assert plan(lab)["destination"].startswith("h1, ")
