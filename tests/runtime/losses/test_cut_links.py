# SPDX-License-Identifier: Apache-2.0
"""Which hosts a job leaves because they do not reach each other; the clock and the other hosts are
stand-ins."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from rewind_scene import CLUSTER, RewindScene

from liveshift.errors import Unreachable
from liveshift.runtime.losses import cut_links, left_hosts, link_votes
from liveshift.runtime.losses.cut_links import (
    EARLY,
    NAMED_PAIRS,
    NOTHING,
    CutLinks,
    CutVerdict,
    hosts_to_leave,
    silences,
)
from liveshift.runtime.losses.left_hosts import AVOIDED_S, LeftHosts
from liveshift.runtime.losses.link_votes import MOST_VOTERS
from liveshift.runtime.messages import CapsuleState, HostsReached, Message, TryHosts
from liveshift.runtime.model.jobs import Job

LIMITS = CLUSTER.timeouts
SUSPICION, HEARTBEAT = LIMITS.suspicion, LIMITS.heartbeat
ONE, OTHER = "gpt/0", "gpt/1"


class Scene:
    """The job gpt on h0 and h2, which is frozen; all hosts are heard. ``reach``: what each other
    host answers when it is asked; one that is not in it does not answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.job: Job = RewindScene().job
        self.job.state = "running"
        self.now = 1000.0
        self.hosts = ["h0", "h1", "h2", "h3"]
        self.reach = {"h1": ["h0", "h2"], "h3": ["h0", "h2"]}
        self.asked: list[str] = []
        self.limits: list[float] = []
        self.slow = False  # nobody answers yet
        clock = SimpleNamespace(monotonic=lambda: self.now)
        for module in (cut_links, left_hosts, link_votes):
            monkeypatch.setattr(module, "time", clock)
        self.left = LeftHosts()
        self.begin()
        for name in self.job.capsules:
            self.job.capsules[name].granted = True
            self.report(name)
        self.look()  # the job is protected from now on
        self.later(10 * SUSPICION)

    def begin(self) -> None:
        self.links = CutLinks(LIMITS, self._heard, self._request, lambda: None, self.left)

    def _heard(self) -> dict[str, float]:
        return dict.fromkeys(self.hosts, self.now)

    async def _request(self, host: str, request: Message, _limit: float) -> Message | None:
        assert isinstance(request, TryHosts)
        self.asked.append(host)
        self.limits.append(request.limit)
        if self.slow:
            await asyncio.Event().wait()
        if host not in self.reach:
            raise Unreachable(f"{host} does not answer")
        return HostsReached([each for each in self.reach[host] if each in request.hosts])

    def report(self, name: str, peer: str = "", seconds: float = 0.0, epoch: int = 3) -> None:
        """A capsule's host reports it: a peer has not answered for so long, or "" for none."""
        silent = {}
        if peer:
            index = self.job.capsules[peer].index if peer in self.job.capsules else int(peer)
            silent = {self.job.overlay.address(index): seconds}
        state = CapsuleState(name, epoch, 1, 1, 1, 1.0, [0], "train", unanswered=silent)
        capsule = self.job.capsules[name]
        capsule.seen = state
        capsule.note_report(self.now, SUSPICION)

    def heard(self, *but: str) -> None:
        """All capsules are reported again as they were, but for some."""
        for capsule in self.job.capsules.values():
            if capsule.name not in but:
                capsule.note_report(self.now, SUSPICION)

    def later(self, seconds: float) -> None:
        """So many seconds later; all capsules have been reported again and again."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + HEARTBEAT)
            self.heard()

    def look(self, *, locked: bool = False) -> None:
        async def play() -> None:
            self.links.follow(self.job, locked=locked)
            for _ in range(10):
                await asyncio.sleep(0)

        asyncio.run(play())

    def leaves(self) -> list[str]:
        self.look()
        return list(self.links.verdict(self.job).leaves)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_a_link_that_is_cut_for_the_suspicion_makes_the_job_leave_a_host(scene: Scene) -> None:
    scene.report(ONE, OTHER, 0.9 * SUSPICION)
    assert scene.leaves() == []
    scene.report(ONE, OTHER, 1.1 * SUSPICION)
    scene.look()
    assert scene.links.verdict(scene.job) == CutVerdict(
        frozenset({"h2"}),
        "h0 and h2 do not reach each other",
        reach=frozenset({"h1", "h3"}),
        seconds=1.1 * SUSPICION,
        pairs=frozenset({("h0", "h2")}),
    )


def test_what_was_said_of_an_earlier_copy_does_not_count(scene: Scene) -> None:
    scene.report(ONE, OTHER, 2 * SUSPICION, epoch=2)
    assert silences(scene.job, scene.now, LIMITS, 0.0) == {}
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


@pytest.mark.parametrize("ended", [ONE, OTHER])
def test_a_capsule_that_is_reported_no_more_says_nothing_and_nothing_is_said_of_it(
    scene: Scene, ended: str
) -> None:
    """Its command has ended, and its network with it; or its host is not heard, and is judged by
    that."""
    scene.report(ONE, OTHER, SUSPICION / 2)
    scene.look()
    assert scene.links.suspects(scene.job)
    for _ in range(8):
        scene.now += HEARTBEAT
        scene.heard(ended)
        if ended == OTHER:
            scene.report(ONE, OTHER, 2 * SUSPICION)
        scene.look()
    assert not scene.links.suspects(scene.job)
    assert scene.leaves() == []


def test_a_job_that_trains_all_the_same_stays(scene: Scene) -> None:
    """Perhaps the connection is one that nothing waits for."""
    scene.report(ONE, OTHER, 2 * SUSPICION)
    scene.job.capsules[OTHER].progressed = scene.now - SUSPICION / 2
    assert scene.leaves() == []
    scene.job.capsules[OTHER].progressed = scene.now - SUSPICION
    assert scene.leaves() == ["h2"]


@pytest.mark.parametrize("state", ["locked", "rewinding"])
def test_networks_that_were_locked_a_moment_ago_say_nothing(scene: Scene, state: str) -> None:
    scene.report(ONE, OTHER, 2 * SUSPICION)
    scene.job.state = "rewinding" if state == "rewinding" else "running"
    scene.look(locked=state == "locked")
    scene.job.state = "running"
    assert scene.leaves() == []
    scene.later(0.9 * SUSPICION)
    assert scene.leaves() == []
    scene.later(0.2 * SUSPICION)
    assert scene.leaves() == ["h2"]


def test_an_orchestrator_that_was_just_started_waits(scene: Scene) -> None:
    """An earlier one may have left the job's networks locked."""
    scene.report(ONE, OTHER, 9 * SUSPICION)
    scene.begin()
    for _ in range(3):
        assert scene.leaves() == []
        scene.later(0.9 * SUSPICION)
    scene.later(0.6 * SUSPICION)
    assert scene.leaves() == ["h2"]


def test_a_job_that_is_protected_since_a_moment_ago_waits(scene: Scene) -> None:
    """Its first snapshot had locked its networks."""
    scene.links.forget_all_but([])
    scene.report(ONE, OTHER, 9 * SUSPICION)
    assert scene.leaves() == []
    scene.later(1.1 * SUSPICION)
    assert scene.leaves() == ["h2"]


# ---- what other hosts say ------------------------------------------------------------------------


def test_others_say_which_of_the_two_they_reach(scene: Scene) -> None:
    """h0's links are all cut, but for the one to the orchestrator."""
    scene.reach = {"h1": ["h2"], "h3": ["h2"]}
    scene.report(OTHER, ONE, EARLY * HEARTBEAT)
    scene.look()
    assert sorted(scene.asked) == ["h1", "h3"], "hosts of the job have said it themselves"
    assert max(scene.limits) + EARLY * HEARTBEAT <= SUSPICION, "they have answered by then"
    scene.report(OTHER, ONE, SUSPICION)
    assert scene.leaves() == ["h0"]
    assert len(scene.asked) == 2, "they are asked once"


def test_others_are_asked_again_as_long_as_links_are_cut(scene: Scene) -> None:
    """A switch may be booting when they are asked first."""
    scene.reach = {"h1": [], "h3": []}
    scene.report(OTHER, ONE, 2 * SUSPICION)
    assert scene.leaves() == []
    scene.reach = {"h1": ["h2"], "h3": ["h2"]}
    assert scene.leaves() == []
    scene.later(1.1 * SUSPICION)
    assert scene.leaves() == ["h0"]
    assert len(scene.asked) == 4


def test_a_heartbeat_that_is_late_does_not_begin_it_all_anew(scene: Scene) -> None:
    scene.report(OTHER, ONE, 2 * SUSPICION)
    assert scene.leaves() == ["h2"]
    scene.now += 3 * HEARTBEAT
    assert scene.leaves() == [], "nobody is reported"
    scene.heard()
    assert scene.leaves() == ["h2"]
    assert len(scene.asked) == 2


def test_an_agent_that_stood_still_may_have_left_its_network_locked(scene: Scene) -> None:
    """It was in the middle of a snapshot, which was given up meanwhile. Once it goes on it opens
    the network; until then it is reported as if nothing were wrong."""
    scene.report(ONE, OTHER, 2 * SUSPICION)
    assert scene.leaves() == ["h2"]
    for _ in range(round(SUSPICION / HEARTBEAT) + 1):
        scene.now += HEARTBEAT
        scene.heard(OTHER)
        scene.look()
    scene.heard()
    assert scene.leaves() == []
    assert not scene.links.suspects(scene.job)
    scene.later(1.1 * SUSPICION)
    assert scene.leaves() == ["h2"], "it does not reach its peer either"


def test_a_ballot_that_fails_is_followed_by_another(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise ValueError("what is that?")

    scene.report(OTHER, ONE, 2 * SUSPICION)
    with monkeypatch.context() as patch:
        patch.setattr(scene.links, "_request", fails)
        assert scene.leaves() == []
    assert scene.leaves() == ["h2"]


def test_nothing_is_decided_before_they_have_answered(scene: Scene) -> None:
    scene.slow = True
    scene.report(OTHER, ONE, 2 * SUSPICION)
    assert scene.leaves() == []
    assert scene.links.verdict(scene.job) == NOTHING


@pytest.mark.parametrize("reach", [{}, {"h1": [], "h3": ["h2"]}, {"h1": []}])
def test_a_job_stays_where_nobody_else_reaches_those_that_would_stay(
    scene: Scene, reach: dict[str, list[str]]
) -> None:
    """The whole network is down, or a part of it that has both hosts."""
    scene.reach = reach
    scene.report(OTHER, ONE, 2 * SUSPICION)
    if reach.get("h3"):
        assert scene.leaves() == ["h0"], "h3 reaches h2"
        assert scene.links.verdict(scene.job).miss == {"h1"}, "which does not"
        return
    assert scene.leaves() == []
    why = "h0 and h2 do not reach each other, and no other host reaches those that would stay"
    assert scene.links.verdict(scene.job).waits == why


def test_few_others_are_asked_and_holders_first(scene: Scene) -> None:
    scene.hosts += [f"n{number}" for number in range(9)]
    scene.hosts.remove("h1")
    newest = RewindScene().generation
    newest.holders.update({ONE: ["n7"], OTHER: ["n7"]})
    scene.job.newest = newest
    scene.report(OTHER, ONE, SUSPICION / 2)
    scene.look()
    assert scene.asked[0] == "n7"
    assert len(set(scene.asked)) == MOST_VOTERS
    asked, scene.asked, scene.job.name = set(scene.asked), [], "another"
    scene.look()  # it is protected from now on
    scene.later(1.1 * SUSPICION)
    scene.look()
    assert scene.asked
    assert set(scene.asked) != asked, "not the same ones for all jobs"


def test_hosts_that_were_left_are_asked_last(scene: Scene) -> None:
    scene.hosts += [f"n{number}" for number in range(9)]
    scene.left.note(["h1", "h3", *(f"n{number}" for number in range(7))], [])
    scene.report(OTHER, ONE, SUSPICION / 2)
    scene.look()
    assert {"n7", "n8"} < set(scene.asked)


def test_a_later_cut_is_asked_about_again(scene: Scene) -> None:
    scene.report(OTHER, ONE, SUSPICION / 2)
    scene.look()
    scene.report(OTHER)
    scene.later(1.1 * SUSPICION)
    scene.look()
    scene.report(OTHER, ONE, SUSPICION / 2)
    scene.look()
    assert len(scene.asked) == 4


def test_a_later_job_of_the_same_name_is_not_judged_by_the_earlier_one(scene: Scene) -> None:
    scene.reach = {"h1": ["h2"]}
    scene.report(OTHER, ONE, 2 * SUSPICION)
    assert scene.leaves() == ["h0"]
    scene.links.forget_all_but([])
    assert scene.links.fault_before(scene.job) == ""
    assert scene.links.verdict(scene.job) == NOTHING


# ---- what it means for ranks that end ------------------------------------------------------------


def test_ranks_that_die_soon_after_a_cut_die_of_it(scene: Scene) -> None:
    assert not scene.links.suspects(scene.job)
    assert scene.links.fault_before(scene.job) == ""
    scene.report(ONE, OTHER, SUSPICION * 0.7)
    scene.look()
    assert scene.links.suspects(scene.job)
    scene.report(ONE, OTHER, SUSPICION + 2 * LIMITS.fault)
    assert not scene.links.suspects(scene.job), "the job waits for the link"
    scene.report(ONE)
    scene.now += LIMITS.fault / 2
    assert not scene.links.suspects(scene.job)
    said = scene.links.fault_before(scene.job)
    assert said == f"h0 and h2 did not reach each other until {LIMITS.fault / 2:.1f} s before"
    scene.now += LIMITS.fault
    assert scene.links.fault_before(scene.job) == ""


# ---- which hosts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "before", "reached", "capsules", "chosen"),
    [
        ([], [], {}, {}, []),
        ([("a", "b")], [], {}, {}, ["b"]),
        ([("a", "b")], [], {"b": 1}, {}, ["a"]),
        ([("a", "b")], [], {}, {"a": 1, "b": 8}, ["a"]),
        ([("a", "b")], [("a", "c")], {}, {}, ["a"]),
        ([("a", "b")], [("a", "c")], {"a": 1}, {}, ["b"]),
        ([("a", "b")], [("a", "b")], {}, {}, ["b"]),
        ([("a", "b"), ("a", "c"), ("a", "d")], [], {"a": 3}, {}, ["a"]),
        ([("a", "b"), ("c", "d")], [], {"b": 2, "c": 2}, {}, ["d", "a"]),
        ([("a", "b"), ("a", "c"), ("b", "c")], [], {}, {}, ["c", "b"]),
    ],
)
def test_hosts_are_left_until_all_others_reach_each_other(
    pairs: list[tuple[str, str]],
    before: list[tuple[str, str]],
    reached: dict[str, int],
    capsules: dict[str, int],
    chosen: list[str],
) -> None:
    assert hosts_to_leave(pairs, before, reached, capsules) == chosen


def test_what_others_reach_may_come_first() -> None:
    """All of a rack is cut off: the one host of the job elsewhere has the most cut links."""
    pairs, reached = [("a0", "b0"), ("a0", "b1")], {"a0": 3}
    assert hosts_to_leave(pairs, [], reached, {}) == ["a0"]
    assert hosts_to_leave(pairs, [], reached, {}, votes_first=True) == ["b1", "b0"]


def test_a_host_with_most_cut_links_stays_if_only_that_one_is_reached(scene: Scene) -> None:
    scene.reach = {"h1": ["h0"], "h3": ["h0"]}
    scene.left.note(["h3"], [("h0", "h3")])
    scene.report(ONE, OTHER, 2 * SUSPICION)
    assert scene.leaves() == ["h2"]


def test_a_host_whose_partner_was_left_is_the_one_to_go_the_next_time(scene: Scene) -> None:
    """Only the jobs' own traffic is dropped there, so that others reach it."""
    scene.left.note(["h1"], [("h0", "h1")])
    scene.report(ONE, OTHER, 2 * SUSPICION)
    assert scene.leaves() == ["h0"]


def test_a_host_that_was_left_comes_last_for_a_time(scene: Scene) -> None:
    scene.left.note(["h2"], [("h0", "h2")])
    assert (scene.left.recent(), scene.left.pairs()) == ({"h2"}, {("h0", "h2")})
    scene.now += AVOIDED_S
    assert (scene.left.recent(), scene.left.pairs()) == (set(), set())


def test_a_reason_names_few_pairs() -> None:
    text = cut_links._text([(f"a{n}", f"b{n}") for n in range(8, -1, -1)])
    assert text.count("do not reach each other") == NAMED_PAIRS
    assert text.startswith("a0 and b0 do not reach each other; a1 and b1")
    assert text.endswith("; nor do 6 other pairs of hosts")
