# SPDX-License-Identifier: Apache-2.0
"""The last snapshot before a suspension, told step by step to a stand-in for the orchestrator.

Each step is made to fail in turn. What must hold: until the durable write, nothing is thawed unless
something has failed; after an error all go on; after the write nothing goes on.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from snapshot_stage import (
    BOUNDARY,
    CAPSULES,
    CLUSTER,
    HOLDER,
    WAYS,
    Failure,
    SnapshotStage,
    a_job,
    a_snapshot,
    named,
    play,
)

from liveshift.errors import LiveshiftError, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.cost.model import max_pause
from liveshift.runtime.snapshot.snapshot import Snapshot

WHY = "root wants it"
STEPS = [
    "Inspect",
    "Hold",
    "StartSnapshot",
    "close gates",
    "LockCapsule",
    "DumpCapsule",
    "SealSnapshot",
    "CheckHeld",
    "suspend",
]
OF_CAPSULES = [step for step in STEPS if step not in ("close gates", "suspend")]
AFTER_CUT = ["SealSnapshot", "CheckHeld"]


def the_last(stage: SnapshotStage) -> Snapshot:
    return a_snapshot(stage, suspends=WHY)


def places(stage: SnapshotStage, kind: str) -> list[int]:
    return [place for place, line in enumerate(stage.said) if line.startswith(kind)]


def assert_it_goes_on(stage: SnapshotStage, snapshot: Snapshot) -> None:
    """The job was not suspended; every source that had a session has thawed, and the session has
    ended."""
    assert snapshot.generation is None
    assert isinstance(snapshot.error, LiveshiftError)
    assert stage.suspended == []
    assert stage.completed == []
    begun = {m.capsule for _, m in stage.asked if isinstance(m, messages.StartSnapshot)}
    for end in (messages.ThawCapsule, messages.CloseSnapshot):
        assert {m.capsule for _, m in stage.asked if isinstance(m, end)} == begun
    if "close gates" in stage.said:
        assert stage.said.count("open gates") == 1
        assert max(places(stage, "ThawCapsule")) < stage.said.index("open gates")


def test_the_job_is_suspended_while_all_of_it_is_frozen() -> None:
    stage = SnapshotStage()
    snapshot = the_last(stage)
    asyncio.run(snapshot.run())
    assert [line.partition(" ")[0] for line in stage.said if " gpt/" not in line] == [
        "close",
        "suspend",
    ]
    assert stage.said[-1] == "suspend", "nothing is thawed, closed or opened after it"
    assert not places(stage, "ThawCapsule")
    assert not places(stage, "CloseSnapshot")
    assert "complete" not in stage.said
    assert stage.locked == CAPSULES
    assert stage.gates_closed
    assert snapshot.released.is_set()
    assert snapshot.error is None
    assert list(snapshot.seconds) == ["quiesce", "lock", "dump", "seal"]


def test_what_is_suspended_is_what_was_frozen_and_why_is_passed_on() -> None:
    stage = SnapshotStage()
    snapshot = the_last(stage)
    asyncio.run(snapshot.run())
    assert snapshot.generation is not None
    assert stage.suspended == [(snapshot.generation, WHY)]
    made = snapshot.generation
    assert (made.number, made.job, made.boundary, made.rewinds) == (17, "gpt", BOUNDARY, 0)
    assert made.owners == {f"gpt/{i}": (f"h{i}", 1) for i in range(3)}
    assert made.holders == {f"gpt/{i}": [HOLDER] for i in range(3)}
    assert made.bytes == 300


@pytest.mark.parametrize("slow", sorted(CAPSULES))
def test_no_source_seals_before_all_are_dumped_and_no_holder_checks_before_all_are_sealed(
    slow: str,
) -> None:
    stage = SnapshotStage()
    stage.slow |= {f"DumpCapsule {slow}", f"SealSnapshot {slow}", f"CheckHeld {slow}"}
    dumped_at_seal: list[int] = []

    def watch(line: str) -> None:
        if line.startswith("SealSnapshot"):
            dumped_at_seal.append(len(stage.dumped))

    stage.watch = watch
    asyncio.run(the_last(stage).run())
    assert dumped_at_seal == [len(CAPSULES)] * len(CAPSULES)
    sealed = {m.capsule for _, m in stage.asked if isinstance(m, messages.SealSnapshot)}
    assert sealed == CAPSULES
    assert max(places(stage, "SealSnapshot")) < min(places(stage, "CheckHeld"))
    assert max(places(stage, "CheckHeld")) < stage.said.index("suspend")
    assert {locked for _, all_ in stage.dumped for locked in all_} == CAPSULES


def test_each_source_seals_its_own_image_and_the_holder_compares_that_digest() -> None:
    stage = SnapshotStage()
    asyncio.run(the_last(stage).run())
    seals = [(host, m) for host, m in stage.asked if isinstance(m, messages.SealSnapshot)]
    assert {(host, m.image, m.capsule) for host, m in seals} == {
        (f"h{i}", f"s17.{i}", f"gpt/{i}") for i in range(3)
    }
    checks = [(host, m) for host, m in stage.asked if isinstance(m, messages.CheckHeld)]
    assert {(host, m.digest) for host, m in checks} == {(HOLDER, b"digest")}


@pytest.mark.parametrize("way", WAYS, ids=named)
@pytest.mark.parametrize(
    ("step", "capsule"),
    [*((step, "") for step in STEPS), *((step, "gpt/1") for step in OF_CAPSULES)],
)
def test_after_a_step_that_fails_all_go_on_and_the_job_is_not_suspended(
    step: str, capsule: str, way: Failure
) -> None:
    stage = SnapshotStage()
    stage.fail(f"{step} {capsule}".strip(), way)
    snapshot = play(stage, the_last(stage))
    assert_it_goes_on(stage, snapshot)
    assert str(way) in str(snapshot.error)


@pytest.mark.parametrize("capsule", sorted(CAPSULES))
@pytest.mark.parametrize("step", OF_CAPSULES)
def test_after_an_answer_that_is_lost_all_go_on(step: str, capsule: str) -> None:
    stage = SnapshotStage()
    stage.lose(f"{step} {capsule}", Unreachable("the answer was lost"))
    snapshot = play(stage, the_last(stage))
    assert_it_goes_on(stage, snapshot)
    assert "the answer was lost" in str(snapshot.error)


@pytest.mark.parametrize("step", [step for step in OF_CAPSULES if step != "LockCapsule"])
def test_after_an_answer_of_another_type_all_go_on(step: str) -> None:
    stage = SnapshotStage()
    stage.fail(step, messages.Settled("held"))
    assert_it_goes_on(stage, play(stage, the_last(stage)))


def test_an_image_without_a_digest_is_not_checked_and_all_go_on() -> None:
    stage = SnapshotStage()
    stage.fail("SealSnapshot gpt/1", messages.SnapshotClosed(b""))
    snapshot = play(stage, the_last(stage))
    assert_it_goes_on(stage, snapshot)
    assert "h1 has not sent the whole image of gpt/1 to h3" in str(snapshot.error)


@pytest.mark.parametrize("step", ["LockCapsule", "DumpCapsule", *AFTER_CUT])
def test_a_job_whose_pause_lasts_too_long_is_not_suspended(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sources have thawed by themselves by then."""
    stage, late = SnapshotStage(), [0.0]
    real = time.monotonic
    monkeypatch.setattr(
        "liveshift.runtime.snapshot.snapshot.time.monotonic", lambda: real() + late[0]
    )

    def watch(line: str) -> None:
        late[0] = 3600.0 if line.startswith(step) else late[0]

    stage.watch = watch
    snapshot = play(stage, the_last(stage))
    assert_it_goes_on(stage, snapshot)
    assert "s17 would pause gpt for too long" in str(snapshot.error)
    assert "suspend" not in stage.said


@pytest.mark.parametrize(("left", "suspended"), [(0.5, False), (5.0, True)])
def test_a_job_is_not_suspended_in_the_last_moment_of_its_pause(
    left: float, suspended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sources would thaw before they learn of it, and the resumed job would repeat that."""
    stage, late = SnapshotStage(), [0.0]
    real, began = time.monotonic, time.monotonic()
    pause = max_pause(CLUSTER.precopy, CLUSTER.timeouts)
    monkeypatch.setattr(
        "liveshift.runtime.snapshot.snapshot.time.monotonic", lambda: real() + late[0]
    )

    def watch(line: str) -> None:
        if line.startswith("CheckHeld"):
            late[0] = pause - left - (real() - began)

    stage.watch = watch
    snapshot = the_last(stage)
    asyncio.run(snapshot.run())
    assert ("suspend" in stage.said) == suspended
    if not suspended:
        assert_it_goes_on(stage, snapshot)
        assert "s17 would pause gpt for too long" in str(snapshot.error)


def test_a_source_that_has_gone_on_by_itself_ends_the_attempt() -> None:
    stage = SnapshotStage()

    def watch(line: str) -> None:
        if line == "SealSnapshot gpt/0":
            stage.over.add("gpt/1")
            stage.locked.discard("gpt/1")

    stage.watch = watch
    snapshot = play(stage, the_last(stage))
    assert_it_goes_on(stage, snapshot)
    assert "s17 is over where gpt/1 runs" in str(snapshot.error)


@pytest.mark.parametrize("step", STEPS[: STEPS.index("SealSnapshot")])
def test_one_that_is_given_up_before_the_cut_suspends_nothing(step: str) -> None:
    stage = SnapshotStage()
    snapshot = the_last(stage)

    def watch(line: str) -> None:
        if line.startswith(step):
            snapshot.abandon("m3 of gpt/0 began")

    stage.watch = watch
    play(stage, snapshot)
    assert_it_goes_on(stage, snapshot)
    assert snapshot.abandoned


def test_gates_that_a_migration_holds_are_not_touched() -> None:
    stage = SnapshotStage()
    stage.at = "m3"
    snapshot = play(stage, the_last(stage))
    assert "m3 holds the ranks of gpt" in str(snapshot.error)
    assert stage.suspended == []
    assert not {"close gates", "open gates"} & set(stage.said)


def test_a_move_that_waits_for_the_gates_goes_on_only_after_the_write() -> None:
    """``released`` is what it waits for."""
    stage = SnapshotStage()
    snapshot = the_last(stage)
    seen: dict[str, Any] = {}
    stage.watch = lambda line: seen.update({line: snapshot.released.is_set()})
    asyncio.run(snapshot.run())
    assert seen["LockCapsule gpt/0"] is False
    assert seen["suspend"] is False
    assert snapshot.released.is_set()


def test_a_snapshot_that_suspends_nothing_seals_nothing() -> None:
    stage = SnapshotStage()
    assert play(stage, a_snapshot(stage, a_job())).generation is not None
    assert not places(stage, "SealSnapshot")
    assert stage.suspended == []
