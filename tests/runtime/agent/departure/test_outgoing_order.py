# SPDX-License-Identifier: Apache-2.0
"""What a freeze does in which order: the network is shut before CRIU looks, and opens last."""

from __future__ import annotations

import time
from typing import Any

import pytest
from outgoing_scene import LOCKED, OPENED, Scene, scene

from liveshift.criu_glue.survey import undelivered, unwaited
from liveshift.errors import StepFailed
from liveshift.runtime.agent.departure import freeze_obstacles

__all__ = ["scene"]


def test_the_network_is_shut_before_the_dump_and_stays_so(scene: Scene) -> None:
    """What a peer sends to an open socket of a frozen tree is acknowledged by the kernel, and is
    not in the image."""
    assert scene.freeze() == [
        LOCKED,
        "dump",
        "all is there",
        "pin",
        "manifest after the promise",
        "all is there after the promise",
    ]
    assert scene.outgoing.promised


@pytest.mark.parametrize("fails", ["dump", "all is there"])
def test_when_a_freeze_fails_the_tasks_run_before_the_network_opens(
    scene: Scene, fails: str
) -> None:
    scene.fails = fails
    assert scene.freeze()[-2:] == ["thaw", OPENED]
    assert scene.steps[:2] == [LOCKED, "dump"]
    assert not scene.outgoing.promised


def test_a_network_that_cannot_be_shut_ends_the_freeze_before_the_dump(scene: Scene) -> None:
    scene.fails = LOCKED
    assert scene.freeze() == [LOCKED, "thaw"]


def held(path: str) -> list[tuple[str, str]]:
    return [(f"process 7 holds a lock on {path}", "release it")]


def test_a_lock_that_is_let_go_of_within_a_moment_costs_no_move(scene: Scene) -> None:
    scene.passing = [held("/a"), held("/b"), held("/a"), []]
    assert scene.freeze()[:2] == [LOCKED, "dump"]
    assert scene.outgoing.promised
    assert scene.passing == [[]], "it has looked until there was none"


def test_before_the_ranks_are_stopped_a_moment_without_a_lock_is_waited_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.outgoing._files._trees = []
    scene.passing = [held("/a"), held("/b"), []]
    scene.precopy()
    assert scene.passing == [[]]
    scene.passing, began = [held("/a")], time.monotonic()
    monkeypatch.setattr(freeze_obstacles, "UNLOCKED_S", 0.1)
    scene.precopy()
    assert 0.1 < time.monotonic() - began < 2, "not for ever: the last look decides"
    scene.outgoing.abandon()
    monkeypatch.setattr(freeze_obstacles, "UNLOCKED_S", 60)
    scene.precopy()


def test_a_lock_that_stays_is_found_before_criu_begins(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freeze_obstacles, "UNLOCKED_S", 60.0)
    monkeypatch.setattr(freeze_obstacles, "UNLOCKED_FROZEN_S", 0.3)
    scene.passing = [held("/a")]
    criu: Any = None
    began = time.monotonic()
    with pytest.raises(StepFailed, match="at that moment process 7 holds a lock on /a") as no:
        scene.outgoing.freeze(criu, 10.0)
    assert 0.3 <= time.monotonic() - began < 60, "the job stands meanwhile"
    assert no.value.hint == "release it"
    assert scene.steps == [LOCKED, "thaw", OPENED]


def test_a_connection_that_was_closed_behind_the_lock_keeps_the_capsule_here(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end has not reached the peer, and the tree's socket has gone."""
    found = [("a closed connection to 10.99.1.3:7 has data that the peer lacks", "wait")]
    monkeypatch.setattr(undelivered, "find", lambda _pid: found)
    criu: Any = None
    with pytest.raises(StepFailed, match="freeze: at that moment a closed connection to") as no:
        scene.outgoing.freeze(criu, 10.0)
    assert no.value.hint == "wait"
    assert scene.steps[-2:] == ["thaw", OPENED]


def test_a_child_that_ended_while_criu_froze_the_tree_keeps_the_capsule_here(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRIU would alter the status for which its parent has not waited."""
    monkeypatch.setattr(unwaited, "find", lambda _: [("process 8 has ended with code 137", "wait")])
    criu: Any = None
    with pytest.raises(StepFailed, match="freeze: at that moment process 8 has ended") as no:
        scene.outgoing.freeze(criu, 10.0)
    assert no.value.hint == "wait"
    assert "dump" in scene.steps
    assert scene.steps[-2:] == ["thaw", OPENED]


def test_what_an_epoll_set_holds_since_the_pre_copy_is_taken_out_too(scene: Scene) -> None:
    scene.entries = ["an entry that was born later"]
    asked: list[object] = []
    dump: Any = lambda *given: asked.extend(given[-1])  # noqa: E731
    scene.outgoing._frozen.tree.dump = dump  # type: ignore[method-assign]
    scene.freeze()
    assert asked == scene.entries


def test_what_an_epoll_set_holds_and_nobody_has_is_found_before_criu_begins(scene: Scene) -> None:
    scene.stale = [[("process 7 has an epoll set", "take it out")]]
    criu: Any = None
    with pytest.raises(StepFailed, match="freeze: process 7 has an epoll set") as no:
        scene.outgoing.freeze(criu, 10.0)
    assert no.value.hint == "take it out"
    assert scene.steps == [LOCKED, "thaw", OPENED]


def test_what_only_seemed_so_at_one_look_is_none(scene: Scene) -> None:
    scene.stale = [[("process 7 has an epoll set", "take it out")], []]
    assert scene.freeze()[:2] == [LOCKED, "dump"]
    assert scene.outgoing.promised


def test_after_the_promise_nothing_goes_on_by_itself(scene: Scene) -> None:
    scene.fails = "manifest"
    assert scene.freeze()[-1] == "manifest after the promise"
    assert not any(step.startswith(("thaw", OPENED)) for step in scene.done)
