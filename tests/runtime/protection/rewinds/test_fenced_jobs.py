# SPDX-License-Identifier: Apache-2.0
"""Jobs of which no host is heard are taken back once the cluster file's command has switched one of
these hosts off."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rewinds_scene import BRISK, RewindsScene

from liveshift.runtime.messages import HostsReached, Message, TryHosts
from liveshift.runtime.model.jobs import KILLED

AFTER_S = 1.0


class Scene(RewindsScene):
    """``reached``: the hosts that another one reaches although the orchestrator does not."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (place / "state").mkdir()
        self.reached: set[str] = set()
        self.ran = place / "ran"
        self.program = place / "power-off"
        self.program.write_text(f'#!/bin/sh\necho "$LIVESHIFT_HOST" >> {self.ran}\n')
        self.program.chmod(0o755)
        self.settings = f'{BRISK}[snapshots]\nfence = ["{self.program}"]\nfence_after = {AFTER_S}\n'
        super().__init__(place / "state", monkeypatch)
        for host in self.fleet.hosts.values():
            host.digest = self.fleet.cluster.digest

    async def request(self, host: str, message: Message, limit: float) -> Message | None:
        if isinstance(message, TryHosts) and host in self.alive:
            return HostsReached(sorted(self.reached.intersection(message.hosts)))
        return await super().request(host, message, limit)

    def not_fenced(self) -> bool:
        return any("not fenced" in text for text in self.history("fencing"))

    @property
    def fenced(self) -> list[str]:
        return self.ran.read_text().split() if self.ran.exists() else []


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_a_job_whose_hosts_are_all_dead_is_taken_back(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.cut("h0", "h1")
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert {host for host, _, _ in scene.owners().values()} == {"h2"}
    assert scene.fenced == ["h0"], "one is enough"
    (said,) = scene.history("silent")
    assert "not taken back before `snapshots.fence` has switched one off, 1 s later" in said
    dead = f"h0 is dead, says {scene.program}"
    assert f"goes back to s1: {dead}; h1 is silent, and so is its kernel" in (
        scene.history("rewinding")
    )


def test_a_job_that_is_cut_off_from_the_orchestrator_alone_trains_on(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.reached = {"h1"}
            scene.cut("h0", "h1")
            await scene.until(scene.not_fenced)
            await asyncio.sleep(1)

    asyncio.run(play())
    why = "h0, h1: not fenced, as other hosts reach h1, so the job may be well"
    assert why in scene.history("fencing")
    assert not scene.history("rewinding")
    assert not scene.fenced


def test_a_job_of_which_one_kernel_answers_trains_on(scene: Scene) -> None:
    """Its agent may be restarting, and only the other host may be cut off."""

    async def play() -> None:
        async with scene.at_work():
            scene.cut("h1")
            scene.alive.remove("h0")
            await asyncio.sleep(3 * AFTER_S)

    asyncio.run(play())
    assert not scene.history("fencing")
    assert not scene.history("rewinding")


def test_a_job_whose_images_are_gone_keeps_its_hosts(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.images = False
            scene.cut("h0", "h1")
            await scene.until(scene.not_fenced)

    asyncio.run(play())
    (why,) = scene.history("fencing")
    assert "is gone" in why
    assert not scene.fenced


def test_a_job_for_which_there_is_no_room_keeps_its_hosts(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.fleet.taints["h2"] = ("for the test", "root")
            scene.cut("h0", "h1")
            await scene.until(scene.not_fenced)

    asyncio.run(play())
    assert not scene.fenced


def test_a_job_that_a_person_has_stopped_keeps_its_hosts(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.job.state = "ending"
            scene.cut("h0", "h1")
            await asyncio.sleep(3 * AFTER_S)

    asyncio.run(play())
    assert not scene.history("fencing")


def test_the_next_host_is_fenced_too_though_the_first_one_stays_off(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.cut("h0", "h1")
            await scene.until(lambda: len(scene.history("rewound")) == 1)
            scene.alive.add("h1")
            scene.kernels.add("h1")
            await asyncio.sleep(0.1)
            scene.cut("h2")
            await scene.until(scene.not_fenced)

    asyncio.run(play())
    assert scene.history("silent"), "it is said too"
    # h2 had the only image.
    assert scene.fenced == ["h0"]
    assert "no host that holds a/0 is up" in scene.history("fencing")[-1]


def test_a_job_with_a_host_that_is_heard_needs_no_fence(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert not scene.fenced


def test_a_rewind_that_waits_for_a_host_goes_on(scene: Scene) -> None:
    async def play() -> None:
        scene.stuck = {"EndEarlier"}
        async with scene.at_work():
            assert scene.report(scene.end("a/1", KILLED))
            await scene.until(lambda: "EndEarlier h1" in scene.said)
            scene.cut("h0", "h1")
            scene.stuck = set()
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert {host for host, _, _ in scene.owners().values()} == {"h2"}
    assert len(scene.fenced) == 1
