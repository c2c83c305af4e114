# SPDX-License-Identifier: Apache-2.0
"""Which hosts a job leaves because they do not reach each other; the clock and the other hosts are
stand-ins."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from rewind_scene import CLUSTER, RewindScene

from liveshift.errors import Unreachable
from liveshift.runtime.messages import CapsuleState, HostsReached, Message, TryHosts
from liveshift.runtime.model.jobs import Job
from liveshift.runtime.snapshot import cut_links
from liveshift.runtime.snapshot.cut_links import (
    ASKED,
    AVOIDED_S,
    CutLinks,
    LeftHosts,
    hosts_to_leave,
    silences,
)

LIMITS = CLUSTER.timeouts
SUSPICION = LIMITS.suspicion
ONE, OTHER = "gpt/0", "gpt/1"


class Scene:
    """The job gpt on h0 and h2, which trains; all hosts are heard. ``reach``: what each other host
    answers when it is asked; one that is not in it does not answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.job: Job = RewindScene().job
        self.job.state = "running"
        for capsule in self.job.capsules.values():
            capsule.granted = True
        self.now = 1000.0
        self.late: dict[str, float] = {}  # by host: seconds since it was heard
        self.hosts = ["h0", "h1", "h2", "h3"]
        self.reach: dict[str, list[str]] = {}
        self.asked: list[str] = []
        self.woken = 0
        monkeypatch.setattr(cut_links, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.links = CutLinks(LIMITS, self._heard, self._request, self._wake)
        self.now += 10 * SUSPICION

    def _heard(self) -> dict[str, float]:
        return {host: self.now - self.late.get(host, 0.0) for host in self.hosts}

    async def _request(self, host: str, request: Message, _limit: float) -> Message | None:
        assert isinstance(request, TryHosts)
        self.asked.append(host)
        if host not in self.reach:
            raise Unreachable(f"{host} does not answer")
        return HostsReached([each for each in self.reach[host] if each in request.hosts])

    def _wake(self) -> None:
        self.woken += 1

    def report(self, name: str, peer: str, seconds: float, epoch: int = 3) -> None:
        """A capsule's host reports that a peer has not answered for so long."""
        index = self.job.capsules[peer].index if peer in self.job.capsules else int(peer)
        silent = {self.job.overlay.address(index): seconds}
        state = CapsuleState(name, epoch, 1, 1, 1, 1.0, [0], "train", unanswered=silent)
        self.job.capsules[name].seen = state

    def look(self, *, paused: bool = False) -> None:
        async def play() -> None:
            self.links.look(self.job, paused=paused)
            for _ in range(10):
                await asyncio.sleep(0)

        asyncio.run(play())

    def leaves(self, progress: dict[str, float] | None = None) -> list[str]:
        return list(self.links.leaves(self.job, progress or {}))


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_a_link_that_is_cut_for_the_suspicion_makes_the_job_leave_a_host(scene: Scene) -> None:
    scene.report(ONE, OTHER, 0.9 * SUSPICION)
    assert scene.leaves() == []
    scene.report(ONE, OTHER, SUSPICION)
    assert scene.links.leaves(scene.job, {}) == {"h2": "h0 and h2 do not reach each other"}


def test_what_was_said_of_an_earlier_copy_does_not_count(scene: Scene) -> None:
    scene.report(ONE, OTHER, SUSPICION, epoch=2)
    assert silences(scene.job) == []
    assert scene.leaves() == []


@pytest.mark.parametrize("fate", ["ended", "not granted", "on one host", "no capsule"])
def test_only_living_peers_on_other_hosts_count(scene: Scene, fate: str) -> None:
    peer = scene.job.capsules[OTHER]
    if fate == "ended":
        peer.code = 0
    elif fate == "not granted":
        peer.granted = False
    elif fate == "on one host":
        peer.host = "h0"
    scene.report(ONE, "7" if fate == "no capsule" else OTHER, 10 * SUSPICION)
    assert scene.leaves() == []


def test_a_host_that_is_not_heard_is_judged_by_its_silence(scene: Scene) -> None:
    scene.report(ONE, OTHER, 2 * SUSPICION)
    scene.late["h2"] = SUSPICION / 2
    assert scene.leaves() == []


def test_a_job_that_trains_all_the_same_stays(scene: Scene) -> None:
    """Perhaps the connection is one that nothing waits for."""
    scene.report(ONE, OTHER, 2 * SUSPICION)
    assert scene.leaves({ONE: scene.now - SUSPICION / 2}) == []
    assert scene.leaves({"another/0": scene.now}) == ["h2"]
    assert scene.leaves({ONE: scene.now - SUSPICION}) == ["h2"]


@pytest.mark.parametrize("state", ["paused", "rewinding"])
def test_networks_that_were_locked_a_moment_ago_say_nothing(scene: Scene, state: str) -> None:
    scene.report(ONE, OTHER, 2 * SUSPICION)
    scene.job.state = "rewinding" if state == "rewinding" else "running"
    scene.look(paused=state == "paused")
    scene.job.state = "running"
    assert scene.leaves() == []
    scene.now += 0.9 * SUSPICION
    assert scene.leaves() == []
    scene.now += 0.2 * SUSPICION
    assert scene.leaves() == ["h2"]


def test_an_orchestrator_that_was_just_started_waits(scene: Scene) -> None:
    scene.report(ONE, OTHER, 9 * SUSPICION)
    scene.links = CutLinks(LIMITS, scene._heard, scene._request, scene._wake)
    assert scene.leaves() == []
    scene.now += 1.1 * SUSPICION
    assert scene.leaves() == ["h2"]


def test_others_say_which_of_the_two_they_reach(scene: Scene) -> None:
    """h0's links are all cut, but for the one to the orchestrator."""
    scene.reach = {"h1": ["h2"], "h3": ["h2"]}
    scene.report(OTHER, ONE, SUSPICION / 2)
    scene.look()
    assert sorted(scene.asked) == ["h1", "h3"], "hosts of the job have said it themselves"
    assert scene.woken == 1
    scene.report(OTHER, ONE, SUSPICION)
    scene.look()
    assert len(scene.asked) == 2, "they are asked once"
    assert scene.leaves() == ["h0"]


def test_few_others_are_asked_and_holders_first(scene: Scene) -> None:
    scene.hosts += [f"n{number}" for number in range(9)]
    scene.late["h1"] = 2 * SUSPICION
    scene.report(OTHER, ONE, SUSPICION / 2)
    newest = RewindScene().generation
    newest.holders.update({ONE: ["n7"], OTHER: ["n7"]})
    scene.job.newest = newest
    scene.look()
    assert scene.asked == ["n7", "h3", "n0"]
    assert len(scene.asked) == ASKED


def test_a_later_cut_is_asked_about_again(scene: Scene) -> None:
    scene.reach = {"h1": ["h0"]}
    scene.report(OTHER, ONE, SUSPICION / 2)
    scene.look()
    scene.job.capsules[OTHER].seen = None
    scene.look()
    scene.report(OTHER, ONE, SUSPICION / 2)
    scene.look()
    assert len(scene.asked) == 4


def test_ranks_that_die_soon_after_a_cut_die_of_it(scene: Scene) -> None:
    assert not scene.links.suspects(scene.job)
    assert scene.links.fault_before(scene.job) == ""
    scene.report(ONE, OTHER, SUSPICION / 2)
    scene.look()
    assert scene.links.suspects(scene.job)
    scene.job.capsules[ONE].seen = None
    scene.now += LIMITS.fault / 2
    assert not scene.links.suspects(scene.job)
    said = scene.links.fault_before(scene.job)
    assert said == f"h0 and h2 did not reach each other until {LIMITS.fault / 2:.1f} s before"
    scene.now += LIMITS.fault
    assert scene.links.fault_before(scene.job) == ""


@pytest.mark.parametrize(
    ("pairs", "reached", "capsules", "chosen"),
    [
        ([], {}, {}, []),
        ([("a", "b")], {}, {}, ["b"]),
        ([("a", "b")], {"b": 1}, {}, ["a"]),
        ([("a", "b")], {}, {"a": 1, "b": 8}, ["a"]),
        ([("a", "b"), ("a", "c"), ("a", "d")], {"a": 3}, {}, ["a"]),
        ([("a", "b"), ("c", "d")], {"b": 2, "c": 2}, {}, ["d", "a"]),
        ([("a", "b"), ("a", "c"), ("b", "c")], {}, {}, ["c", "b"]),
    ],
)
def test_so_few_hosts_are_left_that_all_others_reach_each_other(
    pairs: list[tuple[str, str]],
    reached: dict[str, int],
    capsules: dict[str, int],
    chosen: list[str],
) -> None:
    assert hosts_to_leave(pairs, reached, capsules) == chosen


def test_a_host_that_was_left_comes_last_for_a_time(scene: Scene) -> None:
    left = LeftHosts()
    left.note(["h2"])
    assert left.recent() == {"h2"}
    scene.now += AVOIDED_S
    assert left.recent() == set()
