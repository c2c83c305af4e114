# SPDX-License-Identifier: Apache-2.0
"""The copy of an image that a capsule's own host keeps: it costs a snapshot nothing."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from snapshot_stage import (
    CAPSULES,
    HOLDER,
    WAYS,
    Failure,
    SnapshotStage,
    a_job,
    a_snapshot,
    named,
    of,
    play,
)

from liveshift.errors import Refused
from liveshift.runtime import messages
from liveshift.runtime.model.snapshots import Generation
from liveshift.runtime.snapshot.snapshot import Snapshot


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


# ---- the hosts of the job hold each other's images -------------------------------------------


def among_themselves(
    stage: SnapshotStage, *, before: int = 0, suspends: str = "", weaker: bool = False
) -> Snapshot:
    """``before``: how many copies of each image the job's newest snapshot has."""
    job, holders = a_job(), {f"gpt/{i}": f"h{(i + 1) % 3}" for i in range(3)}
    owners = {c.name: (c.host, c.epoch) for c in job.capsules.values()}
    two = {name: [holders[name], owners[name][0]][:before] for name in holders}
    if before:
        job.newest = Generation(16, "gpt", "", 5.0, 0, owners, two)
    return Snapshot(stage, 17, job, holders, suspends=suspends, weaker=weaker)


def test_then_the_copy_at_home_is_held_as_well() -> None:
    stage = SnapshotStage()
    made = play(stage, among_themselves(stage)).generation
    assert made is not None
    assert made.holders == {f"gpt/{i}": [f"h{(i + 1) % 3}", f"h{i}"] for i in range(3)}
    assert [made.home(capsule) for capsule in made.owners] == ["", "", ""]
    holds = of(stage, messages.Hold)
    assert [m.own for _, m in holds] == [False] * 3 + [True] * 3, (
        "copies take the room that is left"
    )
    for host, m in holds:
        own, other = f"gpt/{host[1:]}", f"gpt/{(int(host[1:]) - 1) % 3}"
        assert (m.spec.name, m.stays) == ((own, True) if m.own else (other, False))
        assert set(m.together) == ({own, other} if m.own else {other})


@pytest.mark.parametrize("base", [0, 3, 4])
def test_all_memory_goes_unless_both_have_the_same(base: int) -> None:
    """The copy at home must become whole: it may be the one that is left."""
    stage = SnapshotStage()
    stage.stands = messages.Holding("", base=base, least=2)
    play(stage, among_themselves(stage))
    sent = 4 if base == 4 else 0
    assert {(m.base, m.own, m.least) for m in starts(stage).values()} == {(sent, base, 6)}


@pytest.mark.parametrize("step", ["HoldOwn", "CheckOwn"])
def test_a_neighbour_alone_is_better_than_no_snapshot(step: str) -> None:
    stage = SnapshotStage()
    stage.fail(f"{step} gpt/1", Refused("no memory is left"))
    made = play(stage, among_themselves(stage)).generation
    assert made is not None
    assert made.holders["gpt/1"] == ["h2"]
    assert made.holders["gpt/0"] == ["h1", "h0"]


@pytest.mark.parametrize("step", ["HoldOwn", "CheckOwn", "silence"])
def test_it_takes_no_place_of_a_snapshot_with_two_copies(step: str) -> None:
    """One death after it would lose the job. With the earlier one it would not."""
    stage = SnapshotStage()
    if step == "silence":
        stage.silent.add("CheckOwn gpt/1")
        soon = dataclasses.replace(stage.cluster.timeouts, prepare=2.0)
        stage.cluster = dataclasses.replace(stage.cluster, timeouts=soon)
    else:
        stage.fail(f"{step} gpt/1", Refused("no memory is left"))
    snapshot = play(stage, among_themselves(stage, before=2))
    assert snapshot.generation is None
    assert stage.completed == []
    locked = bool(of(stage, messages.LockCapsule))
    assert locked is (step != "HoldOwn"), "the job is not paused for nothing"


@pytest.mark.parametrize(("before", "weaker"), [(1, False), (2, True)])
def test_it_takes_the_place_of_one_that_is_no_better_or_too_old(before: int, weaker: bool) -> None:
    stage = SnapshotStage()
    stage.fail("HoldOwn gpt/1", Refused("no memory is left"))
    made = play(stage, among_themselves(stage, before=before, weaker=weaker)).generation
    assert made is not None
    assert made.holders["gpt/1"] == ["h2"]


def test_a_suspended_job_leaves_one_image_with_each_neighbour() -> None:
    stage = SnapshotStage()
    asyncio.run(among_themselves(stage, suspends="a person wants it").run())
    ((generation, _),) = stage.suspended
    assert generation.holders == {f"gpt/{i}": [f"h{(i + 1) % 3}"] for i in range(3)}
    together = {host: set(m.together) for host, m in of(stage, messages.Hold)}
    assert together == {f"h{(i + 1) % 3}": {f"gpt/{i}"} for i in range(3)}


def test_an_image_that_its_own_host_holds_is_not_copied_there_as_well() -> None:
    stage = SnapshotStage()
    snapshot = Snapshot(stage, 17, a_job(), {f"gpt/{i}": f"h{i}" for i in range(3)})
    made = play(stage, snapshot).generation
    assert made is not None
    assert made.holders == {f"gpt/{i}": [f"h{i}"] for i in range(3)}
    assert not [m for _, m in of(stage, messages.Hold) if m.own]
