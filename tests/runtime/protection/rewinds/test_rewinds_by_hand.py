# SPDX-License-Identifier: Apache-2.0
"""A person's order to take a job back, and a person's word that a host is dead."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest
from rewinds_scene import RewindsScene, scene

from liveshift import units
from liveshift.errors import Refused
from liveshift.runtime.fleet.status import status
from liveshift.runtime.model.jobs import KILLED

__all__ = ["scene"]


def test_a_person_takes_a_job_back(scene: RewindsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            plan = scene.rewinds.order("root", scene.job, "", dry_run=True)
            assert plan.where == {"a/0": "h0", "a/1": "h1"}
            assert (plan.snapshot, plan.boundary) == ("s1", "step 9")
            await asyncio.sleep(0.2)
            assert scene.job.rewinds == 0, "it was only asked"
            assert scene.rewinds.order("root", scene.job, "", dry_run=False).where == plan.where
            await scene.until(lambda: bool(scene.history("rewound")))
            await asyncio.sleep(0.2)

    asyncio.run(play())
    assert scene.job.rewinds == 1, "once"
    assert scene.history("rewinding") == [
        "ordered: root wants it",
        "goes back to s1: root wants it",
    ]
    assert scene.died() == [{}]


def of_long_ago(scene: RewindsScene, size: int = 0) -> None:
    assert scene.job.newest is not None
    then = scene.job.newest.time - 1000.0
    scene.job.newest = dataclasses.replace(scene.job.newest, time=then, bytes=size)


def test_a_job_that_trains_on_is_not_ended_for_a_damaged_image(scene: RewindsScene) -> None:
    of_long_ago(scene)
    scene.damaged = {"h2"}

    async def play() -> None:
        async with scene.at_work():
            scene.rewinds.order("root", scene.job, "", dry_run=False)
            await scene.until(lambda: len(scene.history("rewinding")) > 1)
            await asyncio.sleep(0.1)

    asyncio.run(play())
    assert "s1.0 is damaged" in scene.history("rewinding")[1]
    assert scene.job.rewinds == 0
    assert scene.job.state == "running"
    assert not [said for said in scene.said if said.startswith("EndEarlier")]
    assert scene.compared == ["h2", "h2"]


def test_images_that_have_just_come_are_not_compared_again(scene: RewindsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.rewinds.order("root", scene.job, "", dry_run=False)
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.compared == []


def test_a_job_that_has_lost_a_host_does_not_wait_for_a_comparison(scene: RewindsScene) -> None:
    of_long_ago(scene)

    async def play() -> None:
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.compared == []


def test_an_order_waits_until_large_images_are_compared(scene: RewindsScene) -> None:
    async def play() -> list[float]:
        async with scene.at_work():
            small = scene.rewinds.order("root", scene.job, "", dry_run=True)
            of_long_ago(scene, size=60_000_000_000)
            large = scene.rewinds.order("root", scene.job, "", dry_run=True)
            return [small.within, large.within]

    small, large = asyncio.run(play())
    assert large == small + 60.0


def test_an_order_is_refused_in_words(scene: RewindsScene) -> None:
    def refusal(lost: str = "") -> str:
        with pytest.raises(Refused) as refused:
            scene.rewinds.order("root", scene.job, lost, dry_run=False)
        return refused.value.message

    async def play() -> None:
        async with scene.at_work():
            assert refusal("h2") == "--lost h2: a does not run there"
            assert refusal("h1") == "--lost h1: it is not dead, it answers"
            generation, scene.job.newest = scene.job.newest, None
            assert refusal() == "a cannot be taken back: it has no complete snapshot"
            scene.job.newest = generation
            scene.cut("h2")
            await scene.until(lambda: not scene.fleet.is_up("h2"))
            assert "no host that holds a/0 is up" in refusal()
            scene.cut("h0", "h1")
            await scene.until(lambda: not scene.fleet.is_up("h1"))
            assert "none of its hosts is heard (h0, h1)" in refusal()
            scene.job.state = "ending"
            assert refusal() == "a cannot be taken back: it is being ended"

    asyncio.run(play())
    assert scene.job.rewinds == 0


def test_an_order_that_cannot_be_carried_out_soon_is_void(scene: RewindsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.rewinds._lookout.order(scene.job, "root wants it", 0.3)
            scene.cut("h2")
            await asyncio.sleep(1.0)
            scene.alive.add("h2")
            await asyncio.sleep(0.5)

    asyncio.run(play())
    assert scene.job.rewinds == 0


def test_a_person_vouches_for_a_job_of_which_no_host_is_heard(scene: RewindsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.cut("h0", "h1")
            await asyncio.sleep(1.5)
            assert not scene.history("rewinding"), "it may train on without us"
            scene.rewinds.order("root", scene.job, "h1", dry_run=False)
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert {host for host, _, _ in scene.owners().values()} == {"h2"}
    assert "goes back to s1: h0 is silent, and so is its kernel; h1 is dead, says root" in (
        scene.history("rewinding")
    )


def all_on_h0(scene: RewindsScene) -> None:
    """Both capsules of the job run there, and its newest snapshot is of that time."""
    for capsule in scene.job.capsules.values():
        capsule.host, capsule.epoch = "h0", 2
        scene.fleet.journal.hand_over(capsule.name, "h0", 2)
    scene.take_snapshot(scene.fleet)


def silent(scene: RewindsScene) -> str:
    """What `status` says of the silence."""
    (job,) = status(scene.fleet, lambda _: True, sees_all=True).jobs
    assert job.protection is not None
    return job.protection.silent


def test_a_person_learns_what_to_do_for_a_job_whose_only_host_is_silent(
    scene: RewindsScene,
) -> None:
    async def play() -> None:
        all_on_h0(scene)
        async with scene.at_work():
            await asyncio.sleep(0.2)
            assert silent(scene) == ""
            last = time.time()
            scene.cut("h0")
            await scene.until(lambda: silent(scene) != "")
            since = [units.moment(last + seconds) for seconds in (-1, 0, 1)]
            assert silent(scene) in [
                f"h0 and its kernel are silent since {at}, and no other host of a is heard: it may"
                " train on there, so it is not taken back. If h0 is dead: `liveshift rewind a"
                " --lost h0`"
                for at in since
            ]
            await asyncio.sleep(0.5)
            assert scene.history("silent") == [silent(scene)], "once"
            scene.alive.add("h0")
            await scene.until(lambda: silent(scene) == "")
            scene.cut("h0")
            await scene.until(lambda: silent(scene) != "")
            assert len(scene.history("silent")) == 2, "a second silence"
            scene.rewinds.order("root", scene.job, "h0", dry_run=False)
            await scene.until(lambda: bool(scene.history("rewound")))
            await asyncio.sleep(0.2)
            assert silent(scene) == ""

    asyncio.run(play())
    assert {host for host, _, _ in scene.owners().values()} == {"h2"}
    assert len(scene.history("silent")) == 2


def test_a_second_host_that_dies_is_named_though_the_first_one_stays_dead(
    scene: RewindsScene,
) -> None:
    async def play() -> None:
        all_on_h0(scene)
        async with scene.at_work():
            scene.cut("h0")
            await scene.until(lambda: silent(scene) != "")
            scene.rewinds.order("root", scene.job, "h0", dry_run=False)
            await scene.until(lambda: bool(scene.history("rewound")))
            await scene.until(lambda: silent(scene) == "")
            scene.cut("h2")
            await scene.until(lambda: silent(scene).endswith("`liveshift rewind a --lost h2`"))

    asyncio.run(play())
    assert len(scene.history("silent")) == 2


def test_hosts_of_a_job_that_are_silent_together_are_one_silence(scene: RewindsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.cut("h0", "h1")
            await scene.until(lambda: silent(scene) != "")
            await asyncio.sleep(0.5)

    asyncio.run(play())
    (said,) = scene.history("silent")
    assert said.startswith("h0, h1 and their kernels are silent since ")
    assert said.endswith("If one of them is dead: `liveshift rewind a --lost HOST`")
    assert not scene.history("rewinding")


def test_a_job_that_cannot_be_taken_back_gets_no_advice_to_do_so(scene: RewindsScene) -> None:
    async def play() -> None:
        scene.job.newest = None
        async with scene.at_work():
            scene.cut("h0", "h1")
            await asyncio.sleep(1.5)

    asyncio.run(play())
    assert not scene.history("silent")


def test_a_rewind_that_waits_for_one_of_its_hosts_goes_on_at_a_person_s_word(
    scene: RewindsScene,
) -> None:
    async def play() -> None:
        scene.stuck = {"EndEarlier"}
        async with scene.at_work():
            assert scene.report(scene.end("a/1", KILLED))
            await scene.until(lambda: "EndEarlier h1" in scene.said)
            scene.cut("h0", "h1")
            scene.stuck = set()
            await scene.until(lambda: any("left on" in each for each in scene.history("rewinding")))
            await asyncio.sleep(1.5)
            assert not scene.history("rewound"), "no host of it is heard"
            scene.rewinds.order("root", scene.job, "h0", dry_run=False)
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert {host for host, _, _ in scene.owners().values()} == {"h2"}


@pytest.mark.parametrize("dead", ["h0", "h1"])
def test_a_person_s_word_counts_for_hosts_that_own_nothing_any_more(
    scene: RewindsScene, dead: str
) -> None:
    async def play() -> None:
        scene.stuck = {"EndEarlier"}
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: "EndEarlier h2" in scene.said)
            scene.cut("h0")
            scene.stuck = set()
            await scene.until(lambda: {host for host, _, _ in scene.owners().values()} == {"h2"})
            waits = "waits until one of h0, h1 has ended its copy: the job may train there. If one"
            waits += " is dead: `liveshift rewind a --lost HOST`"
            await scene.until(lambda: waits in scene.history("rewinding"))
            assert not [said for said in scene.said if said.startswith("Reserve")]
            scene.rewinds.order("root", scene.job, dead, dry_run=False)
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.job.rewinds == 2, "the one that waited went on"
    assert scene.owners() == {"a/0": ("h2", 5, True), "a/1": ("h2", 5, True)}


def test_a_dead_host_that_did_not_run_the_job_proves_nothing(scene: RewindsScene) -> None:
    row = scene.fleet.journal.snapshots.rewind("a", 1, {"a/0": "h2", "a/1": "h2"}, "h0 is silent")
    scene.rewinds._lookout.vouch(scene.job, "h2", "root")
    assert scene.rewinds.before(scene.job) == row.before == ["h0", "h1"]
    scene.rewinds._lookout.vouch(scene.job, "h1", "root")
    assert scene.rewinds.before(scene.job) == []
    scene.fleet.hosts["h1"].heard = time.monotonic()
    assert scene.rewinds.before(scene.job) == ["h0", "h1"], "it was not dead"
