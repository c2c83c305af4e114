# SPDX-License-Identifier: Apache-2.0
"""A snapshot at its source: its order, and that the capsule goes on after every error, after its
time, and after a restart. CRIU, wire, network, memory and tracker are stand-ins."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from outgoing_scene import INIT, LOCKED, OPENED, PREPARED
from snapshot_scene import (
    AHEAD,
    CLOSE,
    DIGEST,
    DUMP,
    LENT,
    LOCK,
    THAW,
    SnapshotScene,
    snapshots,
)
from waits import until

from liveshift.errors import StepFailed
from liveshift.runtime.agent.departure.outgoing_migration import OutgoingMigration
from liveshift.runtime.agent.departure.outgoing_note import NOTE, OutgoingNote, has_promised
from liveshift.runtime.agent.departure.outgoing_phase import SnapshotPhase

__all__ = ["snapshots"]


def phase(scene: SnapshotScene) -> SnapshotPhase:
    """Read again: a type checker takes an attribute for what the last assertion found."""
    return scene.snapshot.phase


def test_the_capsule_is_locked_then_dumped_then_goes_on(snapshots: SnapshotScene) -> None:
    scene = snapshots
    scene.ahead()
    assert (scene.done, phase(scene)) == (AHEAD, SnapshotPhase.AHEAD)
    scene.lock()
    assert (scene.done, phase(scene)) == ([*AHEAD, *LOCK], SnapshotPhase.LOCKED)
    assert scene.resident.still
    scene.dump()
    assert (scene.done, phase(scene)) == ([*AHEAD, *LOCK, *DUMP], SnapshotPhase.DUMPED)
    assert scene.snapshot.complete
    scene.snapshot.thaw()
    assert scene.done[: len(AHEAD + LOCK + DUMP) + 2] == [*AHEAD, *LOCK, *DUMP, *THAW]
    assert not scene.resident.still
    scene.ends()
    assert scene.done == [*AHEAD, *LOCK, *DUMP, *THAW, "digest", *CLOSE]
    assert scene.snapshot.digest == DIGEST
    assert scene.goes_on()


@pytest.mark.parametrize(
    ("own", "sends_all", "given_up"),
    [
        (None, False, False),
        (16, False, False),
        (15, False, True),
        (0, False, True),
        (0, True, False),
    ],
)
def test_a_copy_that_would_lack_pages_is_given_up_before_anything_comes(
    snapshots: SnapshotScene, own: int | None, sends_all: bool, given_up: bool
) -> None:
    snapshots.own, snapshots.tracker.sends_all = own, sends_all
    snapshots.ahead()
    assert ("copy given up" in snapshots.done) is given_up
    if given_up:
        assert snapshots.done.index("copy given up") < snapshots.done.index("memory begun")


def test_what_the_pause_consists_of_is_listed(snapshots: SnapshotScene) -> None:
    moved = snapshots.ahead()
    assert [each.name for each in moved.phases] == ["files ahead", "pre-copy"]
    assert not any(each.frozen for each in moved.phases)
    snapshots.lock()
    time.sleep(0.05)
    frozen = snapshots.dump()
    names = ["lock", "barrier", "check", "dump", "files", "ship", "manifest"]
    assert [each.name for each in frozen.phases] == names
    assert all(each.frozen for each in frozen.phases)
    barrier = frozen.phases[1]
    assert barrier.seconds >= 0.05, "the wait for the others is no part of the dump"


def test_a_source_promises_nothing_and_a_restarted_agent_thaws(snapshots: SnapshotScene) -> None:
    scene = snapshots
    scene.ahead()
    scene.lock()
    note = msgspec.msgpack.decode((scene.images / NOTE).read_bytes(), type=OutgoingNote)
    assert note == OutgoingNote("s17.1", "gpt/1", [], 3)
    scene.dump()
    assert not has_promised(scene.images)
    assert "pin" not in scene.done
    assert "remembered" not in scene.done
    here = OutgoingMigration.recover("s17.1", scene.resident, scene.factory, [], lambda: None)
    scene.equip(here)
    assert not here.promised
    scene.done.clear()
    here.thaw()
    assert scene.done[:2] == THAW
    assert not scene.resident.still
    assert not scene.images.exists()


# ---- errors ------------------------------------------------------------------------------------

WHERE = {
    "ahead": [LENT, "memory begun", PREPARED, "all is there", "round", "start_ahead"],
    "lock": ["rounds stopped", LOCKED],
    "dump": ["dump", "output", "all is there", "still held", "lanes ended", "manifest"],
}


@pytest.mark.parametrize(
    "error", [StepFailed("x", "y"), OSError(28, "no space"), KeyboardInterrupt()]
)
@pytest.mark.parametrize(
    ("step", "fails"), [(step, fails) for step, all_ in WHERE.items() for fails in all_]
)
def test_after_every_error_the_capsule_goes_on(
    snapshots: SnapshotScene, step: str, fails: str, error: BaseException
) -> None:
    scene = snapshots
    for before in list(WHERE)[: list(WHERE).index(step)]:
        getattr(scene, before)()
    scene.fails, scene.error = fails, lambda _: error
    with pytest.raises(type(error)):
        getattr(scene, step)()
    assert scene.goes_on()
    was_locked = step == "dump"
    after = scene.done[len(scene.done) - 1 - scene.done[::-1].index(fails) + 1 :]
    returned = ["returned 0"] if fails != LENT else []
    assert after == [
        *(THAW if was_locked else ["thaw"]),
        "output closed",
        "memory closed",
        *returned,
        "wire closed",
    ]
    assert (scene.snapshot.complete, scene.snapshot.digest) == (False, b"")
    scene.fails = ""
    too_late: list[Callable[[], object]] = [
        scene.snapshot.check_may_lock,
        scene.lock,
        scene.dump,
    ]
    for late in too_late:
        with pytest.raises(StepFailed, match=r"s17\.1 is over on h0, where gpt/1 goes on"):
            late()
    assert scene.goes_on()


def test_a_thaw_that_fails_is_tried_again_by_a_thread(snapshots: SnapshotScene) -> None:
    scene = snapshots
    scene.ahead()
    scene.lock()
    scene.dump()
    scene.fails = "thaw"
    with pytest.raises(StepFailed, match="thaw failed"):
        scene.snapshot.thaw()
    assert phase(scene) is SnapshotPhase.OVER
    assert OPENED in scene.done, "whatever failed"
    until(lambda: scene.done.count("thaw") > 2)
    assert scene.resident.still
    scene.fails = ""
    scene.ends()
    assert scene.goes_on()
    assert scene.done.count(OPENED) == 1
    assert scene.snapshot.digest == DIGEST, "the holder has the image nevertheless"


def test_a_tracker_is_returned_once_even_if_that_fails(snapshots: SnapshotScene) -> None:
    """The next snapshot may have it by the time of the second try."""
    scene = snapshots
    scene.ahead()
    scene.lock()
    scene.dump()
    scene.fails = "returned 17"
    scene.snapshot.thaw()
    assert not scene.resident.still, "the job does not wait for that"
    scene.ends()
    assert scene.done.count("returned 17") == 1
    assert scene.goes_on()


def test_a_page_that_was_not_sent_makes_the_image_no_image(snapshots: SnapshotScene) -> None:
    scene = snapshots
    scene.ahead()
    scene.lock()
    scene.dump()
    scene.fails = "digest"
    scene.snapshot.close()
    assert (scene.snapshot.complete, scene.snapshot.digest) == (False, b"")
    assert "returned 0" in scene.done, "the next snapshot sends all"
    assert scene.goes_on()


def test_memory_that_does_not_go_ahead_in_time_is_not_left_to_the_pause(
    snapshots: SnapshotScene,
) -> None:
    with pytest.raises(StepFailed, match="the memory of gpt/1 did not go to h2 within 0 s"):
        snapshots.ahead(0.0)
    assert "round" in snapshots.done
    assert snapshots.goes_on()


# ---- its own end -------------------------------------------------------------------------------


def test_a_dump_after_its_own_thaw_is_refused(snapshots: SnapshotScene) -> None:
    """Between that thaw and the dump it may have heard of what another did after its image."""
    scene = snapshots
    scene.ahead()
    scene.lock(0.3)
    scene.ends()
    assert scene.done[len(AHEAD + LOCK) :][:2] == THAW
    with pytest.raises(StepFailed, match=r"s17\.1 is over on h0"):
        scene.dump()
    with pytest.raises(StepFailed, match=r"s17\.1 is over on h0"):
        scene.snapshot.lock(60.0)
    assert "dump" not in scene.done
    assert scene.done.count(LOCKED) == 1
    assert "returned 0" in scene.done
    assert scene.goes_on()


def test_a_held_tree_is_thawed_when_the_time_of_the_lock_is_over(
    snapshots: SnapshotScene,
) -> None:
    snapshots.ahead()
    snapshots.lock(0.7)
    snapshots.dump()
    assert snapshots.resident.still
    snapshots.ends()
    assert snapshots.goes_on()
    assert snapshots.snapshot.early, "others of its job may have been dumped after that"
    assert snapshots.snapshot.digest == DIGEST, "the image is whole"


def test_a_capsule_goes_on_too_early_if_its_criu_was_killed_after_the_dump(
    snapshots: SnapshotScene,
) -> None:
    """It has gone on, perhaps before others of its job were dumped."""
    snapshots.ahead()
    snapshots.lock(60.0)
    snapshots.dump()
    tree: Any = snapshots.snapshot._frozen.tree
    tree.held = lambda: False
    snapshots.snapshot.thaw()
    snapshots.ends()
    assert snapshots.snapshot.early


def working(scene: SnapshotScene) -> tuple[threading.Event, list[object]]:
    """CRIU works until it is interrupted. Returns what says that it has begun, and the deadlines
    that it was given."""
    begun, given = threading.Event(), list[object]()

    def dump(*request: Any) -> None:
        scene.note("dump")()
        given.append(request[2])
        begun.set()
        while True:
            request[4]()
            time.sleep(0.002)

    tree: Any = scene.snapshot._frozen.tree
    tree.dump = dump
    return begun, given


def test_a_dump_ends_when_the_time_of_the_lock_is_over(snapshots: SnapshotScene) -> None:
    snapshots.ahead()
    _, given = working(snapshots)
    snapshots.lock(0.5)
    with pytest.raises(StepFailed, match=r"s17\.1 is over on h0"):
        snapshots.dump(60.0)
    (left,) = given
    assert isinstance(left, float)
    assert 0 < left <= 0.5, "CRIU itself ends by then"
    assert snapshots.goes_on()


@pytest.mark.parametrize("how", ["abandon", "thaw", "close"])
def test_a_dump_under_way_is_interrupted(snapshots: SnapshotScene, how: str) -> None:
    """What interrupts it returns only when the capsule goes on, except ``abandon``."""
    scene = snapshots
    scene.ahead()
    scene.lock()
    begun, _ = working(scene)
    errors: list[Exception] = []

    def dump() -> None:
        try:
            scene.dump()
        except StepFailed as error:
            errors.append(error)

    thread = threading.Thread(target=dump)
    thread.start()
    assert begun.wait(10)
    getattr(scene.snapshot, how)()
    assert how == "abandon" or OPENED in scene.done
    thread.join(10)
    scene.ends()
    assert [str(error) for error in errors] == [
        "snapshot: s17.1 is over on h0, where gpt/1 goes on"
    ]
    assert scene.wire.until == 0.0, "it waits for no acknowledgement any more"
    assert (scene.done.count("thaw"), scene.done.count(OPENED)) == (1, 1)
    assert scene.goes_on()


def test_a_round_under_way_is_interrupted(snapshots: SnapshotScene) -> None:
    scene = snapshots
    scene.memory.round_waits = True
    timer = threading.Timer(0.05, scene.snapshot.abandon)
    timer.start()
    with pytest.raises(StepFailed, match=r"s17\.1 is over on h0"):
        scene.ahead()
    timer.join()
    scene.ends()
    assert scene.goes_on()


@pytest.mark.parametrize("steps", [(), ("ahead",), ("ahead", "lock"), ("ahead", "lock", "dump")])
def test_one_that_is_given_up_between_two_steps_ends_by_itself(
    snapshots: SnapshotScene, steps: tuple[str, ...]
) -> None:
    for step in steps:
        getattr(snapshots, step)()
    snapshots.snapshot.abandon()
    snapshots.ends()
    assert snapshots.goes_on()
    with pytest.raises(StepFailed, match=r"s17\.1 is over on h0"):
        snapshots.ahead()
    assert snapshots.goes_on()


# ---- late and repeated requests ----------------------------------------------------------------


def test_a_lock_that_is_asked_for_twice_is_closed_once(snapshots: SnapshotScene) -> None:
    """The first answer may have been lost; the network was locked all the time."""
    snapshots.ahead()
    snapshots.lock()
    snapshots.lock()
    assert snapshots.done == [*AHEAD, *LOCK]
    snapshots.dump()
    assert snapshots.snapshot.complete


def test_a_step_out_of_turn_is_refused_and_changes_nothing(snapshots: SnapshotScene) -> None:
    scene = snapshots
    with pytest.raises(StepFailed, match=r"s17\.1 of gpt/1 cannot do this: it is not begun"):
        scene.lock()
    scene.ahead()
    out_of_turn: list[Callable[[], object]] = [scene.ahead, scene.dump]
    for late in out_of_turn:
        with pytest.raises(StepFailed, match="it is sent ahead"):
            late()
    scene.lock()
    scene.dump()
    for late in [*out_of_turn, scene.lock]:
        with pytest.raises(StepFailed, match="it is dumped"):
            late()
    assert scene.done == [*AHEAD, *LOCK, *DUMP]
    assert scene.resident.still


def test_a_thaw_that_comes_again_touches_nothing_of_what_followed(
    snapshots: SnapshotScene,
) -> None:
    """The capsule may just be frozen for a move."""
    scene = snapshots
    scene.ahead()
    scene.lock()
    scene.dump()
    scene.snapshot.thaw()
    scene.ends()
    done = list(scene.done)
    scene.resident.still = True
    scene.snapshot.thaw()
    scene.snapshot.close()
    scene.snapshot.abandon()
    assert scene.done == done
    assert scene.resident.still


def test_signals_that_were_held_back_for_a_lock_that_came_too_late_pass_again(
    snapshots: SnapshotScene,
) -> None:
    snapshots.ahead()
    snapshots.snapshot.check_may_lock()
    snapshots.snapshot.thaw()
    snapshots.ends()
    snapshots.resident.still = True
    with pytest.raises(StepFailed, match=r"s17\.1 is over"):
        snapshots.snapshot.lock(60.0)
    assert not snapshots.resident.still
    assert LOCKED not in snapshots.done


def test_a_capsule_that_was_killed_while_it_was_held_has_no_network(
    snapshots: SnapshotScene,
) -> None:
    snapshots.ahead()
    snapshots.lock()
    snapshots.dump()
    snapshots.alive = False
    snapshots.snapshot.close()
    assert f"unlock {INIT}" not in snapshots.done
    assert "thaw" in snapshots.done
    assert phase(snapshots) is SnapshotPhase.OVER
