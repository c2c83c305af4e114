# SPDX-License-Identifier: Apache-2.0
"""What people mean with --to-gpu and --from-gpu, and what becomes of it in a move."""

from __future__ import annotations

import asyncio
import re

import msgspec
import pytest
from gpu_lists import GPUS, ONE, UUIDS, process, survey
from migration_stage import ANSWERS, NOT_DONE, Stage, a_move, no_waiting, play

from liveshift.errors import LiveshiftError, NotFound, Refused, WrongUsage
from liveshift.runtime import messages
from liveshift.runtime.messages import GpuSeat, GpuSurvey, Migrate
from liveshift.runtime.model.gpu_asked import GpuAsked, asked, left, seat
from liveshift.runtime.model.jobs import Capsule
from liveshift.runtime.model.steps import MigrationStep

__all__ = ["no_waiting"]

HERE = Capsule("gpt/3", 3, "h1", 1)
SEATS = [GpuSeat(gpu.uuid, gpu.name, free=True) for gpu in GPUS]


def ask(to_gpu: str, from_gpu: str = "", to: str = "") -> GpuAsked | None:
    return asked(Migrate("gpt/3", to, "", False, to_gpu, from_gpu), HERE)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("", ""), None),
        (("5", ""), GpuAsked("h1", "5", "")),
        (("h1/5", "3"), GpuAsked("h1", "5", "3")),
        (("h2/GPU-12ab", "h1/GPU-0"), GpuAsked("h2", "GPU-12ab", "GPU-0")),
        (("GPU-12ab", ""), GpuAsked("h1", "GPU-12ab", "")),
    ],
)
def test_host_and_gpu(words: tuple[str, str], meant: GpuAsked | None) -> None:
    assert ask(*words) == meant


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("h1/",), '"h1/" names no GPU'),
        (("/5",), '"/5" names no GPU'),
        (("5", "/"), '"/" names no GPU'),
        (("", "3"), "--from-gpu was given without --to-gpu"),
        (("h1/5", "", "h1"), "--to and --to-gpu were both given"),
    ],
)
def test_what_names_none(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(WrongUsage, match=said) as caught:
        ask(*words)
    assert caught.value.hint


def test_a_gpu_of_a_host_where_it_is_not() -> None:
    with pytest.raises(Refused, match="gpt/3 is on h1: it has no GPU of h2 to leave") as caught:
        ask("5", "h2/3")
    assert caught.value.hint


@pytest.mark.parametrize("text", ["2", UUIDS[2], "gpu-A0000002"])
def test_a_gpu_of_another_host(text: str) -> None:
    assert seat(text, "h2", SEATS) == UUIDS[2]


@pytest.mark.parametrize(
    ("text", "seats", "kind", "said"),
    [
        ("4", SEATS, NotFound, 'h2 has no GPU "4"'),
        ("GPU-b", SEATS, NotFound, 'h2 has no GPU "GPU-b"'),
        ("GPU-a", SEATS, WrongUsage, '"GPU-a" names several GPUs'),
        ("0", [], Refused, "h2 has no usable GPU"),
    ],
)
def test_one_that_is_not_there(
    text: str, seats: list[GpuSeat], kind: type[LiveshiftError], said: str
) -> None:
    with pytest.raises(kind, match=said) as caught:
        seat(text, "h2", seats)
    assert caught.value.hint


def test_the_one_to_leave() -> None:
    both = survey(ONE, process(1002, g2=70))
    assert left("gpt/3", survey(ONE), "") == UUIDS[1]
    assert left("gpt/3", both, "2") == UUIDS[2]
    assert left("gpt/3", both, UUIDS[1]) == UUIDS[1]


@pytest.mark.parametrize(
    ("seen", "leave", "said"),
    [
        (None, "", "gpt/3 uses no GPU"),
        (survey(), "", "gpt/3 uses no GPU"),
        (survey(ONE, process(1002, g2=70)), "", "uses GPU 1 .* and GPU 2 .*: say which to leave"),
        (survey(ONE), "2", "gpt/3 has nothing on GPU 2"),
        (survey(process(1001)), "", "uses no GPU that NVML reports"),
        (survey(gpus=[], problems=[("NVML names none", "ask it")]), "", "NVML names none"),
    ],
)
def test_when_that_is_not_clear(seen: GpuSurvey | None, leave: str, said: str) -> None:
    with pytest.raises(Refused) as caught:
        left("gpt/3", seen, leave)
    assert re.search(said, str(caught.value)), caught.value
    assert caught.value.hint


# ---- in a move to another host -----------------------------------------------------------------


def inspected(gpu: GpuSurvey | None) -> messages.Inspected:
    answer = ANSWERS[messages.Inspect]
    assert isinstance(answer, messages.Inspected)
    return msgspec.structs.replace(answer, gpu=gpu)


def test_the_destination_is_asked_for_that_one() -> None:
    stage = Stage()
    stage.fail("Inspect", inspected(survey(ONE)))
    move = a_move(stage, gpu=GpuAsked("h2", "GPU-there", ""))
    asyncio.run(move.run())
    (reserve,) = stage.sent(messages.Reserve)
    assert reserve.gpus_wanted == [(UUIDS[1], "GPU-there")]
    assert move.step is MigrationStep.DONE


def test_another_spare_is_not() -> None:
    stage = Stage()
    stage.spare = "h3"
    stage.fail("Inspect", inspected(survey(ONE)))
    stage.fail("RestoreCapsule h2", NOT_DONE, NOT_DONE)
    move = a_move(stage, gpu=GpuAsked("h2", "GPU-there", ""))
    asyncio.run(move.run())
    first, second = stage.sent(messages.Reserve)
    assert (len(first.gpus_wanted), second.gpus_wanted) == (1, [])
    assert (move.step, move.capsule.host) == (MigrationStep.DONE, "h3")


def test_a_capsule_without_gpus_is_refused() -> None:
    stage = Stage()
    move = a_move(stage, gpu=GpuAsked("h2", "GPU-there", ""))
    asyncio.run(move.run())
    assert (move.step, str(move.error)) == (MigrationStep.FAILED, "gpt/1 uses no GPU")
    assert not stage.sent(messages.Reserve)


def test_without_a_gpu_asked_for_nothing_is_wanted() -> None:
    stage = Stage()
    play(stage)
    (reserve,) = stage.sent(messages.Reserve)
    assert reserve.gpus_wanted == []
