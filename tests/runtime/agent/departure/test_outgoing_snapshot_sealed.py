# SPDX-License-Identifier: Apache-2.0
"""A snapshot at its source before a suspension: its digest is made while the capsule is frozen, and
the capsule stays so until it is ended or has to go on. CRIU and the rest are stand-ins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from outgoing_scene import OPENED
from snapshot_scene import AHEAD, CLOSE, DIGEST, DUMP, LOCK, THAW, SnapshotScene, snapshots

from liveshift.errors import StepFailed
from liveshift.runtime.agent.departure.outgoing_phase import SnapshotPhase

__all__ = ["snapshots"]

FROZEN = [*AHEAD, *LOCK, *DUMP]
SEALED = [*FROZEN, "remembered", "digest"]
"""Which files leave with it is noted: those that it deletes elsewhere must not reappear here."""
STEPS = ("ahead", "lock", "dump")
OVER = r"s17\.1 is over on h0, where gpt/1 goes on"


def phase(scene: SnapshotScene) -> SnapshotPhase:
    """Read again: a type checker takes an attribute for what the last assertion found."""
    return scene.snapshot.phase


def frozen(scene: SnapshotScene, seconds: float = 60.0) -> None:
    """Dump the capsule within so many seconds."""
    scene.ahead()
    scene.lock(seconds)
    scene.dump()


def test_the_digest_is_made_while_the_capsule_is_frozen(snapshots: SnapshotScene) -> None:
    frozen(snapshots)
    assert snapshots.snapshot.seal() == DIGEST
    assert snapshots.snapshot.digest == DIGEST
    assert snapshots.done == SEALED
    assert phase(snapshots) is SnapshotPhase.DUMPED
    assert snapshots.resident.still, "signals are held back"
    assert OPENED not in snapshots.done, "the network stays locked"
    assert not snapshots.snapshot.closed


def test_a_seal_may_be_repeated_and_makes_the_digest_once(snapshots: SnapshotScene) -> None:
    """The first answer may have been lost."""
    frozen(snapshots)
    assert [snapshots.snapshot.seal() for _ in range(3)] == [DIGEST] * 3
    assert snapshots.done == SEALED


@pytest.mark.parametrize("end", ["thaw", "close", "abandon"])
def test_a_sealed_capsule_goes_on_if_it_is_not_suspended(
    snapshots: SnapshotScene, end: str
) -> None:
    frozen(snapshots)
    snapshots.snapshot.seal()
    getattr(snapshots.snapshot, end)()
    snapshots.ends()
    assert snapshots.done == [*SEALED, *THAW, *CLOSE], "the digest is made once"
    assert snapshots.snapshot.digest == DIGEST
    assert snapshots.goes_on()


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ((), "it is not begun"),
        (STEPS[:1], "it is sent ahead"),
        (STEPS[:2], "it is locked"),
    ],
)
def test_what_is_not_dumped_is_not_sealed_and_nothing_changes(
    snapshots: SnapshotScene, steps: tuple[str, ...], why: str
) -> None:
    for step in steps:
        getattr(snapshots, step)()
    done, before = list(snapshots.done), phase(snapshots)
    with pytest.raises(StepFailed, match=rf"s17\.1 of gpt/1 cannot do this: {why}"):
        snapshots.snapshot.seal()
    assert (snapshots.done, phase(snapshots)) == (done, before)


@pytest.mark.parametrize("end", ["thaw", "close", "abandon"])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_capsule_that_goes_on_is_not_sealed(
    snapshots: SnapshotScene, end: str, sealed: bool
) -> None:
    frozen(snapshots)
    if sealed:
        snapshots.snapshot.seal()
    getattr(snapshots.snapshot, end)()
    with pytest.raises(StepFailed, match=OVER):
        snapshots.snapshot.seal()
    snapshots.ends()
    assert snapshots.goes_on()


@pytest.mark.parametrize("sealed", [False, True])
def test_a_capsule_that_its_timer_has_thawed_is_not_sealed(
    snapshots: SnapshotScene, sealed: bool
) -> None:
    """What it has done since is not in the image: the orchestrator must not suspend the job."""
    frozen(snapshots, 0.4)
    if sealed:
        snapshots.snapshot.seal()
    snapshots.ends()
    with pytest.raises(StepFailed, match=OVER):
        snapshots.snapshot.seal()
    assert snapshots.goes_on()


def test_an_image_without_a_digest_is_not_whole_and_the_capsule_goes_on(
    snapshots: SnapshotScene,
) -> None:
    frozen(snapshots)
    snapshots.fails = "digest"
    with pytest.raises(StepFailed, match="the image of gpt/1 is not whole"):
        snapshots.snapshot.seal()
    snapshots.ends()
    assert (snapshots.snapshot.digest, snapshots.snapshot.complete) == (b"", False)
    assert "returned 0" in snapshots.done, "the next snapshot sends all"
    assert snapshots.goes_on()
    with pytest.raises(StepFailed, match=OVER):
        snapshots.snapshot.seal()


def test_after_any_other_error_the_capsule_goes_on_before_the_rest_is_tried_again(
    snapshots: SnapshotScene,
) -> None:
    frozen(snapshots)
    snapshots.fails, snapshots.error = "digest", lambda _: OSError(28, "no space")
    with pytest.raises(OSError, match="no space"):
        snapshots.snapshot.seal()
    assert not snapshots.resident.still
    assert OPENED in snapshots.done
    assert phase(snapshots) is SnapshotPhase.OVER
    snapshots.fails = ""
    snapshots.snapshot.close()
    assert snapshots.goes_on()


def test_steps_before_a_seal_are_refused_after_it(snapshots: SnapshotScene) -> None:
    frozen(snapshots)
    snapshots.snapshot.seal()
    late: list[Callable[[], object]] = [snapshots.ahead, snapshots.lock, snapshots.dump]
    for step in late:
        with pytest.raises(StepFailed, match="it is dumped"):
            step()
    assert snapshots.done == SEALED


def test_a_sealed_capsule_that_was_killed_has_no_network(snapshots: SnapshotScene) -> None:
    """As one whose job was suspended."""
    frozen(snapshots)
    snapshots.snapshot.seal()
    snapshots.alive = False
    snapshots.snapshot.close()
    assert OPENED not in snapshots.done
    assert phase(snapshots) is SnapshotPhase.OVER
