# SPDX-License-Identifier: Apache-2.0
"""Which ends of commands lead to a rewind, and which end their job."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from functools import partial

import msgspec
import pytest
from rewinds_scene import FAULT_S, RewindsScene, ended, scene

from liveshift.runtime.messages import CapsuleState, DeviceError
from liveshift.runtime.model.jobs import KILLED, Capsule

__all__ = ["scene"]


def test_what_fails_beside_a_silent_host_is_not_recorded_yet(scene: RewindsScene) -> None:
    async def play() -> None:
        job, capsule = scene.job, scene.job.capsules["a/0"]
        scene.stuck = {"GetHeld"}  # so that no rewind is written, however slow the machine is
        async with scene.at_work():
            await asyncio.sleep(0.8)  # else agents may not have reported to a new orchestrator
            scene.cut("h1")
            await asyncio.sleep(0.3)
            assert scene.rewinds.takes_back(job, capsule, ended(capsule, 1))
            assert not scene.rewinds.takes_back(job, capsule, ended(capsule, 0)), "ended well"
            assert not scene.history("rewinding")

    asyncio.run(play())


def test_what_fails_shortly_before_a_host_is_lost_is_taken_back_with_it(
    scene: RewindsScene,
) -> None:
    async def play() -> None:
        async with scene.at_work():
            await asyncio.sleep(0.8)  # else agents may not have reported to a new orchestrator
            end = scene.end("a/0", 1)
            assert scene.report(end), "nothing is silent yet"
            scene.cut("h1")
            await scene.until(lambda: not scene.report(end))
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.history("rewound")
    assert scene.owners() == {"a/0": ("h0", 3, True), "a/1": ("h2", 3, True)}


def test_what_fails_shortly_after_a_host_was_silent_fails_of_it(scene: RewindsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await asyncio.sleep(0.8)  # else agents may not have reported to a new orchestrator
            scene.cut("h1")
            await asyncio.sleep(0.3)
            scene.alive.add("h1")
            scene.kernels.add("h1")
            await asyncio.sleep(0.1)
            assert scene.report(scene.end("a/0", 1))
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.owners() == {"a/0": ("h0", 3, True), "a/1": ("h1", 3, True)}, "all in place"
    (why,) = scene.history("rewinding")
    assert "a/0 ended with code 1, and h1 and its kernel were silent until" in why
    assert scene.died() == [{}], "the job is not to blame"


def test_what_fails_after_an_error_of_its_gpu_fails_of_it(scene: RewindsScene) -> None:
    """The capsule goes to another host if there is room; that counts for max_rewinds."""

    async def play() -> None:
        async with scene.at_work():
            await asyncio.sleep(0.8)  # else agents may not have reported to a new orchestrator
            state = CapsuleState("a/1", 1, 1, 1, 7, 1.0, [1], "train", gpus=["GPU-b"])
            scene.rewinds.note_heartbeat(scene.job.capsules["a/1"], state)
            # It counts for as long as the rewind may take to be planned.
            scene.rewinds.note_device_errors("h1", [DeviceError("GPU-b", "Xid 79", -60.0)])
            assert scene.report(scene.end("a/1", 1, collectives=7))
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    (why,) = scene.history("rewinding")
    assert "a/1 ended with code 1, and GPU-b of h1 reported Xid 79" in why
    assert scene.owners() == {"a/0": ("h0", 3, True), "a/1": ("h2", 3, True)}
    assert scene.died() == [{"a/1": 7}]


def test_what_died_with_its_host_is_no_fault_of_the_job(scene: RewindsScene) -> None:
    """A host without power comes back before the job has gone back: it had to wait, say. However
    often that happens, max_rewinds does not count it."""

    async def play() -> None:
        async with scene.at_work():
            for count in range(1, 8):
                dead = msgspec.structs.replace(
                    scene.end("a/1", KILLED), found_dead=True, rebooted=True
                )
                assert scene.report(dead)
                await scene.until(partial(_rewound, scene, count))

    asyncio.run(play())
    assert all("came back without a/1" in text for text in scene.history("rewinding"))
    assert scene.died() == [{}] * 7
    assert all(owner[2] for owner in scene.owners().values())


def test_the_history_says_after_what_time_a_killed_rank_was_noticed(scene: RewindsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await asyncio.sleep(0.8)  # else agents may not have reported to a new orchestrator
            end = scene.end("a/1", KILLED, signal.SIGKILL, 7)
            assert scene.report(msgspec.structs.replace(end, ago_s=100.0))
            await scene.until(partial(_rewound, scene, 1))

    asyncio.run(play())
    (text,) = scene.history("rewound")
    found = re.search(r"([0-9.]+) s until noticed", text)
    assert found is not None, text
    assert 100.0 <= float(found[1]) < 110.0
    assert scene.job.rewind_s == 0.0, "it says nothing of a host's silence"


@pytest.mark.parametrize("silent", [True, False])
def test_what_died_while_its_agent_was_away_died_with_its_host_only_if_that_was_silent(
    scene: RewindsScene, silent: bool
) -> None:
    """The kernel may have ended both for want of memory."""

    async def play() -> None:
        async with scene.at_work():
            await asyncio.sleep(0.8)  # else agents may not have reported to a new orchestrator
            scene.job.capsules["a/1"].reported = time.monotonic()
            scene.alive.discard("h1")
            if silent:
                scene.kernels.discard("h1")
                scene.stuck = {"GetHeld"}  # so that no rewind is written before it is back
            await asyncio.sleep(0.3)
            scene.alive.add("h1")
            scene.kernels.add("h1")
            await asyncio.sleep(0.1)
            scene.stuck = set()
            dead = msgspec.structs.replace(scene.end("a/1", KILLED), found_dead=True)
            assert scene.report(dead)
            await scene.until(partial(_rewound, scene, 1))

    asyncio.run(play())
    assert scene.died() == ([{}] if silent else [{"a/1": 0}])


def _rewound(scene: RewindsScene, times: int) -> bool:
    return len(scene.history("rewound")) == times


def test_what_fails_by_itself_ends_the_job_once_that_is_certain(scene: RewindsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            began = time.monotonic()
            end = scene.end("a/0", 3)
            while scene.report(end):
                await asyncio.sleep(0.02)
            assert FAULT_S <= time.monotonic() - began < FAULT_S + 5

    asyncio.run(play())
    assert not scene.history("rewinding")
    assert scene.owners() == {"a/0": ("h0", 1, True), "a/1": ("h1", 1, True)}


@pytest.mark.parametrize(("code", "signum"), [(137, 0), (139, 0), (1, 11), (1, 7)])
def test_a_job_of_which_a_rank_was_killed_goes_back_in_place(
    scene: RewindsScene, code: int, signum: int
) -> None:
    async def play() -> None:
        async with scene.at_work():
            assert scene.report(scene.end("a/1", code, signum))
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.owners() == {"a/0": ("h0", 3, True), "a/1": ("h1", 3, True)}
    (why,) = scene.history("rewinding")
    assert why.startswith("goes back to s1: ")
    assert "was ended by SIG" in why
    assert scene.died() == [{"a/1": 0}]


def test_a_peer_that_fails_of_a_killed_rank_is_taken_back_whichever_ends_first(
    scene: RewindsScene,
) -> None:
    async def play() -> None:
        async with scene.at_work():
            assert scene.report(scene.end("a/0", 1)), "its connection was reset"
            await asyncio.sleep(0.1)
            assert scene.report(scene.end("a/1", KILLED))
            assert scene.report(scene.end("a/0", 1))
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.job.state == "running"
    assert scene.died() == [{"a/1": 0}]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGABRT])
def test_a_job_that_a_person_has_signalled_ends_as_it_will(
    scene: RewindsScene, number: int
) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.stuck = {"Signal"}
            sending = asyncio.ensure_future(scene.stopping.signal(scene.job, number, "root"))
            await scene.until(lambda: scene.job.end_asked > 0)
            assert not scene.report(scene.end("a/1", 128 + number))
            sending.cancel()

    asyncio.run(play())
    assert not scene.history("rewinding")


def test_a_signal_of_before_the_snapshot_was_borne(scene: RewindsScene) -> None:
    scene.job.end_asked = time.monotonic()
    scene.take_snapshot(scene.fleet)
    assert scene.report(scene.end("a/1", KILLED))


@pytest.mark.parametrize("step", [-86_400.0, 86_400.0])
def test_the_clock_may_be_set_between_the_snapshot_and_the_signal(
    scene: RewindsScene, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    now = time.time()
    scene.take_snapshot(scene.fleet)
    monkeypatch.setattr(time, "time", lambda: now + step)

    async def play() -> None:
        async with scene.at_work():
            await scene.stopping.signal(scene.job, signal.SIGINT, "root")
            assert not scene.report(scene.end("a/1", KILLED)), "as it was asked to"
            scene.take_snapshot(scene.fleet)
            assert scene.report(scene.end("a/1", KILLED)), "it has borne the signal"

    asyncio.run(play())


def test_a_signal_that_is_delivered_after_a_snapshot_was_wished_after_it(
    scene: RewindsScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capsules are frozen for a snapshot when a person asks."""

    async def after_the_thaw(capsules: list[Capsule], _: int) -> list[tuple[Capsule, None]]:
        scene.take_snapshot(scene.fleet)
        return [(capsule, None) for capsule in capsules]

    monkeypatch.setattr(scene.stopping, "_all", after_the_thaw)

    async def play() -> None:
        async with scene.at_work():
            await scene.stopping.signal(scene.job, signal.SIGINT, "root")
            assert not scene.report(scene.end("a/1", KILLED)), "as it was asked to"

    asyncio.run(play())


def test_a_rank_that_fails_while_its_job_is_taken_back_is_taken_back_with_it(
    scene: RewindsScene,
) -> None:
    """Its peers may not be back for minutes, because their holder is gone: it waits in vain."""
    scene.job.state = "rewinding"
    assert scene.report(scene.end("a/0", 1))
    assert scene.rewinds.why_again(scene.job) == "a/0 ended with code 1"
    assert scene.rewinds.takes_back(scene.job, scene.job.capsules["a/0"], scene.end("a/0", 1))


def test_with_any_an_exit_code_leads_to_a_rewind_too(scene: RewindsScene) -> None:
    scene.ask(rewind_on="any")

    async def play() -> None:
        async with scene.at_work():
            assert not scene.report(scene.end("a/1", 0))
            assert scene.report(scene.end("a/1", 3))
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.history("rewinding") == ["goes back to s1: a/1 ended with code 3"]


def test_a_rank_that_dies_twice_at_one_collective_ends_its_job(scene: RewindsScene) -> None:
    async def play() -> None:
        async with scene.at_work():
            assert scene.report(scene.end("a/1", 1, signal.SIGSEGV, collectives=40))
            await scene.until(lambda: len(scene.history("rewound")) == 1)
            assert scene.report(scene.end("a/1", 1, signal.SIGSEGV, collectives=41)), (
                "at another one"
            )
            await scene.until(lambda: len(scene.history("rewound")) == 2)
            assert not scene.report(scene.end("a/1", 1, signal.SIGSEGV, collectives=41))

    asyncio.run(play())
    (why,) = scene.history("not rewound")
    assert "twice in a row after collective 41" in why
    assert scene.died() == [{"a/1": 40}, {"a/1": 41}]


def test_a_job_is_taken_back_so_often_in_an_hour_only(scene: RewindsScene) -> None:
    scene.ask(max_rewinds=1)

    async def play() -> None:
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: len(scene.history("rewound")) == 1)
            assert scene.report(scene.end("a/0", KILLED, collectives=3)), (
                "a lost host does not count"
            )
            await scene.until(lambda: len(scene.history("rewound")) == 2)
            assert not scene.report(scene.end("a/0", KILLED, collectives=4))

    asyncio.run(play())
    (why,) = scene.history("not rewound")
    assert "taken back 1 times" in why
    assert why.endswith("max_rewinds is 1")


def test_a_rank_that_is_killed_while_its_job_is_rewound_is_taken_back_again(
    scene: RewindsScene,
) -> None:
    async def play() -> None:
        scene.stuck = {"ForwardHeld"}
        async with scene.at_work():
            assert scene.report(scene.end("a/1", KILLED, collectives=5))
            await scene.until(lambda: "ForwardHeld h2" in scene.said)
            scene.job.capsules["a/0"].granted = True  # it is back already
            assert scene.report(scene.end("a/0", KILLED, collectives=6))
            scene.stuck = set()
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.job.rewinds == 2
    assert scene.died() == [{"a/1": 5}, {"a/0": 6}]
