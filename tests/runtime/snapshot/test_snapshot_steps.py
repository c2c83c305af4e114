# SPDX-License-Identifier: Apache-2.0
"""A snapshot told step by step to a stand-in for the orchestrator and its agents.

Each step is made to fail in turn, and each answer to be lost. What must hold: no source dumps
before all are locked, nothing stays locked, the gates open, and only what is whole counts.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from gpu_scenes import GIB, H200, gpu_host, gpu_survey, process
from snapshot_stage import (
    BOUNDARY,
    CAPSULES,
    FACTS,
    HOLDER,
    SURVEY,
    WAYS,
    Failure,
    SnapshotStage,
    a_job,
    a_snapshot,
    named,
    of,
    play,
)

from liveshift.criu_glue.survey.found import Along
from liveshift.errors import Refused, StepFailed, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.cost.model import max_pause
from liveshift.runtime.messages import GpuSeat, GpuSurvey
from liveshift.runtime.migration.context import NoBoundary
from liveshift.runtime.model.snapshots import Generation
from liveshift.runtime.model.spares import GpuNeed
from liveshift.runtime.snapshot.snapshot import Snapshot

STEPS = [
    "Inspect",
    "Hold",
    "StartSnapshot",
    "close gates",
    "LockCapsule",
    "DumpCapsule",
    "CloseSnapshot",
    "CheckHeld",
    "complete",
]
ANSWERED = [step for step in STEPS if step not in ("close gates", "complete")]
BEFORE_CUT = STEPS[: STEPS.index("CloseSnapshot")]


A0 = gpu_host().gpus[0].uuid


def on_gpus(size: int = 2, **fields: Any) -> GpuSurvey:
    """A capsule with so many GiB on the GPU of its host."""
    return gpu_survey(process({A0: size * GIB}), **fields)


def places(stage: SnapshotStage, kind: str) -> list[int]:
    found = [n for n, line in enumerate(stage.said) if line.startswith(kind)]
    assert len(found) == len(CAPSULES), f"{kind}: {stage.said}"
    return found


def test_networks_may_be_locked_from_the_lock_until_the_gates_are_released() -> None:
    """While the job comes to a boundary, a peer that gives no answer is cut off."""
    stage = SnapshotStage()
    snapshot, seen = a_snapshot(stage, a_job()), dict[str, bool]()

    def watch(line: str) -> None:
        seen.setdefault(line.partition(" gpt")[0], snapshot.locks)

    stage.watch = watch
    play(stage, snapshot)
    assert snapshot.generation is not None
    at = ("StartSnapshot", "close gates", "LockCapsule", "DumpCapsule", "open gates", "CheckHeld")
    assert [seen[step] for step in at] == [False, False, True, True, True, False]
    snapshot = a_snapshot(stage, a_job())
    seen.clear()
    asyncio.run(snapshot.recover())
    assert seen["ThawCapsule"], "an earlier orchestrator may have locked them"
    assert not snapshot.locks


def test_the_order_of_the_steps() -> None:
    stage = SnapshotStage()
    snapshot = play(stage)
    closed, opened, completed = (
        [stage.said.index(word)] for word in ("close gates", "open gates", "complete")
    )
    order = [
        *(places(stage, kind) for kind in ("Inspect", "Hold ", "HoldOwn ", "StartSnapshot")),
        closed,
        *(places(stage, kind) for kind in ("LockCapsule", "DumpCapsule", "ThawCapsule")),
        opened,
        *(places(stage, kind) for kind in ("CloseSnapshot", "CheckHeld")),
        completed,
    ]
    for before, after in itertools.pairwise(order):
        assert max(before) < min(after), stage.said
    others = places(stage, "CheckOwn")  # beside CheckHeld
    assert max(others) < completed[0]
    assert len(stage.said) == sum(map(len, [*order, others])), "nothing else was asked"
    assert list(snapshot.seconds) == ["quiesce", "lock", "dump", "thaw", "reopen"]
    assert snapshot.pause_s > 0


def test_the_generation() -> None:
    stage = SnapshotStage()
    made = play(stage).generation
    assert made is not None
    assert stage.completed == [made]
    assert (made.number, made.job, made.boundary, made.rewinds) == (17, "gpt", BOUNDARY, 0)
    assert made.owners == {f"gpt/{i}": (f"h{i}", 1) for i in range(3)}
    assert made.holders == {f"gpt/{i}": [HOLDER] for i in range(3)}
    assert made.bytes == 300


@pytest.mark.parametrize("slow", sorted(CAPSULES))
def test_no_source_dumps_before_all_are_locked(slow: str) -> None:
    stage = SnapshotStage()
    stage.slow.add(f"LockCapsule {slow}")
    play(stage)
    assert {capsule for capsule, _ in stage.dumped} == CAPSULES
    assert stage.dumped[0][1] == CAPSULES, "there was a moment at which all were locked"
    assert all(locked == CAPSULES for _, locked in stage.dumped)


def test_a_source_that_opens_its_lock_by_itself_fails_the_snapshot() -> None:
    """As one whose agent was restarted between the two orders."""
    stage = SnapshotStage()

    def restart(line: str) -> None:
        if line == "DumpCapsule gpt/1":
            stage.over.add("gpt/1")
            stage.locked.discard("gpt/1")

    stage.watch = restart
    snapshot = play(stage)
    assert "s17 is over where gpt/1 runs" in str(snapshot.error)


@pytest.mark.parametrize("slow", sorted(CAPSULES))
def test_no_source_thaws_before_all_are_dumped(slow: str) -> None:
    """Else what one writes to a shared file after its dump lies before what another one writes
    before its own."""
    stage = SnapshotStage()
    stage.slow.add(f"DumpCapsule {slow}")
    play(stage)
    assert stage.dumped[-1] == (slow, CAPSULES), "the others were still frozen"
    assert max(places(stage, "DumpCapsule")) < min(places(stage, "ThawCapsule"))


@pytest.mark.parametrize("way", WAYS, ids=named)
@pytest.mark.parametrize(
    ("step", "capsule"),
    [*((step, "") for step in STEPS), *((step, c) for step in ANSWERED for c in sorted(CAPSULES))],
)
def test_a_step_that_fails_fails_only_the_snapshot(step: str, capsule: str, way: Failure) -> None:
    stage = SnapshotStage()
    stage.fail(f"{step} {capsule}".strip(), way)
    snapshot = play(stage)
    assert snapshot.error is not None
    assert step == "CloseSnapshot" or str(way) in str(snapshot.error)
    assert stage.completed == []
    begun = {message.capsule for _, message in of(stage, messages.StartSnapshot)}
    assert {message.capsule for _, message in of(stage, messages.CloseSnapshot)} == begun
    assert {message.capsule for _, message in of(stage, messages.ThawCapsule)} == begun


@pytest.mark.parametrize("capsule", sorted(CAPSULES))
@pytest.mark.parametrize("step", ANSWERED)
def test_an_answer_that_is_lost_fails_only_the_snapshot(step: str, capsule: str) -> None:
    stage = SnapshotStage()
    stage.lose(f"{step} {capsule}", Unreachable("the answer was lost"))
    snapshot = play(stage)
    assert snapshot.error is not None
    assert stage.completed == []


@pytest.mark.parametrize("step", [step for step in ANSWERED if step != "LockCapsule"])
def test_an_answer_of_another_type_fails_only_the_snapshot(step: str) -> None:
    stage = SnapshotStage()
    stage.fail(step, messages.Settled("held"))
    assert play(stage).generation is None


@pytest.mark.parametrize("lost", [False, True])
def test_a_thaw_is_repeated_until_it_is_answered(lost: bool) -> None:
    stage = SnapshotStage()
    ways = [Unreachable("h1 did not answer"), StepFailed("thaw", "not yet")]
    (stage.lose if lost else stage.fail)("ThawCapsule gpt/1", *ways)
    assert play(stage).generation is not None
    assert stage.said.count("ThawCapsule gpt/1") == 3


def test_a_source_that_stays_silent_is_left_to_thaw_by_itself() -> None:
    stage = SnapshotStage()
    stage.lose("ThawCapsule gpt/1", *[Unreachable("h1 is silent")] * 1000)
    assert play(stage).generation is not None
    assert 3 < stage.said.count("ThawCapsule gpt/1") < 100


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_host_that_is_silent_keeps_no_gates_closed_elsewhere(comes_back: bool) -> None:
    """Else the others could not show that the job trains, and it would be rewound."""
    stage = SnapshotStage()
    silent = [Unreachable("h1 is silent")] * 1000
    stage.fail("DumpCapsule gpt/1", silent[0])
    stage.fail("ThawCapsule gpt/1", *silent)

    def watch(line: str) -> None:
        if line == "DumpCapsule gpt/1":
            stage.down.add("h1")
        elif line == "open gates" and comes_back:
            stage.fails.pop("ThawCapsule gpt/1")

    stage.watch = watch
    assert play(stage).generation is None
    opened = stage.said.index("open gates")
    thaws = [at for at, line in enumerate(stage.said) if line == "ThawCapsule gpt/1"]
    assert thaws[0] < opened < thaws[-1]
    assert len(thaws) == 2 if comes_back else 3 < len(thaws) < 100
    assert stage.said.index("CloseSnapshot gpt/1") > thaws[-1]


def test_a_job_that_talks_over_tcp_is_frozen_in_place_without_a_boundary() -> None:
    stage = SnapshotStage()
    stage.fail("close gates", NoBoundary("rank 1 owes an all-reduce", only_tcp=True))
    made = play(stage).generation
    assert made is not None
    assert made.boundary == "frozen in place: rank 1 owes an all-reduce"
    assert stage.dumped[0][1] == CAPSULES


def test_without_a_boundary_nothing_is_locked() -> None:
    stage = SnapshotStage()
    stage.fail("close gates", NoBoundary("rank 1 owes an all-reduce", only_tcp=False))
    assert play(stage).generation is None
    assert of(stage, messages.LockCapsule) == []


def test_gates_that_a_migration_holds_are_not_touched() -> None:
    stage = SnapshotStage()
    stage.at = "m3"
    snapshot = play(stage)
    assert "m3 holds the ranks of gpt" in str(snapshot.error)
    assert "close gates" not in stage.said
    assert "open gates" not in stage.said


@pytest.mark.parametrize("step", BEFORE_CUT)
def test_a_snapshot_that_is_abandoned_leaves_nothing(step: str) -> None:
    stage = SnapshotStage()
    snapshot = a_snapshot(stage)

    def abandon(line: str) -> None:
        if line.startswith(step):
            snapshot.abandon("m3 of gpt/0 began")

    stage.watch = abandon
    play(stage, snapshot)
    assert snapshot.abandoned
    assert str(snapshot.error) == "given up: m3 of gpt/0 began"
    assert stage.completed == []


def test_a_snapshot_that_is_abandoned_before_it_begins_asks_nothing() -> None:
    stage = SnapshotStage()
    snapshot = a_snapshot(stage)
    snapshot.abandon("m3 of gpt/0 began")
    play(stage, snapshot)
    assert snapshot.abandoned
    assert stage.said == []


@pytest.mark.parametrize("step", ["CloseSnapshot", "CheckHeld"])
def test_a_snapshot_whose_job_goes_on_already_is_completed(step: str) -> None:
    stage = SnapshotStage()
    snapshot = a_snapshot(stage)

    def abandon(line: str) -> None:
        if line.startswith(step):
            snapshot.abandon("m3 of gpt/0 began")

    stage.watch = abandon
    play(stage, snapshot)
    assert not snapshot.abandoned
    assert stage.completed == [snapshot.generation]


@pytest.mark.parametrize("change", ["moved", "ended", "stopping", "rewound"])
def test_a_job_that_has_changed_is_not_paused(change: str) -> None:
    stage, job = SnapshotStage(), a_job()

    def happen(line: str) -> None:
        if not line.startswith("StartSnapshot"):
            return
        capsule = job.capsules["gpt/1"]
        if change == "moved":
            capsule.host, capsule.epoch = "h3", 2
        elif change == "ended":
            capsule.code = 0
        elif change == "stopping":
            job.state = "ending"
        else:
            job.rewinds = 1

    stage.watch = happen
    snapshot = play(stage, a_snapshot(stage, job))
    assert "gpt has changed since s17 began" in str(snapshot.error)
    assert "close gates" not in stage.said
    hosts = {host for host, _ in of(stage, messages.ThawCapsule)}
    assert hosts == {"h0", "h1", "h2"}, "the sessions are where the capsules were"


def test_a_holder_that_refuses_is_named() -> None:
    stage = SnapshotStage()
    stage.fail("Hold gpt/1", Refused("h3 cannot hold s17.1", hint="9 GB would do"))
    snapshot = play(stage)
    assert snapshot.refused == {HOLDER}
    assert snapshot.error is not None
    assert snapshot.error.hint == "9 GB would do"


@pytest.mark.parametrize("step", ["Hold gpt/1", "CheckHeld gpt/1"])
def test_one_that_does_not_answer_or_has_something_else_is_named_too(step: str) -> None:
    stage = SnapshotStage()
    stage.fail(step, StepFailed("snapshot", "the digests differ"))
    assert play(stage).refused == {HOLDER}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"gpu": on_gpus(problems=[("it has managed memory", "")])}, "it has managed memory"),
        ({"gpu": on_gpus(memory=GIB)}, "its 2.15 GB of device memory into host memory, of which"),
        ({"gpu": on_gpus(200)}, "need at least 107 s off the GPU and back, and a pause may last"),
        ({"full_dump": "h0 has no userfaultfd"}, "cannot be copied while it trains: h0 has no"),
        (
            {"survey": replace(SURVEY, linked=("/scratch/log",))},
            "/scratch/log, which is open for writing on a carried path, has other names too",
        ),
    ],
)
def test_what_cannot_be_taken_back_is_refused_in_words(found: dict[str, Any], words: str) -> None:
    stage = SnapshotStage()
    look = msgspec.structs.replace(messages.Inspected(SURVEY, FACTS, 5), **found)
    stage.fail("Inspect gpt/1", look)
    snapshot = play(stage)
    assert isinstance(snapshot.error, Refused)
    assert str(snapshot.error).startswith("gpt/1 can have no snapshot: ")
    assert words in str(snapshot.error)
    assert snapshot.refused == set(), "no holder is to blame"


def test_device_memory_is_part_of_an_image() -> None:
    """The holder makes room for it, the source knows the GPUs, and a rewind knows what it needs."""
    stage, found = SnapshotStage(), on_gpus()
    look = msgspec.structs.replace(messages.Inspected(SURVEY, FACTS, 5), gpu=found)
    stage.fail("Inspect gpt/1", look)
    made = play(stage).generation
    assert made is not None
    assert made.gpus == {"gpt/1": GpuNeed(frozenset(found.used), (GpuSeat(A0, H200, False),))}
    holds = {m.spec.name: m for _, m in of(stage, messages.Hold) if not m.own}
    assert [holds[name].gpu for name in sorted(holds)] == [None, found, None]
    together = holds["gpt/1"].together
    assert together["gpt/1"] - together["gpt/0"] == 2 * GIB
    starts = {message.capsule: message.gpus for _, message in of(stage, messages.StartSnapshot)}
    assert starts == {"gpt/0": [], "gpt/1": [A0], "gpt/2": []}


def by_itself(stage: SnapshotStage) -> Snapshot:
    """A snapshot that nobody has asked for."""
    return Snapshot(stage, 17, a_job(), dict.fromkeys(CAPSULES, HOLDER), asked=False)


def test_a_job_that_uses_gpus_has_no_snapshots_by_default() -> None:
    stage = SnapshotStage()
    look = msgspec.structs.replace(messages.Inspected(SURVEY, FACTS, 5), gpu=on_gpus())
    stage.fail("Inspect gpt/1", look)
    snapshot = play(stage, by_itself(stage))
    assert snapshot.generation is None
    assert "gpt/1 uses a GPU, and such jobs have snapshots only if" in str(snapshot.error)
    assert {line.split()[0] for line in stage.said} <= {"Inspect", "ThawCapsule", "CloseSnapshot"}
    stage = SnapshotStage()
    assert play(stage, by_itself(stage)).generation is not None


def test_a_capsule_that_is_not_back_on_its_gpus_is_named() -> None:
    """Its source tries again by itself; the image is whole."""
    stage = SnapshotStage()
    look = msgspec.structs.replace(messages.Inspected(SURVEY, FACTS, 5), gpu=on_gpus())
    stage.fail("Inspect gpt/1", look)
    stage.fail("ThawCapsule gpt/1", StepFailed("gpu restore", "too little memory"))
    snapshot = play(stage)
    assert snapshot.generation is not None
    (problem,) = snapshot.problems
    assert "gpt/1 did not go on at once on h1: " in problem
    assert "too little memory" in problem


SCRATCH = replace(SURVEY, along=(Along("/tmp", 5, 9, 0), Along("/scratch", 2, 9, 0)))


def test_which_capsules_have_files_on_carried_paths() -> None:
    stage = SnapshotStage()
    for capsule in sorted(CAPSULES)[:2]:
        stage.fail(f"Inspect {capsule}", messages.Inspected(SCRATCH, FACTS, 5))
    generation = play(stage).generation
    assert generation is not None
    assert generation.carried == sorted(CAPSULES)[:2]


def test_carried_paths_without_files_and_tmp_are_no_obstacle() -> None:
    stage, job = SnapshotStage(), a_job()
    job.capsules["gpt/2"].host = "h1"
    along = (Along("/tmp", 5, 9, 0), Along("/scratch", 1, 0, 0))
    for capsule in ("gpt/1", "gpt/2"):
        look = messages.Inspected(replace(SURVEY, along=along), FACTS, 5)
        stage.fail(f"Inspect {capsule}", look)
    generation = play(stage, a_snapshot(stage, job)).generation
    assert generation is not None
    assert generation.carried == []


def test_what_each_side_is_told() -> None:
    stage = SnapshotStage()
    play(stage)
    pause = max_pause(stage.cluster.precopy, stage.cluster.timeouts)
    (hold,) = [m for host, m in of(stage, messages.Hold) if m.image == "s17.1" and host == HOLDER]
    assert all(look.snapshot for _, look in of(stage, messages.Inspect)), "no full dump would do"
    assert (hold.source, hold.epoch, hold.rewinds, hold.spec.name) == ("h1", 1, 0, "gpt/1")
    assert hold.limit_bytes > 2 * (300 + 20)
    assert hold.newest == 0
    (start,) = [message for host, message in of(stage, messages.StartSnapshot) if host == "h1"]
    assert (start.image, start.capsule, start.holder) == ("s17.1", "gpt/1", HOLDER)
    assert (start.endpoint, start.base) == ("tcp://10.88.0.13:7401", 4)
    assert 0 < start.deadline < stage.cluster.timeouts.precopy
    for kind in (messages.LockCapsule, messages.DumpCapsule):
        for host, message in of(stage, kind):
            assert host == f"h{message.capsule[-1]}"
            assert 0 < message.deadline <= pause
    assert {m.digest for _, m in of(stage, messages.CheckHeld)} == {b"digest"}
    assert [host for host, _ in of(stage, messages.CheckHeld)].count(HOLDER) == 3


def test_holders_are_told_which_snapshot_they_must_keep() -> None:
    stage, job = SnapshotStage(), a_job()
    job.newest = Generation(12, job.name, "step 9", 100.0, 0, {}, {})
    assert play(stage, a_snapshot(stage, job)).generation is not None
    assert {hold.newest for _, hold in of(stage, messages.Hold)} == {12}


@pytest.mark.parametrize("at", ["", "m3"])
def test_what_an_earlier_orchestrator_has_left_is_undone(at: str) -> None:
    stage = SnapshotStage()
    stage.at, stage.gates_closed, stage.locked = at, not at, set(CAPSULES)
    snapshot = a_snapshot(stage)
    asyncio.run(snapshot.recover())
    assert stage.locked == set()
    assert not stage.gates_closed
    assert ("open gates" in stage.said) is not bool(at), "a migration opens them itself"
    assert snapshot.error is not None
    assert snapshot.generation is None
    places(stage, "CloseSnapshot")
