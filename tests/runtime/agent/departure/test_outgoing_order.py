# SPDX-License-Identifier: Apache-2.0
"""What a freeze does in which order: the network is shut before CRIU looks, and opens last."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from liveshift.errors import StepFailed
from liveshift.runtime.agent.departure import outgoing_migration
from liveshift.runtime.agent.departure.outgoing_migration import PROMISED, OutgoingMigration

INIT = 4711
LOCKED, OPENED = f"lock {INIT}", f"unlock {INIT}"


class Scene:
    """A departure whose CRIU, wire and network only say what they were asked for."""

    def __init__(self, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.fails = ""
        self._images = images
        plan = SimpleNamespace(tmp=images / "tmp", log=images / "log")
        sandbox: Any = SimpleNamespace(plan=plan, init=INIT, root=images, alive=lambda: True)
        sandbox.pipe_inode = lambda fd: fd
        resident: Any = SimpleNamespace(sandbox=sandbox, spec=SimpleNamespace(name="gpt/1"))
        factory: Any = SimpleNamespace(
            placement=SimpleNamespace(carried=[]), images=lambda _migration: images
        )
        wire: Any = SimpleNamespace(
            finish=self.note("all is there"),
            send=None,
            streams={},
            bytes=0,
            send_manifest=self.note("manifest"),
            close=lambda: None,
        )
        self.departure = OutgoingMigration("m1", resident, factory, wire)
        for name in ("dump", "thaw", "pin"):
            monkeypatch.setattr(self.departure._frozen, name, self.note(name))
        monkeypatch.setattr(self.departure, "_send_changes", dict)
        log: Any = SimpleNamespace(
            finish=lambda _send: None, close=lambda: None, send_new=lambda _send: None
        )
        self.departure._log = log
        self.passing: list[list[tuple[str, str]]] = []
        self.entries: list[object] = []
        self.stale: list[list[tuple[str, str]]] = []
        take = lambda looks: looks.pop(0) if len(looks) > 1 else [*looks, []][0]  # noqa: E731
        monkeypatch.setattr(outgoing_migration, "passing", lambda *_: take(self.passing))
        monkeypatch.setattr(outgoing_migration, "in_order", lambda *_: {})
        find = lambda _tree: (self.entries, take(self.stale))  # noqa: E731
        monkeypatch.setattr(outgoing_migration.epoll_sets, "find", find)
        monkeypatch.setattr(outgoing_migration.file_locks, "LOOK_S", 0.001)
        monkeypatch.setattr(outgoing_migration.output, "settle", lambda _sandbox: None)
        monkeypatch.setattr(outgoing_migration.carried_out, "remember", lambda *_: None)
        monkeypatch.setattr(outgoing_migration, "has_cuda", lambda _resident: False)
        for name in ("lock", "unlock"):
            noted = lambda pid, name=name: self.note(f"{name} {pid}")()  # noqa: E731
            monkeypatch.setattr(outgoing_migration.network, name, noted)

    def note(self, what: str) -> Callable[..., None]:
        def do(*_: object) -> None:
            promised = " after the promise" if (self._images / PROMISED).exists() else ""
            self.done.append(what + promised)
            if what == self.fails:
                raise StepFailed("freeze", f"{what} failed")

        return do

    def freeze(self) -> list[str]:
        criu: Any = None
        with contextlib.suppress(StepFailed):
            self.departure.freeze(criu, 10.0)
        return self.done


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path / "images", monkeypatch)


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
    assert scene.departure.promised


@pytest.mark.parametrize("fails", ["dump", "all is there"])
def test_when_a_freeze_fails_the_tasks_run_before_the_network_opens(
    scene: Scene, fails: str
) -> None:
    scene.fails = fails
    assert scene.freeze()[-2:] == ["thaw", OPENED]
    assert scene.done[:2] == [LOCKED, "dump"]
    assert not scene.departure.promised


def test_a_network_that_cannot_be_shut_ends_the_freeze_before_the_dump(scene: Scene) -> None:
    scene.fails = LOCKED
    assert scene.freeze() == [LOCKED, "thaw"]


def held(path: str) -> list[tuple[str, str]]:
    return [(f"process 7 holds a lock on {path}", "release it")]


def test_a_lock_that_is_let_go_of_within_a_moment_costs_no_move(scene: Scene) -> None:
    scene.passing = [held("/a"), held("/b"), held("/a"), []]
    assert scene.freeze()[:2] == [LOCKED, "dump"]
    assert scene.departure.promised
    assert scene.passing == [[]], "it has looked until there was none"


def test_before_the_ranks_are_stopped_a_moment_without_a_lock_is_waited_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing_migration.network, "prepare_lock", lambda _init: None)
    scene.departure._trees = []
    scene.passing = [held("/a"), held("/b"), []]
    scene.departure.precopy(time.monotonic() + 60)
    assert scene.passing == [[]]
    scene.passing, began = [held("/a")], time.monotonic()
    monkeypatch.setattr(outgoing_migration, "UNLOCKED_S", 0.1)
    scene.departure.precopy(time.monotonic() + 60)
    assert 0.1 < time.monotonic() - began < 2, "not for ever: the last look decides"
    scene.departure.abandon()
    monkeypatch.setattr(outgoing_migration, "UNLOCKED_S", 60)
    scene.departure.precopy(time.monotonic() + 60)


def test_a_lock_that_stays_is_found_before_criu_begins(scene: Scene) -> None:
    scene.passing = [held("/a")]
    criu: Any = None
    began = time.monotonic()
    with pytest.raises(StepFailed, match="at that moment process 7 holds a lock on /a") as no:
        scene.departure.freeze(criu, 10.0)
    assert time.monotonic() - began < 1
    assert no.value.hint == "release it"
    assert scene.done == [LOCKED, "thaw", OPENED]


def test_what_an_epoll_set_holds_since_the_pre_copy_is_taken_out_too(scene: Scene) -> None:
    scene.entries = ["an entry that was born later"]
    asked: list[object] = []
    dump: Any = lambda *given: asked.extend(given[-1])  # noqa: E731
    scene.departure._frozen.dump = dump  # type: ignore[method-assign]
    scene.freeze()
    assert asked == scene.entries


def test_what_an_epoll_set_holds_and_nobody_has_is_found_before_criu_begins(scene: Scene) -> None:
    scene.stale = [[("process 7 has an epoll set", "take it out")]]
    criu: Any = None
    with pytest.raises(StepFailed, match="freeze: process 7 has an epoll set") as no:
        scene.departure.freeze(criu, 10.0)
    assert no.value.hint == "take it out"
    assert scene.done == [LOCKED, "thaw", OPENED]


def test_what_only_seemed_so_at_one_look_is_none(scene: Scene) -> None:
    scene.stale = [[("process 7 has an epoll set", "take it out")], []]
    assert scene.freeze()[:2] == [LOCKED, "dump"]
    assert scene.departure.promised


def test_after_the_promise_nothing_goes_on_by_itself(scene: Scene) -> None:
    scene.fails = "manifest"
    assert scene.freeze()[-1] == "manifest after the promise"
    assert OPENED not in scene.done
    assert "thaw" not in scene.done
