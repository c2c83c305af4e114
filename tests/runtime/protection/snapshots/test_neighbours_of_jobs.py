# SPDX-License-Identifier: Apache-2.0
"""When the hosts of a job hold each other's images, since no other host can."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from due_scene import OFTEN, Scene, scene, soon
from fleet_scene import into_one_rack

from liveshift.errors import Refused
from liveshift.runtime import messages
from liveshift.runtime.protection import job_snapshots as module
from liveshift.runtime.protection.protection import STRONG_AT_FIRST

__all__ = ["scene", "soon"]

AMONG = {"a/0": ["h1", "h0"], "a/1": ["h0", "h1"]}
OUTSIDE = {"a/0": ["h2"], "a/1": ["h2"]}


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    monkeypatch.setattr(module, "AWAY_S", 0.0)


@pytest.mark.usefixtures("now")
def test_a_job_on_all_hosts_is_protected_by_itself(scene: Scene) -> None:
    scene.run(lambda: scene.stage.completed, without="h2")
    assert scene.job.newest is not None
    assert scene.job.newest.holders == AMONG
    assert (scene.row().holders, scene.row().why_not) == (["h0", "h1"], "")
    assert scene.events()[-1] == ("protected", "protected: a snapshot every 1 s, held by h0, h1")
    own = [m for _, m in scene.stage.asked if isinstance(m, messages.Hold) and m.own]
    assert {m.stays for m in own} == {True}


def test_a_host_that_is_away_for_a_moment_is_waited_for(scene: Scene) -> None:
    scene.run(lambda: scene.job.unprotected, without="h2")
    assert "h2 is not up" in scene.job.unprotected
    scene.run(lambda: scene.stage.completed)
    assert scene.job.newest is not None
    assert scene.job.newest.holders == OUTSIDE


SELDOM = OFTEN.replace("every = 1", "every = 3600")


@pytest.mark.parametrize("settings", [OFTEN, SELDOM])
def test_if_it_stays_away_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str
) -> None:
    monkeypatch.setattr(module, "AWAY_S", 3.0)
    scene = Scene(tmp_path, settings)
    scene.run(lambda: scene.stage.completed)
    away = time.monotonic()
    scene.run(lambda: scene.row().holders == ["h0", "h1"], without="h2")
    assert time.monotonic() - away > 3.0
    assert scene.row().why_not == ""


@pytest.mark.parametrize("away", [True, False])
def test_a_host_that_is_away_is_waited_for_longer_than_one_that_has_no_room(
    scene: Scene, away: bool
) -> None:
    for name, host in scene.fleet.hosts.items():
        host.heard = 0.0 if away and name == "h2" else float("inf")
    search = scene.snapshots._search(scene.job)
    search.refused["h2"] = time.monotonic()  # if it is not away

    def chosen(without_s: float) -> bool:
        """Whether the job's own hosts are chosen after so many seconds."""
        search.without = time.monotonic() - without_s
        return scene.snapshots.holders(scene.job) == {"a/0": "h1", "a/1": "h0"}

    assert not chosen(1.9)  # suspicion is 1 s
    assert chosen(2.1) == (not away)
    assert chosen(9.0) == (not away)
    assert chosen(10.1)


@pytest.mark.usefixtures("now")
def test_images_that_lie_well_do_not_go_to_and_fro(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.run(lambda: scene.stage.completed, without="h2")
    scene.run(lambda: len(scene.stage.completed) == 3)
    assert [made.holders for made in scene.stage.completed] == [AMONG] * 3
    monkeypatch.setattr(module, "STEADY_S", 0.5)
    scene.run(lambda: scene.stage.completed[-1].holders == OUTSIDE)


def test_a_job_of_the_same_name_begins_anew(scene: Scene) -> None:
    for name in ("h0", "h1"):
        scene.fleet.hosts[name].heard = float("inf")
    search = scene.snapshots._search(scene.job)
    search.refused["h0"], search.without = time.monotonic(), 1.0
    assert scene.snapshots.holders(scene.job) == {"a/0": "h1", "a/1": "h0"}
    scene.fleet.jobs["a"] = replace(scene.job)
    assert isinstance(scene.snapshots.holders(scene.job), str)


def test_an_order_does_not_wait(scene: Scene) -> None:
    def up(*names: str) -> None:
        for name, host in scene.fleet.hosts.items():
            host.heard = float("inf") if name in names else 0.0

    up("h0", "h1")
    assert isinstance(scene.snapshots.holders(scene.job), str)
    assert scene.snapshots.holders(scene.job, ordered=True) == {"a/0": "h1", "a/1": "h0"}
    up("h0", "h1", "h2")
    assert scene.snapshots.holders(scene.job, ordered=True) == {"a/0": "h2", "a/1": "h2"}


def test_what_is_saved_needs_no_other_host(scene: Scene) -> None:
    for capsule in scene.job.capsules.values():
        capsule.host = "h0"
    scene.fleet.hosts["h0"].heard = float("inf")
    assert isinstance(scene.snapshots.holders(scene.job, ordered=True), str)
    held = scene.snapshots.holders(scene.job, ordered=True, alone=True)
    assert held == {"a/0": "h0", "a/1": "h0"}


@pytest.mark.usefixtures("now")
def test_a_host_without_room_does_not_keep_a_job_from_its_neighbours(scene: Scene) -> None:
    """It is asked once more, and not again before each snapshot: all memory would go to and
    fro."""
    scene.stage.fail("Hold a/1", *[Refused("h2 cannot hold s1.1 of a/1")] * 2)
    scene.run(lambda: len(scene.stage.completed) == 3)
    assert [made.holders for made in scene.stage.completed] == [AMONG] * 3
    kinds = [kind for kind, _ in scene.events()]
    assert kinds == ["unprotected", "protected"]


@pytest.mark.usefixtures("now")
def test_a_host_without_room_is_asked_again_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.stage.fail("Hold a/1", *[Refused("h2 cannot hold s1.1 of a/1")] * 2)
    scene.run(lambda: scene.stage.completed)
    monkeypatch.setattr(module, "STEADY_S", 0.0)
    scene.run(lambda: len(scene.stage.completed) == 2)
    assert [made.holders for made in scene.stage.completed] == [AMONG, OUTSIDE]


@pytest.mark.usefixtures("now")
def test_without_a_copy_at_home_a_neighbour_is_no_protection(tmp_path: Path) -> None:
    """A further snapshot is no better, so it does not come any sooner."""
    scene = Scene(tmp_path, SELDOM)
    scene.stage.fail("HoldOwn a/0", *[Refused("h0 has no memory for it")] * 50)
    scene.run(lambda: scene.stage.completed, without="h2")
    until = time.monotonic() + 0.5
    scene.run(lambda: time.monotonic() > until, without="h2")
    assert len(scene.stage.completed) == 1
    assert [kind for kind, _ in scene.events()][-1] == "unprotected"
    assert scene.job.newest is not None
    assert scene.job.newest.holders == {**AMONG, "a/0": ["h1"]}
    assert scene.row().why_not == "h1 keeps s1, and a/1 runs there"


@pytest.mark.usefixtures("now")
def test_a_neighbour_of_the_same_failure_domain_is_none(tmp_path: Path) -> None:
    scene = Scene(tmp_path, OFTEN)
    into_one_rack(scene.fleet, "h0", "h1", "h2")
    scene.run(lambda: scene.job.unprotected)
    assert "h2 is in one failure domain with h0" in scene.row().why_not
    assert scene.stage.completed == []


@pytest.mark.usefixtures("now")
def test_after_a_move_to_another_host_both_copies_count(scene: Scene) -> None:
    scene.run(lambda: scene.stage.completed, without="h2")
    scene.job.capsules["a/0"].host = "h2"
    for host in scene.fleet.hosts.values():
        host.heard = float("inf")
    assert scene.row().why_not == ""
    scene.fleet.hosts["h1"].lost = frozenset({"s1.0"})
    assert scene.row().why_not == "h1, which kept s1, has lost its memory since"


@pytest.mark.usefixtures("now")
def test_neighbours_without_room_are_asked_again_and_named(scene: Scene) -> None:
    refusal = Refused("h0 cannot hold the image of a/1", hint="it fits if snapshots.memory is 2 GB")
    scene.stage.fail("Hold a/1", *[refusal] * 3)
    scene.run(lambda: "h0 cannot" in scene.job.unprotected, without="h2")
    scene.run(lambda: scene.stage.fails["Hold a/1"] == [], without="h2")
    assert scene.row().why_not == f"{refusal} ({refusal.hint})"
    scene.run(lambda: scene.stage.completed, without="h2")
    assert scene.row().why_not == ""


@pytest.mark.usefixtures("now")
def test_one_copy_replaces_two_only_if_two_cannot_be_had_for_long(scene: Scene) -> None:
    scene.run(lambda: scene.stage.completed, without="h2")
    scene.stage.fail("HoldOwn a/0", *[Refused("h0 has no memory for it")] * 50)
    scene.run(lambda: len(scene.stage.completed) == 3, without="h2")
    assert scene.stage.completed[1].holders == {**AMONG, "a/0": ["h1"]}
    assert scene.stage.said.count("HoldOwn a/0") == 3 + STRONG_AT_FIRST
    assert scene.row().why_not == "h1 keeps s6, and a/1 runs there"
    told = [text for kind, text in scene.events() if kind == "unprotected" and "keeps" in text]
    assert len(told) == 1, "the next snapshot is no news"
