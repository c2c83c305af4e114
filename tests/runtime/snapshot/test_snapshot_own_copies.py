# SPDX-License-Identifier: Apache-2.0
"""The copy of an image that a capsule's own host keeps: it costs a snapshot nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from snapshot_stage import (
    CAPSULES,
    HOLDER,
    WAYS,
    Failure,
    SnapshotStage,
    a_snapshot,
    named,
    of,
    play,
)

from liveshift.runtime import messages


def starts(stage: SnapshotStage) -> dict[str, Any]:
    return {m.capsule: m for _, m in of(stage, messages.StartSnapshot)}


def test_each_host_is_asked_to_keep_a_copy_of_its_own_capsule() -> None:
    stage = SnapshotStage()
    made = play(stage).generation
    assert made is not None
    assert made.own_copies == sorted(CAPSULES)
    assert made.holders == {name: [HOLDER] for name in CAPSULES}, "a copy is no protection"
    own = {host: m for host, m in of(stage, messages.Hold) if m.own}
    assert {host: (m.spec.name, list(m.together)) for host, m in own.items()} == {
        f"h{i}": (f"gpt/{i}", [f"gpt/{i}"]) for i in range(3)
    }
    assert {(m.own, m.least) for m in starts(stage).values()} == {(4, 9)}, "the higher of both"
    checked = {host: m.image for host, m in of(stage, messages.CheckHeld) if host != HOLDER}
    assert checked == {f"h{i}": f"s17.{i}" for i in range(3)}


@pytest.mark.parametrize("step", ["HoldOwn", "CheckOwn"])
@pytest.mark.parametrize("way", WAYS[:3], ids=named)
def test_a_copy_that_fails_costs_the_snapshot_nothing(step: str, way: Failure) -> None:
    stage = SnapshotStage()
    stage.fail(f"{step} gpt/1", way)
    snapshot = play(stage)
    assert snapshot.generation is not None
    assert snapshot.generation.own_copies == ["gpt/0", "gpt/2"]
    assert snapshot.refused == set(), "no holder is to blame"
    assert starts(stage)["gpt/1"].own == (4 if step == "CheckOwn" else None)


@pytest.mark.parametrize("base", [0, 3, 4])
def test_the_source_learns_what_its_host_has_and_decides(base: int) -> None:
    """It leaves out what the holder has, or sends all."""
    stage = SnapshotStage()
    stage.stands = messages.Holding("", base=base, least=2)
    play(stage)
    assert {(m.base, m.own, m.least) for m in starts(stage).values()} == {(4, base, 6)}


def test_a_source_that_is_silent_about_its_copy_does_not_hold_the_snapshot_up() -> None:
    stage = SnapshotStage()
    stage.silent.add("CheckOwn gpt/1")
    made = play(stage).generation
    assert made is not None
    assert made.own_copies == ["gpt/0", "gpt/2"]


def test_the_hosts_of_a_job_that_is_suspended_keep_no_copy() -> None:
    stage = SnapshotStage()
    asyncio.run(a_snapshot(stage, suspends="a person wants it").run())
    ((generation, _),) = stage.suspended
    assert generation.own_copies == []
    assert not [m for _, m in of(stage, messages.Hold) if m.own]
