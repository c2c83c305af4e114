# SPDX-License-Identifier: Apache-2.0
"""A job loses a host and is taken back, with a real journal and the real judge of claims."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest
from rewinds_scene import RewindsScene, ended, scene

from liveshift.errors import LiveshiftError
from liveshift.runtime.fleet.fleet import Fleet
from liveshift.runtime.messages import CapsuleState
from liveshift.runtime.model.jobs import KILLED, LastRewind

__all__ = ["scene"]


def test_a_dead_host_s_capsule_goes_to_its_holder_and_all_go_back(scene: RewindsScene) -> None:
    began = time.time()

    async def play() -> None:
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.job.state == "running"
    assert scene.job.book().rewinds == 1
    assert scene.owners() == {"a/0": ("h0", 3, True), "a/1": ("h2", 3, True)}
    (why,) = scene.history("rewinding")
    assert why == "goes back to s1: h1 is silent, and so is its kernel"
    assert scene.said.index("EndEarlier h0") < scene.said.index("Reserve h0")
    assert scene.fleet.journal.snapshots.rewinds_under_way() == []
    again = Fleet(scene.fleet.cluster).jobs["a"]
    assert (again.state, again.rewinds) == ("running", 1)
    newest = scene.job.newest
    assert newest is not None
    (row,) = scene.fleet.journal.snapshots.history("a")
    assert scene.fleet.failures.seen.losses == 1
    assert scene.fleet.journal.failures.seen().losses == 1
    assert began <= row.time <= row.ended <= time.time()
    assert scene.job.last_rewind == LastRewind(newest.time, row.time - newest.time, row.ended)
    assert again.last_rewind == scene.job.last_rewind, "status shows it after a restart too"


def test_an_agent_that_is_away_leads_to_nothing(scene: RewindsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.alive.remove("h1")
            await asyncio.sleep(2.0)

    asyncio.run(play())
    assert "GetHeld h2" not in scene.said
    assert scene.owners() == {"a/0": ("h0", 1, True), "a/1": ("h1", 1, True)}


def test_a_job_that_trains_on_is_left_alone(scene: RewindsScene) -> None:
    def state(count: int) -> CapsuleState:
        return CapsuleState("a/0", 1, 2, 0, count, 1.0, [0], "true")

    async def play() -> None:
        capsule = scene.job.capsules["a/0"]
        async with scene.at_work():
            scene.cut("h1")
            for count in range(200):
                scene.rewinds.note_heartbeat(capsule, seen := state(count))
                capsule.seen = seen
                await asyncio.sleep(0.01)
            assert scene.owners()["a/1"] == ("h1", 1, True)
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.owners()["a/1"] == ("h2", 3, True), "it was, until it was frozen"


def test_a_host_that_came_back_without_a_capsule_has_lost_it(scene: RewindsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            assert scene.rewinds.host_lost("h1", scene.job, scene.job.capsules["a/1"])
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.owners()["a/1"][1] == 3
    assert scene.history("rewinding") == ["goes back to s1: h1 came back without a/1"]


def test_no_host_gets_a_second_capsule_with_files_on_carried_paths(scene: RewindsScene) -> None:
    """A host that another capsule is on has its files under the same names."""
    job = scene.job
    assert job.newest is not None
    for name in ("h0", "h1", "h2"):
        scene.fleet.hosts[name].heard = time.monotonic()
    assert scene.rewinds.another_host(job.capsules["a/1"], ["h2"]) == "h0"
    job.newest = dataclasses.replace(job.newest, carried=["a/0", "a/1"])
    assert scene.rewinds.another_host(job.capsules["a/1"], []) == "h2"
    with pytest.raises(LiveshiftError):
        scene.rewinds.another_host(job.capsules["a/1"], ["h2"])


def test_a_job_without_a_snapshot_ends_as_ever(scene: RewindsScene) -> None:
    scene.job.newest = None
    capsule = scene.job.capsules["a/1"]
    assert not scene.rewinds.host_lost("h1", scene.job, capsule)
    assert not scene.rewinds.takes_back(scene.job, capsule, ended(capsule, KILLED))


def test_a_job_waits_for_a_holder_and_nothing_of_it_is_ended(scene: RewindsScene) -> None:
    async def play() -> None:
        scene.fleet.journal.snapshots.note_saved("a", "s0", "/kept", 1_790_000_000.0)
        async with scene.at_work():
            scene.cut("h1", "h2")
            await scene.until(lambda: bool(scene.history("rewinding")))
            await asyncio.sleep(0.3)
            (why,) = scene.history("rewinding")
            assert why.startswith("waits: no host that holds")
            hint = "`liveshift resume a --from /kept` goes back to it, after `liveshift stop a`"
            assert why.endswith(hint)
            assert scene.owners()["a/1"] == ("h1", 1, True)
            scene.alive.add("h2")
            scene.kernels.add("h2")
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.owners()["a/1"] == ("h2", 3, True)


def test_an_image_that_is_gone_ends_only_what_is_certainly_lost(scene: RewindsScene) -> None:
    async def play() -> None:
        scene.images = False
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: bool(scene.history("rewinding")))
            await asyncio.sleep(0.1)
            assert scene.job.capsules["a/1"].code is None, "h1 may come back with it"
            assert not scene.rewinds.host_lost("h1", scene.job, scene.job.capsules["a/1"])

    asyncio.run(play())
    (why,) = scene.history("rewinding")
    assert "the image of a/0, is gone" in why


def test_a_restarted_orchestrator_goes_on(scene: RewindsScene) -> None:
    async def begins() -> None:
        scene.stuck = {"Reserve"}
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: "Reserve h2" in scene.said)

    async def goes_on() -> None:
        scene.stuck = set()
        async with scene.at_work():
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(begins())
    scene.begin(Fleet(scene.fleet.cluster))
    assert scene.job.state == "rewinding"
    asyncio.run(goes_on())
    assert scene.job.state == "running"
    assert scene.job.rewinds == 1, "the same rewind"
    assert {host for host, _, granted in scene.owners().values() if granted} == {"h0", "h2"}


@pytest.mark.parametrize("turns", range(5))
def test_it_ends_though_something_wakes_it_as_it_is_cancelled(
    scene: RewindsScene, turns: int
) -> None:
    async def play() -> bool:
        work = asyncio.ensure_future(scene.rewinds.run())
        await asyncio.sleep(0.01)
        scene.rewinds._wake.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        work.cancel()
        ended, _ = await asyncio.wait({work}, timeout=5)
        work.cancel()
        return bool(ended)

    assert asyncio.run(play())
