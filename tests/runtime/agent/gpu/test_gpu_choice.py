# SPDX-License-Identifier: Apache-2.0
"""Which GPUs change places when a capsule leaves one for another of its host."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from gpu_lists import A100, GIB, GPUS, ONE, UUIDS, gpu, process, survey

from liveshift.errors import Refused
from liveshift.runtime.agent.gpu.choice import choose
from liveshift.runtime.messages import GpuSurvey, SwapPlan


def chosen(seen: GpuSurvey | None, to: str = "3", leave: str = "") -> SwapPlan:
    return choose("gpt/3", seen, to, leave, {UUIDS[0]: "is promised to llm/0 (m4)"})


def refusal(seen: GpuSurvey | None, to: str = "3", leave: str = "") -> tuple[str, str]:
    with pytest.raises(Refused) as caught:
        chosen(seen, to, leave)
    assert caught.value.hint
    return str(caught.value), caught.value.hint


@pytest.mark.parametrize("to", ["3", UUIDS[3], "gpu-a0000003"])
@pytest.mark.parametrize("leave", ["", "1", UUIDS[1]])
def test_the_two_change_places_and_all_others_stay(to: str, leave: str) -> None:
    plan = chosen(survey(ONE), to, leave)
    assert dict(plan.pairs) == {
        UUIDS[0]: UUIDS[0],
        UUIDS[1]: UUIDS[3],
        UUIDS[2]: UUIDS[2],
        UUIDS[3]: UUIDS[1],
    }
    assert [old for old, _ in plan.pairs] == UUIDS
    assert (plan.leave, plan.to, plan.pids, plan.bytes) == ("GPU 1", "GPU 3", [1001], 80 * GIB)
    rows = dict(plan.checks)
    assert "GPU 1" in rows["GPUs"]
    assert "GPU 3" in rows["GPUs"]
    assert rows["processes"] == "1001 (python3)"
    assert "shared" not in rows


def test_only_the_processes_on_it_go() -> None:
    tree = survey(ONE, process(1002, g2=70), process(1003, g1=5, g2=1))
    plan = chosen(tree, leave="1")
    assert (plan.pids, plan.bytes) == ([1001, 1003], 85 * GIB)
    assert dict(plan.pairs)[UUIDS[2]] == UUIDS[2], "what it has elsewhere stays there"


def test_a_gpu_that_others_use_is_taken_if_there_is_room_and_said_so() -> None:
    theirs = {UUIDS[3]: "is used by process 77"}
    gpus = [*GPUS[:3], replace(GPUS[3], free_bytes=100 * GIB)]
    plan = chosen(survey(ONE, gpus=gpus, taken=theirs))
    assert dict(plan.checks)["shared"].endswith("is used by process 77")
    gpus = [*GPUS[:3], replace(GPUS[3], free_bytes=80 * GIB)]
    said, _ = refusal(survey(ONE, gpus=gpus, taken=theirs))
    assert "85.9 GB free" in said


@pytest.mark.parametrize(
    ("seen", "to", "leave", "said"),
    [
        (survey(ONE), "1", "", "gpt/3 is on GPU 1 .* already"),
        (survey(ONE), "0", "", r"GPU 0 .* is not free: it is promised to llm/0 \(m4\)"),
        (survey(process(1001, g1=80, g3=1)), "3", "1", r"process 1001 \(python3\) uses GPU 3"),
        (survey(ONE, gpus=[*GPUS[:3], gpu(3, name=A100)]), "3", "", "is another model"),
        (survey(ONE, gpus=[*GPUS[:3], replace(GPUS[3], mig=True)]), "3", "", "MIG"),
        (survey(ONE, can_remap=False), "3", "", "cannot restore onto another GPU"),
        (survey(ONE, problems=[("it has managed memory", "do not")]), "3", "", "managed memory"),
        (survey(gpus=[], problems=[("NVML names none", "ask it")]), "3", "", "NVML names none"),
    ],
)
def test_what_is_refused(seen: GpuSurvey | None, to: str, leave: str, said: str) -> None:
    words, _ = refusal(seen, to, leave)
    assert re.search(said, words), words
