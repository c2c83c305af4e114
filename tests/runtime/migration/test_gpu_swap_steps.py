# SPDX-License-Identifier: Apache-2.0
"""A swap of GPUs inside a host, told to a stand-in for the orchestrator that writes down every ask.

Each step is made to fail in turn and in several ways. The capsule never changes its owner; on which
GPU it runs is what its host says, however often that has to be asked.
"""

from __future__ import annotations

import asyncio
import sqlite3

import pytest
from migration_stage import (
    NOT_DONE,
    PAIRS,
    RUNS,
    SILENT,
    WAYS,
    Failure,
    Stage,
    a_swap,
    named,
    no_waiting,
    play_swap,
)

from liveshift.errors import Refused, StepFailed, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.migration.context import NoBoundary
from liveshift.runtime.migration.gpu_swap import GpuSwap
from liveshift.runtime.model.steps import ALLOWED_IN_SWAP, ENDS, MigrationStep

__all__ = ["no_waiting"]

HAPPY = ["LookAtGpus h1", "SwapGpu h1", "Resume h1"]
HELD, SWAPPED, STAYS, LOST, GONE = (
    messages.SwapSettled(state, why)
    for state, why in (
        ("held", "its driver is busy"),
        ("swapped", ""),
        ("stays", "GPU 5 has no room"),
        ("lost", "the driver cannot restore it"),
        ("gone", ""),
    )
)


def test_the_order_of_things() -> None:
    stage = Stage()
    swap = play_swap(stage)
    assert stage.said == HAPPY
    assert stage.steps == [
        MigrationStep.QUIESCING,
        MigrationStep.FREEZING,
        MigrationStep.RESUMING,
        MigrationStep.DONE,
    ]
    assert stage.gates == ["closed before 1", "open before 2"]
    assert (swap.capsule.host, swap.capsule.epoch) == ("h1", 1)
    assert swap.error is None


def test_what_its_host_is_told() -> None:
    stage = Stage()
    play_swap(stage)
    (look,) = stage.sent(messages.LookAtGpus)
    assert (look.capsule, look.to, look.leave) == ("gpt/1", "5", "")
    (swap,) = stage.sent(messages.SwapGpu)
    assert (swap.migration, swap.capsule, swap.pairs, swap.pids) == ("m7", "gpt/1", PAIRS, [1001])
    limits = stage.cluster.timeouts
    assert swap.deadline == pytest.approx(limits.freeze + limits.restore)


def test_the_record() -> None:
    row = play_swap(Stage()).row()
    assert (row.kind, row.source, row.destination) == ("swap", "h1 GPU 3", "h1 GPU 5")
    assert (row.state, row.epoch, row.reason, row.by) == ("done", 1, "ECC errors", "root")
    assert (row.image_bytes, row.bytes, row.expected_bytes) == (0, 0, 0)
    assert [phase.name for phase in row.phases] == [
        "prepare",
        "quiesce",
        "restore",
        "reopen",
        "resume",
    ]
    assert 0 < row.frozen_s <= row.seconds


@pytest.mark.parametrize(("gpu", "shown"), [("5", "h1 GPU 5"), ("GPU-12ab", "h1 GPU-12ab")])
def test_before_its_host_has_answered_it_is_called_as_it_was_asked_for(
    gpu: str, shown: str
) -> None:
    stage = Stage()
    assert a_swap(stage, gpu).way == ("h1", shown)


@pytest.mark.parametrize("way", WAYS, ids=named)
def test_what_cannot_be_prepared_changes_nothing(way: Failure) -> None:
    stage = Stage()
    stage.fail("LookAtGpus", way)
    swap = play_swap(stage)
    assert stage.said == HAPPY[:1]
    assert stage.gates == []
    assert stage.steps == [MigrationStep.ROLLING_BACK, MigrationStep.FAILED]
    row = swap.row()
    assert row.error
    assert (row.hint, row.frozen_s) == ("try there" if isinstance(way, Refused) else None, 0)


@pytest.mark.parametrize(
    "way",
    [NoBoundary("rank 1 owes an all-reduce", only_tcp=False), Unreachable("h0 did not answer")],
    ids=named,
)
def test_without_a_boundary_nothing_is_stopped(way: Exception) -> None:
    stage = Stage()
    stage.fail("quiesce", way)
    swap = play_swap(stage)
    assert (stage.said, swap.step) == (HAPPY[:1], MigrationStep.FAILED)
    assert stage.gates == ["closed before 1", "open before 1"]
    assert str(swap.error) == str(way)


def test_a_job_that_talks_over_tcp_needs_no_boundary() -> None:
    stage = Stage()
    stage.fail("quiesce", NoBoundary("rank 1 owes an all-reduce", only_tcp=True))
    assert play_swap(stage).step is MigrationStep.DONE
    assert any("frozen in place" in text for text in stage.told)


@pytest.mark.parametrize("way", WAYS, ids=named)
def test_a_swap_that_fails_leaves_it_on_the_old_gpu(way: Failure) -> None:
    stage = Stage()
    stage.fail("SwapGpu", way)
    swap = play_swap(stage)
    assert stage.said == [*HAPPY[:2], "SettleSwap h1"]
    assert stage.steps[-3:] == [
        MigrationStep.FREEZING,
        MigrationStep.ROLLING_BACK,
        MigrationStep.FAILED,
    ]
    assert stage.gates == ["closed before 1", "open before 3"]
    row = swap.row()
    assert row.frozen_s > 0
    if isinstance(way, Unreachable) or way is None:  # its own words were lost
        assert row.error == "GPU 5 has no room"
    else:
        assert str(way) in str(row.error)
    (reopen,) = [phase for phase in row.phases if phase.name == "reopen"]
    assert reopen.frozen


@pytest.mark.parametrize("way", [SILENT, NOT_DONE, None], ids=named)
def test_an_answer_that_was_lost_is_asked_for(way: Failure) -> None:
    stage = Stage()
    stage.fail("SwapGpu", way)
    stage.fail("SettleSwap", SILENT, HELD, HELD, RUNS, SWAPPED)
    swap = play_swap(stage)
    assert stage.said == [*HAPPY[:2], *["SettleSwap h1"] * 5, "Resume h1"]
    assert (swap.step, swap.row().error) == (MigrationStep.DONE, None)
    assert stage.gates == ["closed before 1", "open before 7"]
    assert len(stage.told) == 4, "each problem once"
    assert "h1 does not know yet on which GPU it is: its driver is busy" in stage.told


@pytest.mark.parametrize("settled", [LOST, GONE], ids=["lost", "gone"])
def test_device_state_that_is_lost_ends_the_capsule(settled: messages.SwapSettled) -> None:
    stage = Stage()
    stage.fail("SwapGpu", NOT_DONE)
    stage.fail("SettleSwap", settled)
    swap = play_swap(stage)
    assert stage.steps[-1] is MigrationStep.LOST
    assert str(swap.error) == (settled.why or str(NOT_DONE))


@pytest.mark.parametrize("settled", [GONE, SILENT], ids=["gone", "silent"])
def test_one_that_has_ended_meanwhile_is_not_lost(settled: Failure) -> None:
    stage = Stage()
    stage.fail("SwapGpu", Refused("gpt/1 has ended with code 3"))
    stage.fail("SettleSwap", settled)
    swap = a_swap(stage)
    swap.capsule.code = 3
    asyncio.run(swap.run())
    assert stage.said == [*HAPPY[:2], "SettleSwap h1"]
    words = "gpt/1 ended with code 3 before it could move h1 GPU 3 → h1 GPU 5"
    assert (stage.steps[-1], str(swap.error)) == (MigrationStep.JOB_ENDED, words)


@pytest.mark.parametrize(
    "step",
    [MigrationStep.QUIESCING, MigrationStep.FREEZING, MigrationStep.RESUMING, MigrationStep.DONE],
)
def test_a_record_that_cannot_be_written_changes_nothing(step: MigrationStep) -> None:
    stage = Stage()
    stage.fail(f"record {step.value}", sqlite3.OperationalError("disk is full"))
    assert play_swap(stage).step is MigrationStep.DONE
    assert stage.said == HAPPY


# ---- after a restart of the orchestrator -------------------------------------------------------


def taken_up(stage: Stage, step: MigrationStep) -> GpuSwap:
    """One that was at ``step`` when the orchestrator ended, after its next life has taken it up."""
    swap = a_swap(stage)
    asyncio.run(swap._prepare())
    swap.step = step
    if step in (MigrationStep.FREEZING, MigrationStep.RESUMING):
        swap.times.freeze()
    row = swap.row()
    stage.said.clear()
    assert stage.capsule is not None
    again = GpuSwap.from_row(stage, swap.order, row)
    assert again.row().source == "h1 GPU 3"
    asyncio.run(again.recover())
    return again


@pytest.mark.parametrize(
    "step", [MigrationStep.PREPARING, MigrationStep.QUIESCING, MigrationStep.ROLLING_BACK]
)
def test_a_swap_that_had_not_begun_is_over(step: MigrationStep) -> None:
    stage = Stage()
    swap = taken_up(stage, step)
    assert (stage.said, swap.step) == ([], MigrationStep.FAILED)
    assert stage.gates == ([] if step is MigrationStep.PREPARING else ["open before 0"])
    assert "the orchestrator was restarted" in str(swap.error)


@pytest.mark.parametrize(
    ("settled", "end"),
    [(SWAPPED, MigrationStep.DONE), (STAYS, MigrationStep.FAILED), (LOST, MigrationStep.LOST)],
)
def test_what_became_of_one_under_way_is_asked(
    settled: messages.SwapSettled, end: MigrationStep
) -> None:
    stage = Stage()
    stage.fail("SettleSwap", HELD, settled)
    swap = taken_up(stage, MigrationStep.FREEZING)
    asks = ["SettleSwap h1"] * 2
    assert stage.said == (asks if end is not MigrationStep.DONE else [*asks, "Resume h1"])
    assert swap.step is end
    assert len(stage.gates) == 1
    assert swap.row().frozen_s > 0


def test_one_that_runs_already_only_has_its_gates_opened() -> None:
    stage = Stage()
    assert taken_up(stage, MigrationStep.RESUMING).step is MigrationStep.DONE
    assert (stage.said, stage.gates) == (["Resume h1"], ["open before 0"])


# ---- the table ---------------------------------------------------------------------------------


def test_steps_lead_somewhere_and_end() -> None:
    assert set(ALLOWED_IN_SWAP) > ENDS
    for step, after in ALLOWED_IN_SWAP.items():
        assert bool(after) == (step not in ENDS)
        assert after <= set(ALLOWED_IN_SWAP)
    assert MigrationStep.COMMITTED not in ALLOWED_IN_SWAP, "nobody else comes to own it"


def test_a_step_out_of_order_is_a_mistake_in_the_program() -> None:
    swap = play_swap(Stage())
    with pytest.raises(AssertionError, match="may not become"):
        swap._advance(MigrationStep.PREPARING)
    with pytest.raises(AssertionError, match="may not become"):
        a_swap(Stage())._advance(MigrationStep.COMMITTED)


def test_errors_of_a_step_say_which() -> None:
    stage = Stage()
    stage.fail("SwapGpu", StepFailed("gpu lock", "rank 1 is in a kernel", hint="try later"))
    stage.fail("SettleSwap", messages.SwapSettled("stays", ""))
    row = play_swap(stage).row()
    assert (row.error, row.hint) == ("gpu lock: rank 1 is in a kernel", "try later")
