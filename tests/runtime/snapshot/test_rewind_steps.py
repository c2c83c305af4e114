# SPDX-License-Identifier: Apache-2.0
"""The steps of a rewind in order, and what follows when one of them fails."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from rewind_scene import ALONG, Died, RewindScene
from waits import until_async

from liveshift.errors import LiveshiftError, NotFound, Refused, StepFailed, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.messages import Message
from liveshift.runtime.model.jobs import Job
from liveshift.runtime.snapshot.rewind import RewindEnd

STEPS = (
    *("EndEarlier", "begin restoring", "commit", "GetHeld", "Reserve", "ForwardHeld"),
    *("RestoreCapsule", "open gates", "end"),
)


def play(scene: RewindScene) -> RewindEnd:
    async def within() -> RewindEnd:
        async with asyncio.timeout(20):
            return await scene.rewind().run()

    return asyncio.run(within())


def assert_runs_again(scene: RewindScene, end: RewindEnd) -> None:
    assert end is RewindEnd.DONE
    assert scene.done
    assert all(capsule.granted for capsule in scene.job.capsules.values())
    assert scene.said[-1] == "end"
    assert [kind for kind, _ in scene.notes if kind == "rewound"] == ["rewound"]


def first(scene: RewindScene, what: str) -> int:
    return next(n for n, said in enumerate(scene.said) if said.startswith(what))


def last(scene: RewindScene, what: str) -> int:
    return max(n for n, said in enumerate(scene.said) if said.startswith(what))


def test_all_capsules_go_back_in_this_order() -> None:
    scene = RewindScene()
    assert_runs_again(scene, play(scene))
    assert sorted(scene.said[:2]) == ["EndEarlier h0", "EndEarlier h2"]
    assert last(scene, "EndEarlier") < first(scene, "begin restoring") < first(scene, "Reserve")
    assert first(scene, "Reserve") < first(scene, "ForwardHeld") < first(scene, "RestoreCapsule")
    assert last(scene, "RestoreCapsule") < first(scene, "open gates")
    assert {s for s in scene.said if s.startswith(("Restore", "Forward"))} == {
        "RestoreCapsule h0",
        "RestoreCapsule h2",
        "ForwardHeld h2",
    }
    sent = [ask for _, ask in scene.asks if isinstance(ask, messages.ForwardHeld)]
    assert {(ask.image, ask.migration, ask.destination) for ask in sent} == {
        ("s17.0", "r4.0", "h0"),
        ("s17.1", "r4.1", "h2"),
    }
    assert [c.epoch for c in scene.job.capsules.values()] == [3, 3], "nothing was tried again"


def test_status_can_say_how_far_it_is() -> None:
    scene = RewindScene()
    seen: dict[str, str] = {}
    request, gates = scene.request, scene.open_gates

    async def watched(host: str, message: Message, timeout: float) -> Message | None:
        seen[type(message).__name__] = scene.job.rewinding
        return await request(host, message, timeout)

    async def opens(job: Job) -> str:
        seen["gates"] = scene.job.rewinding
        return await gates(job)

    scene.request, scene.open_gates = watched, opens  # type: ignore[method-assign]
    assert play(scene) is RewindEnd.DONE
    assert seen["EndEarlier"] == "goes back to s17: its earlier copies end"
    restored = "goes back to s17: its images are brought to their hosts and restored"
    assert seen["RestoreCapsule"] == restored
    assert seen["gates"] == "goes back to s17: its gates open"


def test_a_host_may_get_back_what_was_dumped_there() -> None:
    """Its own directories are no obstacle. A spare must have others than the lost host."""
    scene = RewindScene()
    play(scene)
    asked = {h: ask.survey for h, ask in scene.asks if isinstance(ask, messages.Reserve)}
    assert [each.place for each in asked["h0"].along] == [("", "")]
    assert [each.place for each in asked["h2"].along] == [ALONG.place]
    assert [each.path for each in asked["h0"].along] == ["/tmp"]


def test_a_host_is_told_under_which_epoch_the_snapshot_was_taken() -> None:
    """It knows under which epochs the capsule ran there, and so whether its files are there."""
    scene = RewindScene()
    owners = {"gpt/0": ("h0", 2), "gpt/1": ("h1", 1)}
    scene.generation = dataclasses.replace(scene.generation, owners=owners)
    play(scene)
    asked = {h: ask.dumped_under for h, ask in scene.asks if isinstance(ask, messages.Reserve)}
    assert asked == {"h0": 2, "h2": 1}


def test_the_history_says_how_long_each_part_took_and_what_is_repeated() -> None:
    scene = RewindScene()
    play(scene)
    (text,) = [text for kind, text in scene.notes if kind == "rewound"]
    assert "runs again from s17: gpt/0 on h0, gpt/1 on h2" in text
    assert "1.25 s until noticed" in text
    assert "12.5 s of training are repeated, from the boundary of 19" in text
    assert 1.25 < scene.job.rewind_s < 10, "status says that the next one takes as long"
    for part in ("earlier copies had ended", "send the images", "restore", "go on"):
        assert part in text


def test_what_a_rewind_took_after_the_end_of_a_rank_says_nothing_of_a_lost_host() -> None:
    """A host's silence takes ``timeouts.suspicion`` more."""
    scene = RewindScene()
    scene.row = dataclasses.replace(scene.row, lost=[])
    play(scene)
    (text,) = [text for kind, text in scene.notes if kind == "rewound"]
    assert "1.25 s until noticed" in text
    assert scene.job.rewind_s == 0.0


def test_what_may_fail_on_a_host_is_noted_once() -> None:
    """For example: the image is of a host with another kernel."""
    scene = RewindScene()
    scene.warnings = ["the restore may fail"]
    scene.fails = {"ForwardHeld h2": [Unreachable("lost")]}
    assert_runs_again(scene, play(scene))
    noted = [text for kind, text in scene.notes if "may fail" in text]
    assert sorted(noted) == [
        f"gpt/{n} on {h}: the restore may fail" for n, h in ((0, "h0"), (1, "h2"))
    ]


@pytest.mark.parametrize("error", [Refused("no"), Unreachable("lost"), StepFailed("it", "failed")])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails_once_is_done_again(step: str, error: LiveshiftError) -> None:
    scene = RewindScene()
    scene.fails = {step: [error], "Reserve": [Refused("a moment")]}
    if step == "Reserve":
        scene.fails[step] = [error, error]
    assert_runs_again(scene, play(scene))
    assert {c.host for c in scene.job.capsules.values()} <= {"h0", "h2", "h3"}


def test_a_restore_that_failed_is_tried_under_a_further_epoch() -> None:
    scene = RewindScene()
    scene.fails["RestoreCapsule h2"] = [StepFailed("restore", "it did")]
    assert_runs_again(scene, play(scene))
    tried = [ask.epoch for host, ask in scene.asks if isinstance(ask, messages.RestoreCapsule)]
    assert sorted(tried)[:2] == [3, 3]
    assert scene.job.capsules["gpt/1"].epoch > 3
    assert scene.job.capsules["gpt/0"].epoch == 3
    assert scene.said.count("Reserve h2") == 2, "the image may be used up: it comes again"


def test_another_host_gets_a_capsule_that_fails_twice() -> None:
    scene = RewindScene()
    scene.fails["Reserve h2"] = [Refused("no memory"), Refused("no memory")]
    assert_runs_again(scene, play(scene))
    assert scene.job.capsules["gpt/1"].host == "h3"
    assert scene.said.count("Reserve h2") == 2


def test_a_host_that_may_run_a_capsule_keeps_it() -> None:
    scene = RewindScene()
    scene.fails["answer h2"] = [Unreachable("lost"), Unreachable("lost")]
    assert_runs_again(scene, play(scene))
    assert scene.said.count("RestoreCapsule h2") == 3
    assert scene.job.capsules["gpt/1"].owner.epoch == 3


def test_a_host_that_lost_what_it_was_let_run_leads_to_another_rewind() -> None:
    scene = RewindScene()
    scene.fails["answer h2"] = [NotFound("h2 has no image of gpt/1 (any more)")]
    assert play(scene) is RewindEnd.AGAIN
    assert "no image of gpt/1" in scene.again
    assert "open gates" not in scene.said


def test_an_image_that_cannot_be_restored_ends_the_job() -> None:
    scene = RewindScene()
    for host in ("h2", "h3"):
        failed = StepFailed("restore", "a file is gone")
        scene.fails[f"RestoreCapsule {host}"] = [failed] * 4
    rewind = scene.rewind()
    assert asyncio.run(rewind.run()) is RewindEnd.LOST
    assert "gpt/1 could not be restored from s17.1, tried 4 times" in str(rewind.error)
    assert not scene.job.capsules["gpt/1"].granted
    assert not scene.done


def test_an_image_that_no_holder_has_ends_the_job() -> None:
    scene = RewindScene()
    # The first two looks are for the files that the capsules were writing.
    scene.fails["GetHeld h2"] = [NotFound("no image") for _ in range(4)]
    rewind = scene.rewind()
    assert asyncio.run(rewind.run()) is RewindEnd.LOST
    assert "any more" in str(rewind.error)


def test_nothing_is_restored_while_the_job_may_train_where_it_was() -> None:
    """h0 answers, and does not say that its copy has ended; h1 is away."""
    scene = RewindScene()
    scene.job.capsules["gpt/0"].host = "h3"
    scene.up.remove("h0")

    async def until_back() -> RewindEnd:
        work = asyncio.ensure_future(scene.rewind().run())
        await until_async(lambda: any("one of h0, h1" in text for _, text in scene.notes))
        assert scene.ended == {"h2", "h3"}
        assert not [said for said in scene.said if said.startswith("Reserve")]
        scene.up.add("h0")
        async with asyncio.timeout(20):
            return await work

    assert_runs_again(scene, asyncio.run(until_back()))


def test_a_further_loss_ends_the_work_on_this_rewind() -> None:
    scene = RewindScene()
    scene.fails["Reserve"] = [Refused("no memory")] * 10_000

    async def lost() -> RewindEnd:
        work = asyncio.ensure_future(scene.rewind().run())
        await asyncio.sleep(0.05)
        scene.again = "h2 is silent"
        end = await work
        done = len(scene.said)
        await asyncio.sleep(0.05)
        assert len(scene.said) == done, "its tasks have ended"
        return end

    assert asyncio.run(lost()) is RewindEnd.AGAIN
    assert not scene.done


@pytest.mark.parametrize("step", ["EndEarlier", "Reserve", "open gates"])
def test_a_job_that_is_stopped_is_not_brought_back(step: str) -> None:
    scene = RewindScene()
    scene.fails[step] = [Refused("a moment")] * 10_000

    async def stopped() -> RewindEnd:
        work = asyncio.ensure_future(scene.rewind().run())
        await asyncio.sleep(0.05)
        scene.job.state = "ending"
        return await work

    assert asyncio.run(stopped()) is RewindEnd.JOB_ENDS
    assert not scene.done


def test_an_orchestrator_that_restarts_at_any_step_brings_the_job_back() -> None:
    steps = RewindScene()
    play(steps)
    died = 0
    for step in range(len(steps.said)):
        scene = RewindScene()
        scene.dies_at = step

        async def dies(scene: RewindScene = scene) -> None:
            await scene.rewind().run()

        with pytest.raises(Died):
            asyncio.run(dies())
        died += 1
        granted = {c.name: c.epoch for c in scene.job.capsules.values() if c.granted}
        scene.ended.clear()  # what the dead orchestrator knew

        async def goes_on(scene: RewindScene = scene) -> RewindEnd:
            async with asyncio.timeout(20):
                return await scene.rewind().recover()

        assert_runs_again(scene, asyncio.run(goes_on()))
        for name, epoch in granted.items():
            assert scene.job.capsules[name].epoch == epoch, f"{name} runs already (step {step})"
    assert died == len(steps.said) > 10


# ---- the copy that a capsule's own host has kept -----------------------------------------------


def sent_by(scene: RewindScene) -> dict[str, list[str]]:
    """Who was asked to give the image of each capsule, in order."""
    found: dict[str, list[str]] = {}
    for host, ask in scene.asks:
        if isinstance(ask, messages.ForwardHeld):
            found.setdefault(ask.capsule, []).append(host)
    return found


def test_a_survivor_goes_back_from_the_copy_of_its_own_host() -> None:
    scene = RewindScene()
    scene.own_copies = {"h0"}
    assert_runs_again(scene, play(scene))
    assert sent_by(scene) == {"gpt/0": ["h0"], "gpt/1": ["h2"]}


def test_a_copy_that_cannot_be_used_is_tried_once() -> None:
    scene = RewindScene()
    scene.own_copies = {"h0"}
    scene.fails["ForwardHeld h0"] = [StepFailed("ship", "the copy cannot be read")]
    assert_runs_again(scene, play(scene))
    assert sent_by(scene) == {"gpt/0": ["h0", "h2"], "gpt/1": ["h2"]}


def test_a_copy_beside_which_there_is_no_memory_gives_way_to_the_holders_image() -> None:
    scene = RewindScene()
    scene.own_copies = {"h0"}
    scene.fails["Reserve h0"] = [Refused("h0 has not enough memory")]
    assert_runs_again(scene, play(scene))
    assert sent_by(scene) == {"gpt/0": ["h2"], "gpt/1": ["h2"]}


def test_a_failure_that_is_not_the_copys_leaves_it_in_use() -> None:
    scene = RewindScene()
    scene.own_copies = {"h0"}
    scene.fails["Reserve h0"] = [StepFailed("prepare", "no sandbox")]
    assert_runs_again(scene, play(scene))
    assert sent_by(scene) == {"gpt/0": ["h0"], "gpt/1": ["h2"]}


def test_a_capsule_that_goes_elsewhere_comes_from_its_holder() -> None:
    scene = RewindScene()
    scene.own_copies = {"h1"}  # it is lost
    assert_runs_again(scene, play(scene))
    assert not [host for host, ask in scene.asks if host == "h1"]


def without_holder(home_up: bool) -> RewindScene:
    """h2 has no image any more. h0 and h1 have kept copies; h1, which gpt/1 has left, lives or
    not."""
    scene = RewindScene()
    scene.own_copies = {"h0", "h1"}
    scene.generation = dataclasses.replace(scene.generation, own_copies=["gpt/0", "gpt/1"])
    scene.up |= {"h1"} if home_up else set()
    scene.fails["GetHeld h2"] = [NotFound("damaged")] * 10
    return scene


def test_a_host_that_is_left_gives_its_copy_if_no_holder_has_the_image() -> None:
    """Its links are cut, or its GPU has failed: the copy is whole."""
    scene = without_holder(home_up=True)
    assert_runs_again(scene, play(scene))
    assert sent_by(scene) == {"gpt/0": ["h0"], "gpt/1": ["h1"]}


def test_a_host_that_is_left_and_lost_its_copy_is_asked_once() -> None:
    scene = without_holder(home_up=True)
    scene.own_copies = {"h0"}
    rewind = scene.rewind()
    assert asyncio.run(rewind.run()) is RewindEnd.LOST
    # Before that it was asked which files the capsule was writing.
    assert scene.said.count("GetHeld h1") == 2


def test_a_host_that_is_lost_with_its_copy_is_not_waited_for() -> None:
    scene = without_holder(home_up=False)
    rewind = scene.rewind()
    assert asyncio.run(rewind.run()) is RewindEnd.LOST
    assert "GetHeld h1" not in scene.said
