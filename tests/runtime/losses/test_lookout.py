# SPDX-License-Identifier: Apache-2.0
"""What is kept of hosts until one counts as lost; the clock and the network are stand-ins."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from rewind_scene import CLUSTER, RewindScene

from liveshift.errors import Unreachable
from liveshift.runtime.control.kernels import Kernels
from liveshift.runtime.losses import lookout
from liveshift.runtime.losses.left_hosts import LeftHosts
from liveshift.runtime.losses.lookout import Lookout
from liveshift.runtime.losses.watch import PAUSED
from liveshift.runtime.messages import (
    LAUNCHER_S,
    CapsuleEnded,
    CapsuleState,
    DeviceError,
    HostsReached,
    Message,
    TryHosts,
)
from liveshift.runtime.model.jobs import Job

SUSPICION = CLUSTER.timeouts.suspicion


class Scene:
    """The job gpt on h0 and h2. h0 is heard, and no kernel answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.job: Job = RewindScene().job
        self.now = 1000.0
        self.heard = dict.fromkeys(("h0", "h1", "h2", "h3"), self.now)
        self.paused, self.opened = False, 0.0
        self.peers_reach: list[str] | None = None  # what other hosts say; None: nothing
        self.asked: list[tuple[str, Message]] = []
        monkeypatch.setattr(lookout, "time", SimpleNamespace(monotonic=lambda: self.now))

        async def answers(_: Kernels, _address: str, _limit: float) -> bool:
            return False

        monkeypatch.setattr(Kernels, "answers", answers)
        self.lookout = Lookout(
            CLUSTER,
            lambda: self.heard,
            lambda _job: self.paused,
            lambda _job: self.opened,
            lambda _job: self.paused,
            lambda: None,
            self._request,
            LeftHosts(),
        )
        self.now += 2 * SUSPICION  # an orchestrator that was just started calls no host lost
        self.hear("h0", "h2")

    async def _request(self, host: str, request: Message, _limit: float) -> Message | None:
        self.asked.append((host, request))
        if self.peers_reach is None:
            raise Unreachable(f"{host} does not answer")
        return HostsReached(self.peers_reach)

    def hear(self, *hosts: str) -> None:
        self.heard |= dict.fromkeys(hosts, self.now)

    async def pass_(self, seconds: float) -> list[str]:
        """Let so much time pass in which h2 is silent; return the hosts that count as lost."""
        until = self.now + seconds
        while self.now < until:
            self.now += CLUSTER.timeouts.heartbeat / 2
            self.hear("h0")
            self.lookout.watch([self.job])
            await asyncio.sleep(0)  # a probe ends
        return self.lookout.silent(self.job)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_a_host_that_is_silent_is_lost(scene: Scene) -> None:
    async def play() -> None:
        assert await scene.pass_(0.8 * SUSPICION) == []
        assert await scene.pass_(0.4 * SUSPICION) == ["h2"]

    asyncio.run(play())


@pytest.mark.parametrize("said", [False, True])
def test_a_pause_that_all_hosts_have_left_does_not_make_the_wait_longer(
    scene: Scene, said: bool
) -> None:
    """A job may be paused for a snapshot every few seconds."""

    async def play() -> None:
        scene.paused = True
        scene.lookout.watch([scene.job])
        scene.paused = False
        scene.opened = scene.now if said else 0.0
        assert await scene.pass_(1.2 * SUSPICION) == (["h2"] if said else [])
        assert await scene.pass_((PAUSED - 1) * SUSPICION) == ["h2"]

    asyncio.run(play())


@pytest.mark.parametrize("reached", [[], ["h2"], None])
def test_the_wait_after_a_pause_is_no_longer_if_no_peer_reaches_the_host(
    scene: Scene, reached: list[str] | None
) -> None:
    async def play() -> None:
        scene.peers_reach, scene.paused = reached, True
        assert await scene.pass_(0.8 * SUSPICION) == []
        assert await scene.pass_(0.4 * SUSPICION) == (["h2"] if reached == [] else [])
        hosts = {host for host, _ in scene.asked}
        assert hosts == {"h0"}, "the other host of the job, and no spare"
        assert all(isinstance(each, TryHosts) and each.hosts == ["h2"] for _, each in scene.asked)
        scene.hear("h2")
        assert scene.lookout.silent(scene.job) == [], "what was said of an earlier silence is void"
        assert await scene.pass_((PAUSED + 0.2) * SUSPICION) == ["h2"]

    asyncio.run(play())


def test_peers_are_asked_only_about_a_job_that_is_paused(scene: Scene) -> None:
    async def play() -> None:
        scene.peers_reach = []
        assert await scene.pass_(1.2 * SUSPICION) == ["h2"]
        assert scene.asked == []

    asyncio.run(play())


def test_it_knows_since_when_a_host_is_silent_or_a_command_has_ended(scene: Scene) -> None:
    look, (first, _) = scene.lookout, scene.job.capsules.values()

    async def play() -> None:
        assert look.unnoticed(scene.job) is None
        look.ended(first, "why", CapsuleEnded(first.name, first.epoch, 137))
        assert look.unnoticed(scene.job) is None, "its agent was just started"
        look.ended(first, "why", CapsuleEnded(first.name, first.epoch, 137, ago_s=0.25))
        scene.now += 0.5
        assert look.unnoticed(scene.job) == pytest.approx(0.75)
        assert await scene.pass_(1.2 * SUSPICION) == ["h2"]
        assert look.unnoticed(scene.job) == pytest.approx(0.75 + 1.2 * SUSPICION, rel=0.1)

    asyncio.run(play())


# ---- GPUs that fail ------------------------------------------------------------------------------


def on_gpu(scene: Scene, capsule: str, *uuids: str) -> None:
    """A capsule uses these GPUs, as a heartbeat of its host says."""
    state = CapsuleState(capsule, 1, 1, 1, 1, 1.0, [0], "train", gpus=list(uuids))
    scene.lookout.note_heartbeat(scene.job.capsules[capsule], state)
    scene.job.capsules[capsule].seen = state


def test_an_error_of_a_gpu_of_the_job_is_a_fault_for_a_time(scene: Scene) -> None:
    look, (first, second) = scene.lookout, scene.job.capsules
    on_gpu(scene, first, "GPU-a")
    on_gpu(scene, second, "GPU-b")
    assert look.device_fault_before(scene.job, 0.0) == ""
    look.note_device_errors("h2", [DeviceError("GPU-c", "Xid 79", 0.0)])
    assert look.device_fault_before(scene.job, 0.0) == "", "another job's"
    look.note_device_errors("h2", [DeviceError("GPU-b", "Xid 79 (off the bus)", 1.0)])
    assert look.device_fault_before(scene.job, 0.0) == (
        "GPU-b of h2 reported Xid 79 (off the bus) 1.0 s before"
    )
    assert look.lost(scene.job) == {second}, "it should not go back to that GPU"
    assert look.why(scene.job) == "", "what runs on is not taken back"
    scene.now += CLUSTER.timeouts.fault
    assert look.device_fault_before(scene.job, 0.0) == ""
    assert "Xid 79" in look.device_fault_before(scene.job, 2.0), "it has failed 2 s ago"
    assert look.lost(scene.job) == {second}
    scene.now += LAUNCHER_S
    assert look.lost(scene.job) == set()
    look.note_device_errors("h2", [])
    assert look.device_fault_before(scene.job, 0.0) == ""


def test_a_gpu_counts_that_was_used_until_shortly_before(scene: Scene) -> None:
    """A rank has failed, and its launcher ends some seconds later; or device memory has just been
    saved for a snapshot."""
    look, (first, _) = scene.lookout, scene.job.capsules
    on_gpu(scene, first, "GPU-a", "GPU-b")
    scene.now += CLUSTER.timeouts.fault
    on_gpu(scene, first, "GPU-b")
    look.note_device_errors("h0", [DeviceError("GPU-a", "Xid 79", 1.0)])
    assert look.device_fault_before(scene.job, 0.0) == "GPU-a of h0 reported Xid 79 1.0 s before"
    on_gpu(scene, first)
    assert look.device_fault_before(scene.job, 0.0) == "GPU-a of h0 reported Xid 79 1.0 s before"
    scene.now += CLUSTER.timeouts.fault
    look.note_device_errors("h0", [DeviceError("GPU-a", "Xid 79", 1.0)])
    assert look.device_fault_before(scene.job, 0.0) == "", "it has left that GPU"
    assert "Xid 79" in look.device_fault_before(scene.job, LAUNCHER_S), "but not then"
