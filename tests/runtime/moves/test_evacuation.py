# SPDX-License-Identifier: Apache-2.0
"""What a taint sets in motion."""

from __future__ import annotations

import asyncio
import time

import pytest
from evacuation_scene import Clock, Play, Scene, clock, play
from full_journal import fill

from liveshift.errors import (
    SourceFailed,
    SourceRefused,
    StepFailed,
)
from liveshift.runtime.model.steps import MigrationStep
from liveshift.runtime.moves import evacuation
from liveshift.runtime.moves.evacuation import _Attempts

__all__ = ["clock", "play"]


def test_everything_on_a_tainted_host_moves_one_by_one(play: Play) -> None:
    async def act(scene: Scene) -> None:
        await asyncio.sleep(0.1)
        assert not scene.moves.asked  # nothing is tainted
        scene.taint("h1")
        for number, name in enumerate(("a/0", "a/1", "b/1"), start=1):
            await scene.until(lambda: len(scene.moves.begun) == number)  # noqa: B023 - called in this turn only
            await asyncio.sleep(0.1)
            assert len(scene.moves.begun) == number  # one at a time
            assert scene.moves.begun[-1] == f"{name}: h1 is tainted: ECC errors (root)"
            scene.moves.end(f"m{number}", MigrationStep.DONE)
            scene.evacuation.wake()
        await asyncio.sleep(0.1)

    assert len(play(act).moves.asked) == 3


def test_two_tainted_hosts_are_emptied_side_by_side(play: Play) -> None:
    async def act(scene: Scene) -> None:
        scene.taint("h1")
        scene.taint("h0")
        await scene.until(lambda: len(scene.moves.begun) == 2)

    assert {entry.split(":")[0] for entry in play(act).moves.begun} == {"a/0", "b/0"}


def test_what_has_ended_or_is_moving_is_left_alone(play: Play) -> None:
    async def act(scene: Scene) -> None:
        capsules = scene.fleet.jobs["a"].capsules
        capsules["a/0"].code = 0
        capsules["a/1"].migration = "m99"
        scene.taint("h1")
        await scene.until(lambda: scene.moves.begun)

    assert play(act).moves.asked == ["b/1"]


def test_without_a_spare_it_is_said_once_and_tried_when_there_is_one(play: Play) -> None:
    """And at once, not when a while is over: a host has come, or a slot has been freed."""

    async def act(scene: Scene) -> None:
        scene.moves.free = False
        scene.taint("h1")
        await scene.until(lambda: len(scene.moves.asked) >= 3)
        for _ in range(3):
            scene.evacuation.wake()
            await asyncio.sleep(0.05)
        assert scene.untold() == [
            f"no spare can take {n} (add a host)" for n in ("a/0", "a/1", "b/1")
        ]
        scene.moves.free = True
        scene.evacuation.wake()
        await scene.until(lambda: scene.moves.begun)

    play(act)


def test_that_no_spare_is_free_is_said_again_only_for_another_kind_of_reason(play: Play) -> None:
    """Which hosts have it, and how many, changes with each host that comes or goes."""

    async def act(scene: Scene) -> None:
        scene.capsule("a/1").code = scene.capsule("b/1").code = 0
        scene.moves.free, scene.moves.kinds = False, "has no free slot"
        scene.taint("h1")
        for kinds in ("", "is not up", "has no free slot"):
            scene.moves.kinds = kinds or scene.moves.kinds
            for _ in range(3):
                scene.evacuation._attempts.setdefault("a/0", _Attempts()).not_before = 0.0
                await scene.look()
        assert len(scene.moves.asked) >= 9
        assert len(scene.untold()) == 2, scene.untold()

    play(act)


def test_without_a_spare_it_is_tried_again_when_a_host_has_room_and_not_at_each_look(
    play: Play, clock: Clock
) -> None:
    """In a full cluster of a thousand hosts the orchestrator would do nothing else."""

    async def act(scene: Scene) -> None:
        scene.moves.free, scene.moves.kinds = False, "has no free slot"
        for host in scene.fleet.hosts.values():
            host.heard = time.monotonic() + 1000
        scene.capsule("b/0").host = "h2"
        scene.taint("h1")
        await scene.look()
        for _ in range(3):
            await scene.look()
        assert scene.moves.asked == ["a/0", "a/1", "b/1"]
        clock.now += evacuation.RETRY_S  # in any case
        await scene.look()
        await scene.look()
        assert len(scene.moves.asked) == 6
        scene.capsule("b/0").code = 0  # h2 has a slot more
        await scene.look()
        await scene.look()
        assert len(scene.moves.asked) == 9
        scene.fleet.hosts["h2"].heard = 0.0  # it is down: that helps nobody
        await scene.look()
        await scene.look()
        assert len(scene.moves.asked) == 9
        scene.fleet.hosts["h2"].heard = time.monotonic() + 1000
        scene.moves.free = True
        await scene.look()
        assert scene.moves.begun[0].startswith("a/0")

    play(act)


def test_a_move_that_failed_is_tried_again_after_a_while_and_others_meanwhile(
    play: Play, clock: Clock
) -> None:
    async def act(scene: Scene) -> None:
        scene.taint("h1")
        await scene.until(lambda: len(scene.moves.begun) == 1)
        scene.moves.end("m1", MigrationStep.FAILED)
        scene.evacuation.wake()
        await scene.until(lambda: len(scene.moves.begun) == 2)
        assert scene.moves.begun[1].startswith("a/1")
        scene.moves.end("m2", MigrationStep.DONE)
        await scene.until(lambda: len(scene.moves.begun) == 3)
        scene.moves.end("m3", MigrationStep.DONE)
        await scene.begins_after(clock, evacuation.RETRY_S)
        assert scene.moves.begun[3].startswith("a/0")

    play(act)


def test_what_fails_for_a_cause_in_the_capsule_is_not_tried_on_the_next_spare(
    play: Play, clock: Clock
) -> None:
    """After its dump or restore failed twice with the same words: only when a person asks, or much
    later. What the survey has found is looked for again, less and less often."""

    async def act(scene: Scene) -> None:
        for name in ("a/1", "b/1"):
            scene.capsule(name).code = 0
        scene.taint("h1")
        await scene.look()
        failed = SourceFailed("dump", "CRIU could not dump a/0: so")
        scene.moves.end("m1", MigrationStep.FAILED, failed)
        await scene.begins_after(clock, evacuation.RETRY_S)
        scene.moves.end("m2", MigrationStep.FAILED, failed)
        await scene.look()
        assert [each.split(":")[0] for each in scene.moves.begun] == ["a/0", "a/0"]
        scene.capsule("a/1").code = None
        await scene.look()
        refused = SourceRefused("process 7 holds it", hint="close it")
        for number, doubled in enumerate((2, 4, 8), 3):
            scene.moves.end(f"m{number}", MigrationStep.FAILED, refused)
            await scene.begins_after(clock, evacuation.RETRY_S * doubled)
        assert [each.split(":")[0] for each in scene.moves.begun[2:]] == ["a/1"] * 4
        scene.moves.end("m6", MigrationStep.DONE)
        await scene.look()
        assert len(scene.moves.begun) == 6, "a/0 still waits"
        scene.taint("h1")  # a person asks
        await scene.look()
        assert scene.moves.begun[-1].startswith("a/0")
        told = scene.untold()
        assert len(told) == 3, told
        assert "no other host is tried for 30 s, as the cause is in it: dump: CRIU" in told[0]
        assert "no other host is tried for 600 s, as the cause is in it: dump: CRIU" in told[1]
        assert "(`liveshift migrate a/0` tries again now)" in told[1]
        assert "for 60 s, as the cause is in it: process 7 holds it" in told[2]

    play(act)


def test_a_failure_with_other_words_is_tried_again_soon(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the same words twice in a row say that the third attempt would be in vain."""
    monkeypatch.setattr(evacuation, "RETRY_S", 0.05)

    async def act(scene: Scene) -> None:
        for name in ("a/1", "b/1"):
            scene.capsule(name).code = 0
        scene.taint("h1")
        errors = (
            SourceFailed("dump", "one"),
            SourceFailed("dump", "two"),
            StepFailed("ship", "gone"),
            SourceFailed("dump", "two"),
        )
        for number, error in enumerate(errors, 1):
            await scene.until(lambda: len(scene.moves.begun) == number)  # noqa: B023 - called in this turn only
            scene.moves.end(f"m{number}", MigrationStep.FAILED, error)
        await scene.until(lambda: len(scene.moves.begun) == 5)
        scene.moves.end("m5", MigrationStep.FAILED, errors[-1])
        await asyncio.sleep(0.4)
        assert len(scene.moves.begun) == 5

    play(act)


def test_a_full_disk_ends_no_evacuation(play: Play) -> None:
    async def act(scene: Scene) -> None:
        scene.taint("h1")
        await scene.until(lambda: len(scene.moves.begun) == 1)
        fill(scene.fleet.journal)
        scene.moves.end("m1", MigrationStep.FAILED, SourceFailed("dump", "x" * 10_000))
        scene.evacuation.wake()
        await scene.until(lambda: len(scene.moves.begun) == 2)
        assert scene.untold() == [], "the line could not be written"

    play(act)


def test_what_has_left_or_ended_is_forgotten(play: Play) -> None:
    """Each migration holds the survey of its capsule, and the daemon runs for months."""

    async def act(scene: Scene) -> None:
        scene.taint("h1")
        await scene.until(lambda: len(scene.moves.begun) == 1)
        scene.moves.end("m1", MigrationStep.DONE)
        await scene.until(lambda: len(scene.moves.begun) == 2)
        scene.moves.end("m2", MigrationStep.FAILED, SourceFailed("dump", "a lock"))
        await scene.look()
        await scene.look()
        assert "a/0" not in scene.evacuation._attempts
        assert scene.evacuation._attempts["a/1"].failed == "dump: a lock"
        del scene.fleet.taints["h1"]
        scene.fleet.jobs["a"].capsules["a/1"].code = 0
        del scene.fleet.jobs["b"]
        scene.evacuation.wake()
        await scene.until(lambda: not scene.evacuation._attempts)

    play(act)


def test_a_renewed_taint_tries_at_once(play: Play) -> None:
    async def act(scene: Scene) -> None:
        for name in ("a/1", "b/1"):
            scene.capsule(name).code = 0
        scene.taint("h1")
        await scene.until(lambda: len(scene.moves.begun) == 1)
        scene.moves.end("m1", MigrationStep.FAILED)
        scene.evacuation.wake()
        await asyncio.sleep(0.1)
        assert len(scene.moves.begun) == 1
        scene.taint("h1")
        await scene.until(lambda: len(scene.moves.begun) == 2)

    play(act)


def test_untainting_stops_it(play: Play) -> None:
    async def act(scene: Scene) -> None:
        scene.taint("h1")
        await scene.until(lambda: len(scene.moves.begun) == 1)
        del scene.fleet.taints["h1"]
        scene.moves.end("m1", MigrationStep.DONE)
        scene.evacuation.wake()
        await asyncio.sleep(0.1)

    assert len(play(act).moves.asked) == 1
