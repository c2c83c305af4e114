# SPDX-License-Identifier: Apache-2.0
"""The destination's plan for GPUs: what --dry-run prints, and each thing that is against it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from gpu_scenes import GIB, MIB, gpu, gpu_host, gpu_survey, process, survey
from preflight_scene import HERE, criu

from liveshift.criu_glue.criu.tool import Criu
from liveshift.errors import Refused, SourceRefused
from liveshift.runtime.agent import preflight
from liveshift.runtime.agent.gpu.preflight import GpuPlan, plan
from liveshift.runtime.messages import GpuHost, GpuSurvey
from liveshift.runtime.model.preflight_findings import PreflightFinding

__all__ = ["criu"]

SOURCE, THERE = gpu_host("a"), gpu_host("b")
A, B = SOURCE.gpus[0].uuid, THERE.gpus[0].uuid
STREAMED = gpu_survey(process({A: 80 * GIB}, movable=79 * GIB))


def finding(
    of: GpuSurvey = STREAMED, here: GpuHost | None = THERE, why: str = ""
) -> PreflightFinding:
    """The only thing that is against it."""
    [found] = plan(of, here, why, {}, "h1").findings
    return found


def test_a_plan_says_where_to_and_how() -> None:
    made = plan(STREAMED, THERE, "", {}, "h1")
    assert made.findings == []
    assert made.pairs == [(A, B)]
    assert (made.plain, made.host_memory) == ("", GIB)
    assert made.rows == [
        ("GPU driver", "580.159 (CUDA 13.0)"),
        ("GPUs", "GPU 0 (GPU-a0000000) → GPU 0 (GPU-b0000000), NVIDIA H200, 85.9 GB used"),
        ("device memory", "84.8 GB streamed, the rest by the driver"),
    ]


def test_why_a_plan_is_plain_is_said() -> None:
    without = gpu_survey(process({A: 80 * GIB}, 0, "it was started without the arena"))
    made = plan(without, THERE, "", {}, "h1")
    assert made.host_memory == 80 * GIB
    assert dict(made.rows)["device memory"] == (
        "85.9 GB copied by the driver's checkpoint: it was started without the arena"
    )
    elsewhere = msgspec.structs.replace(THERE, fast_path="its probe hung")
    made = plan(STREAMED, elsewhere, "", {}, "h1")
    assert (made.plain, made.host_memory) == ("its probe hung", 80 * GIB)
    assert dict(made.rows)["device memory"].endswith("checkpoint: its probe hung")
    two = gpu_survey(process({A: 30 * GIB}, 30 * GIB), process({A: 10 * GIB}, 0, "no page"))
    assert dict(plan(two, THERE, "", {}, "h1").rows)["device memory"] == (
        "32.2 GB streamed, 10.7 GB copied by the driver's checkpoint: no page"
    )


def test_a_gpu_that_nccl_may_not_find_afterwards_is_named() -> None:
    [there] = gpu_host("b").gpus
    moved = msgspec.structs.replace(THERE, gpus=[replace(there, pci_bus_id="0000:7f:00.0")])
    assert dict(plan(STREAMED, moved, "", {}, "h1").rows)["PCI addresses"] == (
        "GPU 0 (GPU-b0000000) for GPU 0 (GPU-a0000000), which is at 0000:00:00.0: no GPU here has"
        " that PCI address, by which NCCL will look for it"
    )


def test_a_capsule_without_cuda_processes_needs_none() -> None:
    assert plan(gpu_survey(), None, "no driver", {}, "h1") == GpuPlan()


def test_what_the_source_has_found_is_against_it() -> None:
    found = ("process 1002 (python): managed memory", "allocate with cudaMalloc")
    assert finding(msgspec.structs.replace(STREAMED, problems=[found])) == found
    assert plan(gpu_survey(problems=[found]), None, "", {}, "h1").findings == [found]


def test_no_helper_there() -> None:
    what, hint = finding(here=None, why="no NVIDIA driver is installed")
    assert what == "h1 has no usable GPU: no NVIDIA driver is installed"
    assert "liveshift doctor" in hint
    hanging = msgspec.structs.replace(THERE, gpus=[], why_none="NVML did not answer within 20 s")
    assert finding(here=hanging)[0] == ("h1 has no usable GPU: NVML did not answer within 20 s")


@pytest.mark.parametrize(
    ("driver", "kind"), [("570.86", "older"), ("580.82", "older"), ("590.44.01", "newer")]
)
def test_another_driver(driver: str, kind: str) -> None:
    what, hint = finding(here=msgspec.structs.replace(THERE, driver=driver))
    assert what == f"the driver on h1, {driver}, is {kind} than 580.159 at the source"
    assert "install the same one" in hint


def test_a_driver_that_is_too_old_for_another_gpu() -> None:
    source = msgspec.structs.replace(SOURCE, driver="570.86", cuda=(12, 8), can_remap=False)
    there = msgspec.structs.replace(source, gpus=THERE.gpus)
    of = msgspec.structs.replace(STREAMED, host=source)
    what, hint = finding(of, there)
    assert what.startswith("the driver on h1, 570.86 (CUDA 12.8), cannot restore onto another GPU")
    assert "13.0 (580)" in hint
    assert plan(of, source, "", {}, "h1").findings == []  # the same GPU, seen from both hosts


def test_a_driver_that_restores_nothing() -> None:
    old = {"driver": "560.35", "cuda": (12, 6)}
    of = msgspec.structs.replace(STREAMED, host=msgspec.structs.replace(SOURCE, **old))
    what, _ = finding(of, msgspec.structs.replace(THERE, **old))
    assert "560.35 (CUDA 12.6), cannot restore a checkpoint" in what


def test_no_gpu_for_it() -> None:
    full = msgspec.structs.replace(THERE, gpus=[gpu("b", 0, free_bytes=GIB)])
    what, hint = finding(here=full)
    assert "GPU 0 (GPU-b0000000) has 1.07 GB free, 86.2 GB needed" in what
    assert "free GPU" in hint
    taken = msgspec.structs.replace(THERE, taken={B: "is promised to gpt/2 (m9)"})
    assert "is promised to gpt/2 (m9)" in finding(here=taken)[0]
    assert plan(STREAMED, taken, "", {A: B}, "h1").findings == []  # somebody has asked for that one


def test_memory_of_the_source_for_the_drivers_copy() -> None:
    """Device memory may be larger than what its host has."""
    plain = gpu_survey(process({A: 80 * GIB}, 0, "it has no arena"), memory=64 * GIB)
    what, hint = finding(plain)
    assert what == (
        "the source has not enough host memory: the driver copies 85.9 GB of device memory into"
        " the processes, 68.7 GB are available"
    )
    assert "it has no arena" in hint
    assert (
        plan(msgspec.structs.replace(STREAMED, memory=64 * GIB), THERE, "", {}, "h1").findings == []
    )


def test_memory_of_the_destination_counts_the_drivers_copy(criu: Criu) -> None:
    plain = plan(gpu_survey(process({A: 8 * GIB}, 0, "it has no arena")), THERE, "", {}, "h1")
    needed = 2 * (110 * MIB + 8 * GIB) + preflight.MEMORY_MARGIN
    with pytest.raises(Refused, match=r"with 8\.59 GB of device memory in it"):
        preflight.check(survey(), HERE, HERE, criu, needed - 1, plain)
    rows = dict(preflight.check(survey(), HERE, HERE, criu, needed, plain))
    assert rows["memory"].endswith("of which 17.2 GB for what the driver's checkpoint copies")
    assert rows["GPU driver"] == "580.159 (CUDA 13.0)"
    streamed = plan(gpu_survey(process({A: 8 * GIB}, 8 * GIB)), THERE, "", {}, "h1")
    preflight.check(survey(), HERE, HERE, criu, 2 * 110 * MIB + preflight.MEMORY_MARGIN, streamed)


def test_a_cause_at_the_source_is_an_error_of_its_own(criu: Criu) -> None:
    """No other host is tried then."""
    problem = ("process 7 (python) uses CUDA IPC", "turn it off")
    of_process = msgspec.structs.replace(STREAMED, problems=[problem])
    short = gpu_survey(process({A: 80 * GIB}, 0, "it has no arena"), memory=64 * GIB)
    for of in (of_process, short):
        with pytest.raises(SourceRefused):
            preflight.check(survey(), HERE, HERE, criu, 1 << 50, plan(of, THERE, "", {}, "h1"))
    other = msgspec.structs.replace(THERE, driver="1")
    with pytest.raises(Refused) as caught:
        preflight.check(survey(), HERE, HERE, criu, 1 << 50, plan(STREAMED, other, "", {}, "h1"))
    assert type(caught.value) is Refused


def test_every_finding_is_said_at_once(tmp_path: Path) -> None:
    other = gpu("b", 0, name="NVIDIA A100")
    against = plan(STREAMED, msgspec.structs.replace(THERE, gpus=[other], driver="1"), "", {}, "h1")
    with pytest.raises(Refused) as caught:
        preflight.check(survey(), HERE, HERE, None, 1 << 50, against)
    assert "no CRIU, or one that is too old" in str(caught.value)
    assert "no GPU of the destination can take" in str(caught.value)
    assert "is older than" in str(caught.value)


def test_persistence_mode_is_no_refusal() -> None:
    off = msgspec.structs.replace(THERE, gpus=[gpu("b", 0, persistence=False)])
    made = plan(STREAMED, off, "", {}, "h1")
    assert made.findings == []
    assert "off here on GPU 0 (GPU-b0000000)" in dict(made.rows)["persistence mode"]
