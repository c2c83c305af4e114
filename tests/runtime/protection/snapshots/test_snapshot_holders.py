# SPDX-License-Identifier: Apache-2.0
"""Which hosts keep the snapshots of a job, and what people learn if none can, or one is lost."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from due_scene import OFTEN, Scene, scene, soon

from liveshift.errors import Refused
from liveshift.runtime.fleet.fleet import Fleet
from liveshift.runtime.protection import protection as module

__all__ = ["scene", "soon"]


def both_may_hold(state: Path) -> Scene:
    """All capsules are on h0, so h1 and h2 can both hold. Snapshots are far apart."""
    scene = Scene(state, OFTEN.replace("every = 1", "every = 3600"))
    for capsule in scene.job.capsules.values():
        scene.fleet.journal.hand_over(capsule.name, "h0", capsule.epoch)
        capsule.host = "h0"
    return scene


def test_without_a_host_that_can_hold_it_a_job_is_unprotected_in_words(scene: Scene) -> None:
    scene.run(lambda: scene.job.unprotected, without="h2")
    assert "no host can hold its snapshots" in scene.row().why_not
    assert "h2 is not up" in scene.row().why_not
    assert [kind for kind, _ in scene.events()].count("unprotected") == 1
    assert scene.stage.said == []


def test_that_no_host_can_hold_it_is_said_before_the_first_snapshot_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_S", 3600.0)
    scene = Scene(tmp_path, OFTEN.replace("every = 1", "every = 3600"))
    scene.run(lambda: scene.events(), without="h2")
    assert [kind for kind, _ in scene.events()] == ["unprotected"]
    scene.run(lambda: not scene.job.unprotected)
    assert scene.row().why_not == "no snapshot is complete yet"
    assert scene.stage.said == [], "it is not due yet"


def test_as_soon_as_a_host_can_hold_it_a_job_is_protected(tmp_path: Path) -> None:
    scene = Scene(tmp_path, OFTEN.replace("every = 1", "every = 3600"))
    scene.run(lambda: scene.job.unprotected, without="h2")
    scene.run(lambda: scene.stage.completed)
    assert [kind for kind, _ in scene.events()] == ["unprotected", "protected"]
    assert (scene.row().why_not, scene.row().trouble) == ("", "")


def test_a_job_that_did_not_fit_is_unharmed_and_protected_once_it_does(scene: Scene) -> None:
    refusal = Refused("h2 cannot hold s1.1 of a/1", hint="it fits if snapshots.memory is 2 GB")
    scene.stage.fail("Hold a/1", refusal)
    scene.run(lambda: scene.job.unprotected)
    assert scene.row().why_not == f"{refusal} ({refusal.hint})"
    assert scene.events() == [("unprotected", f"not protected: {refusal} ({refusal.hint})")]
    assert not {"close gates", "LockCapsule a/0", "DumpCapsule a/0"} & set(scene.stage.said)
    scene.run(lambda: scene.stage.completed)
    assert scene.row().why_not == ""
    assert scene.events()[1:] == [("protected", "protected: a snapshot every 1 s, held by h2")]


def test_a_job_that_does_not_fit_is_noted_once_whatever_its_size(scene: Scene) -> None:
    sizes = [f"h2 cannot hold the image of a/1: it takes {n / 10} MB" for n in range(13, 500)]
    scene.stage.fail("Hold a/1", *map(Refused, sizes))
    scene.run(lambda: scene.job.unprotected.endswith("1.5 MB"))
    assert scene.row().why_not == sizes[2], "status has the newest size"
    assert scene.events() == [("unprotected", f"not protected: {sizes[0]}")]


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Fleet]:
    """Returns what gets an entry with each call of that method of a fleet."""
    calls: list[Fleet] = []
    method = getattr(Fleet, name)

    def counting(fleet: Fleet) -> object:
        calls.append(fleet)
        return method(fleet)

    monkeypatch.setattr(Fleet, name, counting)
    return calls


def test_protected_jobs_do_not_each_look_at_all_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be a thousand of both, and they are looked at several times a second."""
    scene = Scene(tmp_path, OFTEN.replace("every = 1", "every = 3600"))
    scene.run(lambda: scene.stage.completed)
    monkeypatch.setattr(module, "FIRST_S", 3600.0)
    for n in range(50):
        other = replace(scene.job, name=f"b{n}")
        scene.fleet.jobs[other.name] = other
    looks = counted(monkeypatch, "views")
    scene.run(lambda: len(looks) >= 50)  # each of them, once
    looks.clear()
    ticks = counted(monkeypatch, "up")
    scene.run(lambda: len(ticks) > 20)
    assert looks == []
    assert len(scene.protection._states) == 51


def test_a_holder_of_the_same_failure_domain_is_not_taken(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    h0, *others = scene.fleet.cluster.hosts
    hosts = (h0, *(replace(host, domain="rack-1") for host in others))
    scene.fleet.cluster = replace(scene.fleet.cluster, hosts=hosts)
    scene.run(lambda: scene.job.unprotected)
    assert "h2 is in one failure domain with h1" in scene.row().why_not


def test_a_holder_that_is_lost_shows_at_once(scene: Scene) -> None:
    scene.run(lambda: scene.stage.completed)
    scene.run(lambda: any("not up" in text for _, text in scene.events()), without="h2")
    assert scene.row().why_not == "h2, which keeps s1, is not up"
    assert ("unprotected", "not protected: h2, which keeps s1, is not up") in scene.events()


def test_a_holder_that_is_lost_is_replaced_at_once(tmp_path: Path) -> None:
    scene = both_may_hold(tmp_path)
    scene.run(lambda: scene.stage.completed)
    assert scene.row().holders == ["h1", "h2"], "the images are spread"
    scene.run(lambda: len(scene.stage.completed) == 2, without="h2")
    assert scene.row().holders == ["h1"]
    assert [kind for kind, _ in scene.events()] == ["protected", "unprotected", "protected"]


def test_a_holder_that_was_switched_off_and_is_back_gets_the_next_snapshot_at_once(
    tmp_path: Path,
) -> None:
    """It is up, and perhaps nobody has missed it."""
    scene = Scene(tmp_path, OFTEN.replace("every = 1", "every = 3600"))
    scene.run(lambda: scene.stage.completed)
    scene.fleet.hosts["h2"].lost = frozenset({"s1.1"})
    assert scene.row().why_not == "h2, which kept s1, has lost its memory since"
    scene.run(lambda: len(scene.stage.completed) == 2)
    assert (scene.row().newest, scene.row().why_not) == ("s2", "")
    assert [kind for kind, _ in scene.events()] == ["protected", "unprotected", "protected"]


def test_a_host_that_a_job_has_left_for_its_links_holds_only_if_no_other_can(
    tmp_path: Path,
) -> None:
    scene = both_may_hold(tmp_path)
    snapshots = scene.snapshots
    for held in scene.fleet.hosts.values():
        held.heard = time.monotonic()
    assert snapshots.holders(scene.job) == {"a/0": "h1", "a/1": "h2"}
    scene.fleet.left_hosts.note(["h1"], [])
    assert snapshots.holders(scene.job) == {"a/0": "h2", "a/1": "h2"}
    scene.fleet.left_hosts.note(["h2"], [])
    assert snapshots.holders(scene.job) == {"a/0": "h1", "a/1": "h2"}


def test_a_holder_that_is_short_of_memory_is_replaced_at_once(tmp_path: Path) -> None:
    scene = both_may_hold(tmp_path)
    scene.run(lambda: scene.stage.completed)
    scene.fleet.hosts["h2"].memory_left = 0.04
    scene.run(lambda: len(scene.stage.completed) == 2)
    assert scene.row().holders == ["h1"]
    assert scene.row().why_not == ""
    short = "not protected: h2, which keeps s1, is short of memory"
    assert ("unprotected", short) in scene.events()


def test_a_holder_that_alone_can_hold_keeps_what_it_has_until_it_needs_the_memory(
    scene: Scene,
) -> None:
    scene.run(lambda: scene.stage.completed)
    scene.fleet.hosts["h2"].memory_left = 0.04
    scene.run(lambda: "no host can hold" in scene.job.unprotected)
    assert "h2 is short of memory (4.0% is left)" in scene.job.unprotected
    assert (scene.row().newest, scene.row().why_not) == (
        "s1",
        "h2, which keeps s1, is short of memory",
    )
    scene.fleet.hosts["h2"].memory_left = 0.01
    scene.run(lambda: scene.job.newest is None)
    assert scene.fleet.journal.snapshots.newest("a") is None
    dropped = "not protected: s1 is dropped, h2 needs its memory for what runs there"
    assert ("unprotected", dropped) in scene.events()
    assert len(scene.stage.completed) == 1
    scene.fleet.hosts["h2"].memory_left = 0.5
    scene.run(lambda: len(scene.stage.completed) == 2)
    assert scene.row().why_not == ""


def test_a_holder_that_gets_a_capsule_shows_at_once(scene: Scene) -> None:
    scene.run(lambda: scene.stage.completed)
    for host in scene.fleet.hosts.values():
        host.heard = time.monotonic()
    scene.job.capsules["a/1"].host = "h2"
    assert scene.row().why_not == "h2 keeps s1, and a/1 runs there"
