# SPDX-License-Identifier: Apache-2.0
"""A resumption that fails, is interrupted, or loses a host: nothing of the job is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from suspensions_scene import ALL_BUT_ONE, SuspensionsScene, scene

from liveshift.errors import StepFailed
from liveshift.runtime.fleet import agents
from liveshift.runtime.journal.snapshot_tables import RewindKind
from liveshift.runtime.snapshot.rewound_capsule import MOST_RESTORES

__all__ = ["scene"]

IN_VAIN = StepFailed("restore", "CRIU could not")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request to a host that has died stays open: the lookout notices first that it is lost."""
    monkeypatch.setattr(agents, "LIVENESS_CHECK_S", 60.0)


def test_a_job_whose_image_cannot_be_restored_is_suspended_again(scene: SuspensionsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            scene.fails["RestoreCapsule"] = [IN_VAIN] * (2 * MOST_RESTORES)
            await scene.resume()
            await scene.until(lambda: len(scene.history("suspended")) == 2)
            assert scene.job.state == "suspended"
            assert scene.job.newest is not None
            assert scene.job.newest.name == "s2"
            assert not any(granted for _, _, granted in scene.owners().values())
            scene.fails.clear()
            await scene.resume()
            await scene.until(lambda: bool(scene.history("resumed")))

    asyncio.run(play())
    (why,) = scene.history("not resumed")
    assert why.startswith("is suspended again: a/")
    assert "could not be restored from s2." in why
    assert "CRIU could not" in why
    assert [c.code for c in scene.job.capsules.values()] == [None, None]
    kinds = [row.kind for row in scene.fleet.journal.snapshots.history("a")]
    assert kinds == [RewindKind.SUSPENSION, RewindKind.RESUMPTION] * 2
    assert scene.job.state == "running"


def test_a_job_whose_image_is_gone_by_then_is_suspended_again(scene: SuspensionsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            ends = scene.held["EndEarlier"] = asyncio.Event()
            await scene.resume()
            scene.images = False
            scene.held.clear()
            ends.set()
            await scene.until(lambda: len(scene.history("suspended")) == 2)

    asyncio.run(play())
    (why,) = scene.history("not resumed")
    assert why.startswith("is suspended again: no host has s2.")
    assert scene.job.state == "suspended"
    assert not scene.restored


def test_a_copy_that_a_failed_resumption_has_left_on_any_host_ends(
    scene: SuspensionsScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """a/0 is restored on a host that the plan did not name, and a/1 never is."""
    note, begun = scene.fleet.journal.note, list[int]()

    def marked(subject: str, kind: str, text: str, *rest: Any, **named: Any) -> None:
        note(subject, kind, text, *rest, **named)
        if kind == "not resumed":
            begun.append(len(scene.said))

    monkeypatch.setattr(scene.fleet.journal, "note", marked)

    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            scene.another_job(ALL_BUT_ONE)
            assert set((await scene.resume()).where.values()) == {"h0", "h1"}
            scene.fleet.jobs["b"].capsules["b/9"].code = 0  # a slot of h2 is free again
            scene.fails["RestoreCapsule a/0"] = [IN_VAIN] * 2
            scene.fails["RestoreCapsule a/1"] = [IN_VAIN] * 20
            await scene.until(lambda: len(scene.history("suspended")) == 2)
            assert scene.restored == [("h2", "a/0")]
            await asyncio.sleep(0.1)

    asyncio.run(play())
    del scene.said[: begun[0]]  # what was asked before the resumption had failed
    told = scene.ended_on() | set(scene.asked("Locate"))  # either ends it: both have the count
    assert "h2" in told


def test_a_restarted_orchestrator_goes_on_with_a_resumption(scene: SuspensionsScene) -> None:
    async def begins() -> None:
        async with scene.at_work():
            await scene.suspend()
            scene.stuck = {"Reserve"}
            await scene.resume()
            await scene.until(lambda: "Reserve h2" in scene.said)

    async def goes_on() -> None:
        scene.stuck = set()
        async with scene.at_work():
            await scene.until(lambda: bool(scene.history("resumed")))

    asyncio.run(begins())
    scene.restart()
    assert scene.job.state == "rewinding"
    asyncio.run(goes_on())
    assert scene.job.state == "running"
    assert scene.job.rewinds == 2, "the same resumption"
    assert not scene.history("rewound")


def test_a_job_that_is_stopped_while_it_is_resumed_ends(scene: SuspensionsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            scene.stuck = {"Reserve"}
            await scene.resume()
            await scene.until(lambda: "Reserve h2" in scene.said)
            await scene.stopping.signal(scene.job, 15, "root")
            await scene.until(lambda: scene.job.state == "ended")

    asyncio.run(play())
    assert not scene.history("resumed")
    assert not scene.history("not resumed")


async def rewound_while_it_is_resumed(scene: SuspensionsScene) -> None:
    """Resume the job on h0 and h1. h1 is lost before a/1 is back there, and all goes back once
    more, as far as the end of the copies."""
    await scene.suspend()
    scene.another_job(ALL_BUT_ONE)
    scene.held["Reserve h1"] = asyncio.Event()
    ordered = await scene.resume()
    assert set(ordered.where.values()) == {"h0", "h1"}
    await scene.until(lambda: "Reserve h1" in scene.said)
    scene.held["EndEarlier"] = asyncio.Event()
    scene.fleet.jobs.pop("b")
    scene.cut("h1")
    await scene.until(lambda: scene.job.rewinds == 3)


def test_a_resumption_that_loses_a_host_is_still_one_and_not_a_rewind(
    scene: SuspensionsScene,
) -> None:
    """`liveshift resume` waits for "resumed" or "not resumed"."""

    async def play() -> None:
        async with scene.at_work():
            await rewound_while_it_is_resumed(scene)
            scene.held.pop("EndEarlier").set()
            await scene.until(lambda: scene.job.state == "running")

    asyncio.run(play())
    assert not scene.history("rewound")
    (text,) = scene.history("resumed")
    assert "it was suspended for " in text
    assert "repeated" not in text


def test_a_resumption_that_loses_a_host_and_fails_then_suspends_the_job_again(
    scene: SuspensionsScene,
) -> None:
    async def play() -> None:
        async with scene.at_work():
            await rewound_while_it_is_resumed(scene)
            scene.fails["RestoreCapsule"] = [IN_VAIN] * 40
            scene.held.pop("EndEarlier").set()
            over = ("suspended", "ended", "ending")
            await scene.until(lambda: scene.job.state in over)

    asyncio.run(play())
    assert scene.job.state == "suspended"
    assert [c.code for c in scene.job.capsules.values()] == [None, None]
    assert scene.history("not resumed")


def test_an_image_that_is_gone_once_a_resumption_has_lost_a_host_ends_no_job(
    scene: SuspensionsScene,
) -> None:
    """A holder that does not find it may be a host that was started again: the job stays
    suspended, as it would if the resumption had not begun."""

    async def play() -> None:
        async with scene.at_work():
            await scene.suspend()
            scene.another_job(ALL_BUT_ONE)
            scene.held["Reserve h1"] = asyncio.Event()
            await scene.resume()
            await scene.until(lambda: "Reserve h1" in scene.said)
            scene.images = False
            scene.fleet.jobs.pop("b")
            scene.cut("h1")
            over = ("suspended", "ended", "ending")
            await scene.until(lambda: scene.job.state in over)

    asyncio.run(play())
    assert scene.job.state == "suspended"
